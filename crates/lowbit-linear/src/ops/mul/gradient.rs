use super::{is_row, mul};
use crate::ops::{Check, sum_rows};
use crate::{KernelError, Tensor};

/// The result of [`mul_backward`].
#[derive(Clone, Debug)]
pub struct MulGradient {
    /// Of x, in x's shape and dz's dtype.
    pub dx: Tensor,
    /// Of y, in y's shape: in dz's dtype, or f32 where y is one row for all of x's.
    pub dy: Tensor,
}

/// The gradient of [`mul()`]: `dx = dz * y`, `dy = dz * x`, which is summed over rows where y is
/// one row for all.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, y | as in [`mul()`] | f32, f16, bf16 |
/// | dz | x's | f32, f16, bf16 |
///
/// # Errors
/// As [`mul()`] and [`sum_rows()`].
pub fn mul_backward(x: &Tensor, y: &Tensor, dz: &Tensor) -> Result<MulGradient, KernelError> {
    let check = Check("mul_backward");
    check.shape("dz", dz, x.shape(), || "x".into())?;
    let products = mul(dz, x)?;
    let dy = if is_row(x, y) && x.shape() != y.shape() { sum_rows(&products)? } else { products };
    Ok(MulGradient { dx: mul(dz, y)?, dy })
}
