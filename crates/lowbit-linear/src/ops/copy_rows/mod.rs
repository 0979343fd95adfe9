//! Copying a row from one tensor to another.

#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
#[cfg(test)]
mod tests;

use super::Check;
#[cfg(feature = "gpu")]
use crate::gpu::copy::Columns;
use crate::{Device, KernelError, Tensor};

const CHECK: Check = Check("copy_rows");

/// `dst[dst_row] = src[src_row]`: copies the state of a sequence into a pool of states, or out of
/// it.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | src | `[rows, ..]` | any |
/// | dst | `[other rows, ..]`, the same but for the rows | src's |
///
/// A dst whose storage is shared is copied first.
///
/// # Errors
/// [`KernelError::Shape`] and [`KernelError::DType`] for tensors whose rows differ,
/// [`KernelError::Value`] for a row that a tensor lacks, [`KernelError::Device`] for two devices;
/// [`KernelError::Gpu`].
pub fn copy_rows(src: &Tensor, src_row: usize, dst: &mut Tensor, dst_row: usize) -> Result<(), KernelError> {
    let (src_rows, row) = rows("src", src)?;
    let (dst_rows, _) = rows("dst", dst)?;
    CHECK.shape("dst", dst, &[&[dst_rows], row].concat(), || format!("src {:?}", src.shape()))?;
    CHECK.dtype("dst", dst, src.dtype())?;
    CHECK.same_device("dst", dst.device(), src.device())?;
    for (operand, at, count) in [("src_row", src_row, src_rows), ("dst_row", dst_row, dst_rows)] {
        if at >= count {
            return Err(CHECK.value(operand, at, format!("the tensor has {count} rows")));
        }
    }
    let from = src.rows(src_row, src_row + 1)?;
    let len = from.size_bytes();
    match src.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            dst.unshare()?;
            let to = dst.rows(dst_row, dst_row + 1)?;
            gpu.copy_columns(Columns::row(from.buffer()?, len), Columns::row(to.buffer()?, len), 1)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            dst.bytes_mut()[dst_row * len..][..len].copy_from_slice(from.bytes());
            Ok(())
        }
    }
}

/// The number of a tensor's rows, and their shape.
fn rows<'a>(operand: &'static str, x: &'a Tensor) -> Result<(usize, &'a [usize]), KernelError> {
    let scalar = || CHECK.shape_error(operand, x, "[rows, ..] is wanted".into());
    x.shape().split_first().map(|(&rows, row)| (rows, row)).ok_or_else(scalar)
}
