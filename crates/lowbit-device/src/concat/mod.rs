//! Concatenation of columns.

#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
#[cfg(test)]
mod tests;
mod weights;

use super::Check;
#[cfg(feature = "gpu")]
use crate::gpu::copy::Columns;
use crate::{Device, KernelError, Tensor};

/// Rows after each other: concatenation along the first dimension.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `xs` | `[T_i, ..]` each, with equal other sizes | any, the same for all |
/// | `y` | `[sum T_i, ..]` | that of `xs` |
///
/// # Errors
/// As [`concat()`].
///
/// Source: `mx.concatenate(axis=0)`, mlx 0.32.
pub fn concat_rows(xs: &[Tensor]) -> Result<Tensor, KernelError> {
    let check = Check("concat_rows");
    let Some((first, Some((_, row)))) = xs.first().map(|first| (first, first.shape().split_first())) else {
        let want = "there are no rows to join".into();
        return Err(KernelError::Shape { op: check.0, operand: "x", got: vec![], want });
    };
    let mut rows = 0;
    for x in xs {
        match x.shape().split_first() {
            Some((count, others)) if others == row => rows += count,
            _ => return Err(check.shape_error("x", x, format!("the first is {:?}", first.shape()))),
        }
    }
    // They are columns after each other of one long row.
    let flat = xs.iter().map(|x| x.reshape(&[1, x.len()])).collect::<Result<Vec<_>, _>>()?;
    concat(&flat.iter().collect::<Vec<_>>())?.reshape(&[&[rows], row].concat())
}

/// `y[.., :] = [x_0[.., :] | x_1[.., :] | ..]`: concatenation along the last dimension.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `xs` | `[.., D_i]` each, with equal leading sizes | any, the same for all |
/// | `y` | `[.., sum D_i]` | that of `xs` |
///
/// # Errors
/// [`KernelError::Shape`] for an empty list and for different leading sizes; [`KernelError::DType`]
/// for different types; [`KernelError::Device`] for different devices.
///
/// Source: `mx.concatenate(axis=-1)`, mlx 0.32.
pub fn concat(xs: &[&Tensor]) -> Result<Tensor, KernelError> {
    const OP: &str = "concat";
    let refuse = |got: &[usize], want| KernelError::Shape { op: OP, operand: "x", got: got.to_vec(), want };
    let Some((_, rows)) = xs.first().and_then(|first| first.shape().split_last()) else {
        return Err(refuse(&[], "there is no last dimension to join".into()));
    };
    let mut width = 0usize;
    for x in xs {
        match x.shape().split_last() {
            Some((columns, leading)) if leading == rows => width = width.saturating_add(*columns),
            _ => return Err(refuse(x.shape(), format!("the first has leading sizes {rows:?}"))),
        }
        if x.dtype() != xs[0].dtype() {
            return Err(KernelError::DType { op: OP, operand: "x", got: x.dtype(), want: xs[0].dtype() });
        }
    }
    xs.iter().try_for_each(|x| Check(OP).same_device("x", x.device(), xs[0].device()))?;
    let size = xs[0].dtype().size();
    let mut y = Tensor::allocate(&[rows, &[width]].concat(), xs[0].dtype(), xs[0].device())?;
    let mut start = 0;
    for x in xs {
        let columns = x.dim(-1) * size;
        match x.device() {
            _ if columns == 0 => {}
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => {
                let from = Columns { buffer: x.buffer()?, pitch: columns, start: 0, len: columns };
                let to = Columns { buffer: y.buffer()?, pitch: width * size, start, len: columns };
                gpu.copy_columns(from, to, x.size_bytes() / columns)?;
            }
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
            Device::Cpu(_) => {
                let rows = y.bytes_mut().chunks_exact_mut(width * size);
                for (y, x) in rows.zip(x.bytes().chunks_exact(columns)) {
                    y[start..start + columns].copy_from_slice(x);
                }
            }
        }
        start += columns;
    }
    Ok(y)
}
