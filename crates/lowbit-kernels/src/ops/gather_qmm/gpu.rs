//! The op on a GPU: each pair of a token and an expert is a row of the mat-vec, or, of many pairs, of a tile; between them
//! each cube finds the pairs of its expert.

#[cfg(test)]
pub(crate) use sort::kernels;

mod sort;

use super::{CHECK, policy};
use crate::gpu::Gpu;
use crate::ops::quantized_matmul::gpu::mma_rows::chosen;
use crate::ops::quantized_matmul::gpu::{Batches, multiply, padded, tensor_core};
use crate::{Device, KernelError, QuantizedTensor, Tensor};

/// See [`super::gather_qmm`]; everything was checked.
pub(super) fn gather_qmm(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    shape: &[usize],
) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(shape, CHECK.float("x", x)?.dtype(), &Device::Gpu(gpu.clone()))?;
    if !y.is_empty() {
        let share = if x.dim(1) == 1 { ids.dim(1) } else { 1 };
        let experts = weight.shape()[0];
        let dtype = CHECK.float("x", x)?;
        if let Some(columns) = policy::columns(ids.len(), experts)
            && chosen::supports(gpu.target(), weight, dtype, ids.len())
        {
            chosen::multiply(gpu, &padded(gpu, x)?, weight, (ids, share), &y, columns)?;
            return Ok(y);
        }
        let sortable = experts <= sort::EXPERTS && tensor_core::supports(gpu.target(), weight, dtype);
        if let Some(rows) = policy::tiles(ids.len(), experts).filter(|_| sortable) {
            sort::gather_qmm(gpu, x, weight, (ids, share), &y, rows)?;
            return Ok(y);
        }
        multiply(gpu, &padded(gpu, x)?, weight, &Batches::Chosen { ids, share }, &y)?;
    }
    Ok(y)
}
