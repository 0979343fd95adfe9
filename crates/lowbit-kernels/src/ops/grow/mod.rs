//! Moving a cache to a larger one.

#[cfg(test)]
mod tests;

use crate::{KernelError, Tensor};

/// `y[h, s, :] = x[h, s, :]`: a cache moved to one with room for more; what is new is zero.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `x` | `[H, S, D]` | any |
/// | `y` | `[H, capacity, D]` | the same |
///
/// # Errors
/// [`KernelError::Shape`] when `x` has not three dimensions or does not fit `capacity`.
pub fn grow(x: &Tensor, capacity: usize) -> Result<Tensor, KernelError> {
    let &[heads, len, dim] = x.shape() else {
        let want = "a cache is [H, S, D]".into();
        return Err(KernelError::Shape { op: "grow", operand: "x", got: x.shape().to_vec(), want });
    };
    if len > capacity {
        let want = format!("the new capacity is {capacity}");
        return Err(KernelError::Shape { op: "grow", operand: "x", got: x.shape().to_vec(), want });
    }
    x.device().as_cpu("grow")?;
    let mut y = Tensor::zeros(&[heads, capacity, dim], x.dtype(), x.device());
    let (old, new) = (len * dim * x.dtype().size(), capacity * dim * x.dtype().size());
    if old > 0 {
        for (y, x) in y.bytes_mut().chunks_exact_mut(new).zip(x.bytes().chunks_exact(old)) {
            y[..old].copy_from_slice(x);
        }
    }
    Ok(y)
}
