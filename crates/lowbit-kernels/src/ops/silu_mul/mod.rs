//! The SwiGLU gate.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use super::check::Check;
use crate::{Device, KernelError, Tensor};

/// `y = silu(gate) * up`, element by element, with `silu(x) = x / (1 + e^-x)`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | gate | any | f32, f16, bf16 |
/// | up | gate's | f32, f16, bf16 |
/// | y | gate's | gate's |
///
/// All in f32, rounded once to gate's dtype. Source: mlx-lm 0.32 `swiglu`.
///
/// # Errors
/// [`KernelError::Shape`] for different shapes, [`KernelError::Value`] for other dtypes.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor, KernelError> {
    let (check, dtype) = (check(gate, up)?, gate.dtype());
    match gate.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::silu_mul(check, gpu, gate, up),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            cpu::silu_mul(cpu, &check.widened("gate", gate)?, &check.widened("up", up)?)?.cast(dtype)
        }
    }
}

/// That the op takes these operands.
pub(super) fn check(gate: &Tensor, up: &Tensor) -> Result<Check, KernelError> {
    let check = Check("silu_mul");
    check.float("gate", gate)?;
    check.shape("up", up, gate.shape(), || "gate".into())?;
    check.float("up", up)?;
    check.same_device("up", up.device(), gate.device())?;
    Ok(check)
}
