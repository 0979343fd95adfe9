//! The SwiGLU gate.

mod bench;
mod cpu;
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
    let check = Check("silu_mul");
    let (dtype, gate) = (gate.dtype(), check.widened("gate", gate)?);
    check.shape("up", up, gate.shape(), || "gate".into())?;
    let up = check.widened("up", up)?;
    match gate.device() {
        Device::Gpu(gpu) => Err(check.unsupported(gpu)),
        Device::Cpu(cpu) => cpu::silu_mul(cpu, &gate, &up)?.cast(dtype),
    }
}
