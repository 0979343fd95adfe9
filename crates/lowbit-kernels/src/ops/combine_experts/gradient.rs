//! The gradients of [`combine_experts()`](super::combine_experts()).

use crate::ops::Check;
use crate::simd::{Kernel, Simd, slices};
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// Tokens of a task.
const TOKENS: usize = 16;

/// The gradients of [`combine_experts()`](super::combine_experts()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct CombineExpertsGradient {
    pub dx: Tensor,
    pub dweights: Tensor,
}

/// ```text
/// dx[t, i, n]    = weights[t, i] * dy[t, n]
/// dweights[t, i] = sum over n of x[t, i, n] * dy[t, n]
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | `x`, `weights` | as in [`combine_experts()`](super::combine_experts()) | |
/// | `dy` | `[T, N]` | f32, f16 or bf16 |
/// | `dx` | `[T, top_k, N]` | as `dy` |
/// | `dweights` | `[T, top_k]` | f32 |
///
/// # Errors
/// As [`combine_experts()`](super::combine_experts()); [`KernelError::Shape`] for a dy that does not fit;
/// [`KernelError::Unsupported`] on a GPU.
pub fn combine_experts_backward(
    x: &Tensor,
    weights: &Tensor,
    dy: &Tensor,
) -> Result<CombineExpertsGradient, KernelError> {
    let check = Check("combine_experts_backward");
    let [tokens, top_k, n] = super::check(check, x, weights)?;
    check.shape("dy", dy, &[tokens, n], || format!("x {:?}", x.shape()))?;
    check.float("dy", dy)?;
    check.same_device("dy", dy.device(), x.device())?;
    let cpu = x.device().as_cpu(check.0)?;
    let (x, wide) = (check.widened("x", x)?, check.widened("dy", dy)?);
    let mut dx = Tensor::allocate(x.shape(), DType::F32, x.device())?;
    let mut dweights = Tensor::allocate_zeros(weights.shape(), DType::F32, x.device())?;
    if !x.is_empty() {
        let (x, weights, dy) = (x.as_slice::<f32>()?, weights.as_slice::<f32>()?, wide.as_slice::<f32>()?);
        let parts = dx.as_mut_slice::<f32>()?.chunks_mut(TOKENS * top_k * n);
        let parts = parts.zip(dweights.as_mut_slice::<f32>()?.chunks_mut(TOKENS * top_k));
        cpu.for_each(parts.enumerate().collect(), |(task, (dx, dweights))| {
            let first = task * TOKENS;
            let (x, weights) = (&x[first * top_k * n..], &weights[first * top_k..]);
            cpu.isa().dispatch(Tokens { x, weights, dy: &dy[first * n..], top_k, n, dx, dweights });
        });
    }
    Ok(CombineExpertsGradient { dx: dx.cast(dy.dtype())?, dweights })
}

/// Some tokens; operands may go on behind them.
struct Tokens<'a> {
    x: &'a [f32],
    weights: &'a [f32],
    dy: &'a [f32],
    top_k: usize,
    n: usize,
    dx: &'a mut [f32],
    dweights: &'a mut [f32],
}

impl Kernel for Tokens<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, weights, dy, top_k, n, dx, dweights } = self;
        let slots = x.chunks_exact(n).zip(weights).zip(dx.chunks_exact_mut(n).zip(dweights));
        for (slot, ((x, weight), (dx, dweight))) in slots.enumerate() {
            let dy = &dy[slot / top_k * n..][..n];
            dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = weight * dy);
            *dweight = slices::dot(simd, x, dy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::combine_experts::reference;
    use crate::ops::testing::{
        FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, normal,
    };
    use numcheck::{Random, gamma};

    /// `[dx, dweights]` in f64, and the magnitude of what makes each.
    fn reference(x: &[f32], weights: &[f32], dy: &[f32], top_k: usize) -> [(Vec<f64>, Vec<f64>); 2] {
        let n = x.len() / weights.len();
        let of = |slot: usize, i: usize| f64::from(dy[slot / top_k * n + i]);
        let dx: Vec<f64> = (0..x.len()).map(|at| f64::from(weights[at / n]) * of(at / n, at % n)).collect();
        let products = |slot: usize| (0..n).map(move |i| f64::from(x[slot * n + i]) * of(slot, i));
        let all = |f: fn(f64) -> f64| (0..weights.len()).map(|slot| products(slot).map(f).sum()).collect();
        [(dx.clone(), dx.iter().map(|dx| dx.abs()).collect()), (all(|x| x), all(f64::abs))]
    }

    #[test]
    fn formulas_are_the_derivatives_of_the_forward_reference() {
        let mut random = Random::new(1);
        let (top_k, n) = (3, 4);
        let (x, weights, dy) =
            (coarse(&mut random, 2 * top_k * n), coarse(&mut random, 2 * top_k), coarse(&mut random, 2 * n));
        let loss = |x: &[f32], weights: &[f32]| {
            let y = |at: usize| {
                let slots = at / n * top_k..(at / n + 1) * top_k;
                reference::combine_experts(slots.map(|s| (weights[s], x[s * n + at % n]))).0
            };
            (0..2 * n).map(|at| y(at) * f64::from(dy[at])).sum()
        };
        let [dx, dweights] = reference(&x, &weights, &dy, top_k);
        assert_derivatives("dx", &x, &dx.0, |x| loss(x, &weights));
        assert_derivatives("dweights", &weights, &dweights.0, |weights| loss(&x, weights));
    }

    #[test]
    fn agrees_with_f64() {
        let mut random = Random::new(2);
        for device in devices() {
            for n in WIDTHS {
                let (shape, dtype) = ([19, 3, n], FLOATS[n % 3]);
                let (x, xs) = normal(&mut random, &shape, FLOATS[(n + 1) % 3], &device);
                let (weights, ws) = normal(&mut random, &shape[..2], FLOATS[0], &device);
                let (dy, dys) = normal(&mut random, &[19, n], dtype, &device);
                let got = combine_experts_backward(&x, &weights, &dy).unwrap();
                let [dx, dweights] = reference(&xs, &ws, &dys, 3);
                assert_close(&got.dx, &shape, dtype, &dx.0, |i| gamma(1) * dx.1[i]);
                assert_close(&got.dweights, &[19, 3], FLOATS[0], &dweights.0, |i| gamma(n) * dweights.1[i]);
            }
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let device = device();
        let x = Tensor::new(&[0f32; 24], &[2, 3, 4], &device).unwrap();
        let weights = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
        let error = combine_experts_backward(&x, &weights, &weights).unwrap_err().to_string();
        assert_eq!(error, "combine_experts_backward: dy is [2, 3], but x [2, 3, 4] wants [2, 4]");
    }
}
