use crate::ops::{add, rms_norm};
use crate::{Cpu, KernelError, Tensor};

/// The sum and its norm, all f32.
pub(super) fn add_rms_norm(
    cpu: &Cpu,
    h: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
) -> Result<(Tensor, Tensor), KernelError> {
    let sum = add::cpu::add(cpu, h, x)?;
    let y = rms_norm::cpu::rms_norm(cpu, &sum, None, weight, eps)?;
    Ok((sum, y))
}
