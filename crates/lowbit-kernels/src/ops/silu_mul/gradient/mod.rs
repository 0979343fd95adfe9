//! The gradients of [`silu_mul()`](super::silu_mul()).

#[cfg(feature = "gpu")]
pub(in crate::ops) mod gpu;
#[cfg(test)]
mod tests;

use super::SiluMul;
use crate::ops::check::Check;
use crate::ops::elementwise::{self, Gate};
use crate::simd::{Simd, math::Math, slices::Map};
use crate::{Device, KernelError, Tensor};

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
/// As [`silu_mul()`](super::silu_mul()), of dy too.
pub fn silu_mul_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<SiluMulGradient, KernelError> {
    SiluMul::check(gate, up)?;
    let check = Check("silu_mul_backward");
    check.shape("dy", dy, gate.shape(), || "gate".into())?;
    check.float("dy", dy)?;
    check.same_device("dy", dy.device(), gate.device())?;
    let (gate, up, wide) = (check.widened("gate", gate)?, check.widened("up", up)?, check.widened("dy", dy)?);
    let [dgate, dup] = match gate.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, [&gate, &up, &wide])?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => [
            elementwise::map(cpu, DGate, [&gate, &up, &wide])?,
            elementwise::map(cpu, SiluMul, [&gate, &wide])?,
        ],
    };
    Ok(SiluMulGradient { dgate: dgate.cast(dy.dtype())?, dup: dup.cast(dy.dtype())? })
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
