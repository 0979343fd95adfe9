//! Addition: of the residual stream, and of biases.

mod bench;
pub(super) mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
#[cfg(test)]
mod tests;

use super::Check;
use super::elementwise;
use crate::{Device, KernelError, Tensor};

/// `z = x + y`, element by element; a `y` of one dimension is added to each row, as a linear
/// layer's bias is.
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
    let dtype = check.float("x", x)?.dtype();
    let is_row = y.shape().len() == 1 && y.shape().last() == x.shape().last();
    if !is_row {
        check.shape("y", y, x.shape(), || "x".into())?;
    }
    check.float("y", y)?;
    check.same_device("y", y.device(), x.device())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::add(check, gpu, x, y),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (x, y) = (check.widened("x", x)?, check.widened("y", y)?);
            elementwise::map_rows(cpu, cpu::Add, &x, &y)?.cast(dtype)
        }
    }
}
