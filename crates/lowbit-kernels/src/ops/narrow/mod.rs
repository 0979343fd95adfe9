//! A copy of some columns.

mod bench;
#[cfg(test)]
mod tests;

use super::check::Check;
use crate::{KernelError, Tensor};

/// `y[.., i] = x[.., start + i]` for `i < len`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | any |
/// | y | `[.., len]` | x's |
///
/// Bits are copied. Source: torch `narrow` along the last dimension, made contiguous.
///
/// # Errors
/// [`KernelError::Shape`] when x has no such columns.
pub fn narrow(x: &Tensor, start: usize, len: usize) -> Result<Tensor, KernelError> {
    let check = Check("narrow");
    let Some((&width, rows)) = x.shape().split_last() else {
        return Err(check.shape_error("x", x, "[.., D] is wanted".into()));
    };
    if start.checked_add(len).is_none_or(|end| end > width) {
        return Err(check.shape_error("x", x, format!("columns {start} to {start} + {len} are wanted")));
    }
    let shape = [rows, &[len]].concat();
    if width == len {
        return x.reshape(&shape);
    }
    let cpu = x.device().as_cpu("narrow")?;
    let size = x.dtype().size();
    let (mut y, x) = (Tensor::empty(&shape, x.dtype(), x.device()), x);
    let bytes = x.bytes();
    cpu.for_each_rows(y.bytes_mut(), (len * size).max(1), len, |first, y| {
        let rows = bytes.chunks_exact(width * size).skip(first);
        for (x, y) in rows.zip(y.chunks_exact_mut(len * size)) {
            y.copy_from_slice(&x[start * size..(start + len) * size]);
        }
    });
    Ok(y)
}
