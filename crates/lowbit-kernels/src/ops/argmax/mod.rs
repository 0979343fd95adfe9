//! The largest element of each row.

mod bench;
pub(crate) mod cpu;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};

/// `ids[..] = argmax_v x[.., v]`, the lowest id where several tie. This is greedy sampling.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., V]` | f32, f16, bf16 |
/// | ids | `[..]` | u32 |
///
/// # Errors
/// [`KernelError::Shape`] for an empty row, [`KernelError::Value`] for other dtypes, for NaN and
/// infinity (as in [`sample`](super::sample())) and for a row without a finite value.
pub fn argmax(x: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("argmax");
    let Some((1.., rows)) = x.shape().split_last() else {
        return Err(check.shape_error("x", x, "[.., V] with a V of at least 1 is wanted".into()));
    };
    let rows = rows.to_vec();
    let x = check.widened("x", x)?;
    match x.device() {
        Device::Gpu(gpu) => Err(check.unsupported(gpu)),
        Device::Cpu(cpu) => cpu::argmax(check, cpu, &x)?.reshape(&rows),
    }
}
