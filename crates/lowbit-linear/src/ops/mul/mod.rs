//! Products element by element: of the embedding with its scale, and of gates without a function.

mod bench;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
#[cfg(test)]
mod tests;

use super::Check;
use super::elementwise;
use crate::simd::{Simd, slices::Map};
use crate::{Device, KernelError, Tensor};
pub use gradient::{MulGradient, mul_backward};

/// `z = x * y`, element by element; a `y` of one dimension is multiplied with each row.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | any | f32, f16, bf16 |
/// | y | x's, or `[D]` where x is `[.., D]` | f32, f16, bf16 |
/// | z | x's | x's |
///
/// The product is f32, rounded once to x's dtype.
///
/// # Errors
/// [`KernelError::Shape`] for different shapes, [`KernelError::Value`] for other dtypes.
pub fn mul(x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("mul");
    let dtype = check.float("x", x)?.dtype();
    if !is_row(x, y) {
        check.shape("y", y, x.shape(), || "x".into())?;
    }
    check.float("y", y)?;
    check.same_device("y", y.device(), x.device())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::mul(check, gpu, x, y),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (x, y) = (check.widened("x", x)?, check.widened("y", y)?);
            elementwise::map_rows(cpu, Product, &x, &y)?.cast(dtype)
        }
    }
}

/// True if `y` is one row for all of x's.
fn is_row(x: &Tensor, y: &Tensor) -> bool {
    y.shape().len() == 1 && y.shape().last() == x.shape().last()
}

struct Product;

impl Map<2> for Product {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, y]: [S::V; 2]) -> S::V {
        simd.mul(x, y)
    }
}
