//! Rows of a quantised table, decoded: embeddings.

mod bench;
mod cpu;
#[cfg(test)]
mod tests;

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
/// Values decode to f32 exactly as the format says and are rounded to `dtype` once.
///
/// # Errors
/// [`KernelError::Id`] for an id that is not below `V`; [`KernelError::Shape`] when the table is not `[V, K]`;
/// [`KernelError::DType`] when `ids` are not u32; [`KernelError::TooLarge`].
///
/// Source: `mlx.nn.QuantizedEmbedding`, mlx 0.32; `ggml_get_rows`.
pub fn dequant_gather(
    table: &QuantizedTensor,
    ids: &Tensor,
    dtype: FloatType,
) -> Result<Tensor, KernelError> {
    let &[count, k] = table.shape() else {
        let (got, want) = (table.shape().to_vec(), "[V, K] is wanted".into());
        return Err(KernelError::Shape { op: CHECK.0, operand: "table", got, want });
    };
    CHECK.ids("ids", ids, count)?;
    let mut y = CHECK.result(&[ids.shape(), &[k]].concat(), table.device())?;
    match table.device() {
        Device::Gpu(gpu) => return Err(CHECK.unsupported(gpu)),
        Device::Cpu(cpu) => cpu::dequant_gather(cpu, table, ids.as_slice()?, y.as_mut_slice()?),
    }
    y.cast(dtype.dtype())
}
