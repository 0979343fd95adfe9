//! Addition, as the residual stream does it.

mod bench;
mod cpu;
#[cfg(test)]
mod tests;

use super::check::Check;
use crate::{Device, KernelError, Tensor};

/// `z = x + y`, element by element; a `y` of one dimension is added to each row, as a linear layer's bias is.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | any | f32, f16, bf16 |
/// | y | x's, or `[D]` where x is `[.., D]` | f32, f16, bf16 |
/// | z | x's | x's |
///
/// The sum is f32, rounded once to x's dtype.
///
/// # Errors
/// [`KernelError::Shape`] for different shapes, [`KernelError::Value`] for other dtypes.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("add");
    let (dtype, x) = (x.dtype(), check.widened("x", x)?);
    let is_row = y.shape().len() == 1 && y.shape().last() == x.shape().last();
    if !is_row {
        check.shape("y", y, x.shape(), || "x".into())?;
    }
    let y = check.widened("y", y)?;
    match x.device() {
        Device::Gpu(gpu) => Err(check.unsupported(gpu)),
        Device::Cpu(cpu) if y.shape() != x.shape() => cpu::add_row(cpu, &x, &y)?.cast(dtype),
        Device::Cpu(cpu) => cpu::add(cpu, &x, &y)?.cast(dtype),
    }
}
