//! Decoded rows of a quantised table: embeddings.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
#[cfg(test)]
mod tests;

pub use gradient::{dequant_gather_backward_scales, dequant_gather_backward_values};

use super::Check;
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use lowbit_formats::FloatType;

const CHECK: Check = Check("dequant_gather");

/// `y[.., k] = table[ids[..], k]`
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `table` | `[V, K]` | any format |
/// | `ids` | `[..]` | u32 |
/// | result | `[.., K]` | `dtype` |
///
/// Values decode to f32 exactly as the format says and are rounded to `dtype` once (on a GPU, with
/// f32 scales, the product and the sum may be rounded together). Ids on a GPU are not checked in
/// advance: the row of an id that is out of range is NaN.
///
/// # Errors
/// [`KernelError::Id`] for an id that is not below `V`; [`KernelError::Shape`] when the table is
/// not `[V, K]`; [`KernelError::DType`] when `ids` are not u32; [`KernelError::TooLarge`].
///
/// Source: `mlx.nn.QuantizedEmbedding`, mlx 0.32; `ggml_get_rows`.
pub fn dequant_gather(
    table: &QuantizedTensor,
    ids: &Tensor,
    dtype: FloatType,
) -> Result<Tensor, KernelError> {
    let [_, k] = check_table(CHECK, table, ids)?;
    let shape = [ids.shape(), &[k]].concat();
    match table.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::dequant_gather(gpu, table, ids, &shape, dtype),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let mut y = CHECK.result(&shape, table.device())?;
            cpu::dequant_gather(cpu, table, ids.as_slice()?, y.as_mut_slice()?);
            y.cast(dtype.dtype())
        }
    }
}

/// Checks that `ids` name rows of the table; returns V and K.
fn check_table(check: Check, table: &QuantizedTensor, ids: &Tensor) -> Result<[usize; 2], KernelError> {
    let &[count, k] = table.shape() else {
        let (got, want) = (table.shape().to_vec(), "[V, K] is wanted".into());
        return Err(KernelError::Shape { op: check.0, operand: "table", got, want });
    };
    check.ids("ids", ids, count)?;
    check.same_device("ids", ids.device(), table.device())?;
    Ok([count, k])
}
