//! The product of activations and a dense weight.

mod bench;
#[cfg(feature = "gpu")]
mod limit;
#[cfg(test)]
mod tests;

use super::{Check, quantized_matmul};
use crate::{KernelError, QuantizedTensor, Tensor};
use lowbit_formats::Format;

/// `y[.., n] = sum over k of x[.., k] * weight[n, k]`
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `x` | `[.., K]` | f32, f16, bf16 |
/// | `weight` | `[N, K]` or `[B, N, K]` | f32, f16, bf16 |
/// | result | `[.., N]` | as `x` |
///
/// [`quantized_matmul()`] with a weight of floats; batches, rounding and errors are the same.
///
/// # Errors
/// As [`quantized_matmul()`]; [`KernelError::Value`] when the weight is not of floats.
///
/// Source: `torch.nn.functional.linear`, `ggml_mul_mat`.
pub fn matmul(x: &Tensor, weight: &Tensor) -> Result<Tensor, KernelError> {
    let format = Format::Float(Check("matmul").float("weight", weight)?);
    quantized_matmul(x, &QuantizedTensor::new(format, weight.shape(), vec![weight.clone()])?)
}
