//! The gradients of [`silu_mul()`](super::silu_mul()).

use super::SiluMul;
use crate::ops::check::Check;
use crate::ops::elementwise::{self, Gate};
use crate::simd::{Simd, math::Math, slices::Map};
use crate::{KernelError, Tensor};

/// The gradients of [`silu_mul()`](super::silu_mul()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct SiluMulGradient {
    pub dgate: Tensor,
    pub dup: Tensor,
}

/// With `s = 1 / (1 + e^-gate)`, the gradients of `y = silu(gate) * up`, element by element:
///
/// ```text
/// dgate = dy * up * s * (1 + gate * (1 - s))
/// dup   = dy * silu(gate)
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | gate, up, dy | of one shape | f32, f16, bf16 |
/// | dgate, dup | gate's | dy's |
///
/// All arithmetic is f32, rounded once.
///
/// # Errors
/// As [`silu_mul()`](super::silu_mul()), of dy too; [`KernelError::Unsupported`] on a GPU.
pub fn silu_mul_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<SiluMulGradient, KernelError> {
    SiluMul::check(gate, up)?;
    let check = Check("silu_mul_backward");
    check.shape("dy", dy, gate.shape(), || "gate".into())?;
    check.float("dy", dy)?;
    check.same_device("dy", dy.device(), gate.device())?;
    let cpu = gate.device().as_cpu(check.0)?;
    let (gate, up, wide) = (check.widened("gate", gate)?, check.widened("up", up)?, check.widened("dy", dy)?);
    Ok(SiluMulGradient {
        dgate: elementwise::map(cpu, DGate, [&gate, &up, &wide])?.cast(dy.dtype())?,
        dup: elementwise::map(cpu, SiluMul, [&gate, &wide])?.cast(dy.dtype())?,
    })
}

struct DGate;

impl Map<3> for DGate {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [gate, up, dy]: [S::V; 3]) -> S::V {
        // 1 - s is sigmoid(-gate), which keeps its digits.
        let rest = simd.sigmoid(simd.sub(simd.splat(0.0), gate));
        let slope = simd.mul(simd.sigmoid(gate), simd.mul_add(gate, rest, simd.splat(1.0)));
        simd.mul(simd.mul(dy, up), slope)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rms_norm::gradient::reference::silu_and_slope;
    use crate::ops::testing::{
        FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, dot, normal,
    };
    use numcheck::{Random, gamma};

    /// The gradients in f64, and the magnitude of what makes each: `[dgate, dup]`.
    fn reference(gate: &[f32], up: &[f32], dy: &[f32]) -> [(Vec<f64>, Vec<f64>); 2] {
        let each = |f: &dyn Fn(f64, f64, f64) -> (f64, f64)| {
            let triples = gate.iter().zip(up).zip(dy);
            triples.map(|((&gate, &up), &dy)| f(gate.into(), up.into(), dy.into())).unzip()
        };
        let dgate = each(&|gate, up, dy| {
            let (_, slope, magnitude) = silu_and_slope(gate);
            (dy * up * slope, (dy * up).abs() * magnitude)
        });
        [dgate, each(&|gate, _, dy| (dy * silu_and_slope(gate).0, (dy * silu_and_slope(gate).0).abs()))]
    }

    #[test]
    fn formulas_are_the_derivatives_of_the_forward_reference() {
        let mut random = Random::new(1);
        let [gate, up, dy] = [(); 3].map(|()| coarse(&mut random, 9));
        let [dgate, dup] = reference(&gate, &up, &dy);
        assert_derivatives("dgate", &gate, &dgate.0, |gate| dot(&SiluMul::references(gate, &up), &dy));
        assert_derivatives("dup", &up, &dup.0, |up| dot(&SiluMul::references(&gate, up), &dy));
    }

    #[test]
    fn agrees_with_f64() {
        let mut random = Random::new(2);
        for device in devices() {
            for width in WIDTHS {
                let (shape, dtype) = ([3, width], FLOATS[width % 3]);
                let (gate, gates) = normal(&mut random, &shape, FLOATS[(width + 1) % 3], &device);
                let (up, ups) = normal(&mut random, &shape, FLOATS[0], &device);
                let (dy, dys) = normal(&mut random, &shape, dtype, &device);
                let SiluMulGradient { dgate, dup } = silu_mul_backward(&gate, &up, &dy).unwrap();
                for (got, (want, magnitude)) in [dgate, dup].iter().zip(reference(&gates, &ups, &dys)) {
                    // Two sigmoids of 5 units each, and 6 products and sums.
                    assert_close(got, &shape, dtype, &want, |i| gamma(16) * magnitude[i]);
                }
            }
        }
    }

    #[test]
    fn gates_far_from_zero_and_refusals() {
        let device = device();
        let gate = Tensor::new(&[-1e30f32, -200.0, 200.0, 1e30], &[4], &device).unwrap();
        let one = Tensor::new(&[1f32; 4], &[4], &device).unwrap();
        let SiluMulGradient { dgate, .. } = silu_mul_backward(&gate, &one, &one).unwrap();
        assert_eq!(dgate.as_slice::<f32>().unwrap(), [0.0, 0.0, 1.0, 1.0]);
        let error = silu_mul_backward(&gate, &one, &one.rows(0, 3).unwrap()).unwrap_err();
        assert_eq!(error.to_string(), "silu_mul_backward: dy is [3], but gate wants [4]");
    }
}
