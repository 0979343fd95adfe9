//! Some columns of a tensor.

mod bench;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
#[cfg(test)]
mod tests;
mod weights;

use super::Check;
#[cfg(feature = "gpu")]
use crate::gpu::copy::Columns;
use crate::{Device, KernelError, Tensor};

/// Bytes: a view must start at a multiple of the longest vector that kernels load, and where the
/// device binds buffers.
fn alignment(device: &Device) -> usize {
    const VECTOR: usize = 16;
    match device {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => VECTOR.max(gpu.target().binding()),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => VECTOR,
    }
}

/// `y[.., i] = x[.., start + i]` for `i < len`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | any |
/// | y | `[.., len]` | x's |
///
/// Copies bits, except where x has one row and the columns start at a multiple of 16 bytes, on
/// Metal of 32: y then shares x's memory. Source: torch `narrow` along the last dimension, made
/// contiguous.
///
/// # Errors
/// [`KernelError::Shape`] when x does not have these columns.
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
    if x.len() == width {
        let view = x.reshape(&[width])?.rows(start, start + len)?;
        if view.is_aligned(alignment(x.device())) {
            return view.reshape(&shape);
        }
    }
    let size = x.dtype().size();
    let mut y = Tensor::allocate(&shape, x.dtype(), x.device())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let (all, len) = (width * size, len * size);
            let from = Columns { buffer: x.buffer()?, pitch: all, start: start * size, len };
            let to = Columns { buffer: y.buffer()?, pitch: len, start: 0, len };
            gpu.copy_columns(from, to, x.len() / width)?;
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let bytes = x.bytes();
            cpu.for_each_rows(y.bytes_mut(), (len * size).max(1), len, |first, y| {
                let rows = bytes.chunks_exact(width * size).skip(first);
                for (x, y) in rows.zip(y.chunks_exact_mut(len * size)) {
                    y.copy_from_slice(&x[start * size..(start + len) * size]);
                }
            });
        }
    }
    Ok(y)
}
