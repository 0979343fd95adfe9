//! Moving a cache to a larger one.

#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
#[cfg(test)]
mod tests;

#[cfg(feature = "gpu")]
use crate::gpu::copy::Columns;
use crate::{Device, KernelError, Tensor};

/// `y[h, s, :] = x[h, s, :]`: copies a cache to one with more room, whose other elements are zero.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `x` | `[H, S, D]` | any |
/// | `y` | `[H, capacity, D]` | that of `x` |
///
/// # Errors
/// [`KernelError::Shape`] when `x` does not have three dimensions or does not fit into `capacity`;
/// [`KernelError::Gpu`] when a GPU has no such memory left.
pub fn grow(x: &Tensor, capacity: usize) -> Result<Tensor, KernelError> {
    let &[heads, len, dim] = x.shape() else {
        let want = "a cache is [H, S, D]".into();
        return Err(KernelError::Shape { op: "grow", operand: "x", got: x.shape().to_vec(), want });
    };
    if len > capacity {
        let want = format!("the new capacity is {capacity}");
        return Err(KernelError::Shape { op: "grow", operand: "x", got: x.shape().to_vec(), want });
    }
    let shape = [heads, capacity, dim];
    let size = x.dtype().size();
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let y = Tensor::allocate(&shape, x.dtype(), x.device())?;
            let (old, new) = (len * dim * size, capacity * dim * size);
            let from = Columns { buffer: x.buffer()?, pitch: old, start: 0, len: old };
            let to = Columns { buffer: y.buffer()?, pitch: new, start: 0, len: new };
            gpu.copy_columns(from, to, heads)?;
            Ok(y)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let mut y = Tensor::allocate_zeros(&shape, x.dtype(), x.device())?;
            let (old, new) = (len * dim * size, capacity * dim * size);
            if old > 0 {
                for (y, x) in y.bytes_mut().chunks_exact_mut(new).zip(x.bytes().chunks_exact(old)) {
                    y[..old].copy_from_slice(x);
                }
            }
            Ok(y)
        }
    }
}
