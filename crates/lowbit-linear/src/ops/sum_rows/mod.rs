//! Sums over rows: the gradient of what is added to every row, as a bias is.

mod bench;
pub(in crate::ops) mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};

/// Rows that are added to each other before other rows: fixed, so that a sum does not depend on how
/// many threads there are.
pub const ROWS: usize = 64;

/// `y[d] = sum over rows of x[.., d]`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | f32, f16, bf16 |
/// | y | `[D]` | f32 |
///
/// All arithmetic is f32: 64 rows at a time in their order, then their sums, on a GPU again 64 at a
/// time. So a device gives the same bits in every run, and the CPU for every number of threads. No
/// rows have a sum of 0.
///
/// Source: torch `sum` over all dimensions but the last, as a linear layer's bias gets its
/// gradient.
///
/// # Errors
/// [`KernelError::Shape`] for an x without dimensions, [`KernelError::Value`] for other dtypes.
pub fn sum_rows(x: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("sum_rows");
    let Some(&width) = x.shape().last() else {
        return Err(check.shape_error("x", x, "[.., D] is wanted".into()));
    };
    check.float("x", x)?;
    match x.device() {
        _ if x.is_empty() => Tensor::allocate_zeros(&[width], lowbit_formats::DType::F32, x.device()),
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, x, width),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::sum_rows(cpu, &check.widened("x", x)?, width),
    }
}
