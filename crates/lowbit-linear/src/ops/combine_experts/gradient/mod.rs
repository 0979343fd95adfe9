//! The gradients of [`combine_experts()`](super::combine_experts()).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use crate::ops::Check;
use crate::simd::{Kernel, Simd, slices};
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("combine_experts_backward");

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
/// As [`combine_experts()`](super::combine_experts()); [`KernelError::Shape`] for a dy that does
/// not fit.
pub fn combine_experts_backward(
    x: &Tensor,
    weights: &Tensor,
    dy: &Tensor,
) -> Result<CombineExpertsGradient, KernelError> {
    let check = CHECK;
    let [tokens, _, n] = super::check(check, x, weights)?;
    check.shape("dy", dy, &[tokens, n], || format!("x {:?}", x.shape()))?;
    check.float("dy", dy)?;
    check.same_device("dy", dy.device(), x.device())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward(gpu, x, weights, dy),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => backward(cpu, x, weights, dy),
    }
}

fn backward(
    cpu: &Cpu,
    x: &Tensor,
    weights: &Tensor,
    dy: &Tensor,
) -> Result<CombineExpertsGradient, KernelError> {
    let (top_k, n) = (x.dim(1), x.dim(2));
    let (x, wide) = (CHECK.widened("x", x)?, CHECK.widened("dy", dy)?);
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
