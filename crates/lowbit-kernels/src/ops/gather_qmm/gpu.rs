//! The op on a GPU: each pair of a token and an expert is a row of the mat-vec.

use super::CHECK;
use crate::gpu::Gpu;
use crate::ops::quantized_matmul::gpu::{Batches, multiply, padded};
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
        multiply(gpu, &padded(gpu, x)?, weight, &Batches::Chosen { ids, share }, &y)?;
    }
    Ok(y)
}
