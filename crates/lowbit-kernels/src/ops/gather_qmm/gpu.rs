//! The op on a GPU: each pair of a token and an expert is a row of the mat-vec, or, of many pairs, of a tile; between them
//! each cube finds the pairs of its expert.

#[cfg(test)]
pub(crate) use sort::kernels;

mod sort;

use super::{CHECK, policy};
use crate::gpu::Gpu;
use crate::ops::Input;
use crate::ops::quantized_matmul::gpu::mma_rows::chosen;
use crate::ops::quantized_matmul::gpu::{Batches, multiply, padded, tensor_core};
use crate::{Device, KernelError, QuantizedTensor, Tensor};

/// See [`super::gather_qmm`]; everything was checked.
pub(super) fn gather_qmm(
    gpu: &Gpu,
    x: &Input<'_>,
    weight: &QuantizedTensor,
    ids: &Tensor,
    shape: &[usize],
) -> Result<Tensor, KernelError> {
    let dtype = x.dtype(CHECK)?;
    let y = Tensor::allocate(shape, dtype.dtype(), &Device::Gpu(gpu.clone()))?;
    if y.is_empty() {
        return Ok(y);
    }
    let share = if x.shape()[1] == 1 { ids.dim(1) } else { 1 };
    let (experts, n, k) = (weight.shape()[weight.shape().len() - 3], weight.n(), weight.k());
    let products = weight.rows() / (experts * n);
    let each = |product: &dyn Fn(&QuantizedTensor, &Tensor) -> Result<(), KernelError>| {
        let weights = weight.reshape(&[products, experts, n, k])?;
        let ys = y.reshape(&[products, y.len() / products])?;
        (0..products).try_for_each(|i| {
            product(&weights.slice(i, i + 1)?.reshape(&[experts, n, k])?, &ys.rows(i, i + 1)?)
        })
    };
    let sortable = experts <= sort::EXPERTS && tensor_core::supports(gpu.target(), weight, dtype);
    if policy::few(ids.len(), experts) && chosen::supports(gpu.target(), weight, dtype, (experts, ids.len()))
    {
        let x = padded(gpu, &x.tensor()?.0)?;
        each(&|weight, y| chosen::multiply(gpu, &x, weight, (ids, share), y))?;
    } else if let Some(rows) = policy::tiles(ids.len(), experts).filter(|_| sortable) {
        let x = x.tensor()?.0;
        each(&|weight, y| sort::gather_qmm(gpu, &x, weight, (ids, share), y, rows))?;
    } else {
        multiply(gpu, x, weight, &Batches::Chosen { ids, share, experts }, &y)?;
    }
    Ok(y)
}
