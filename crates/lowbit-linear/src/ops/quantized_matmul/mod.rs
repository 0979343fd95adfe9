//! The product of activations and a weight in any format.

pub(crate) mod bench;
mod cpu;
#[cfg(feature = "gpu")]
mod cuda;
mod gated_mlp;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
pub(crate) mod gpu_tests;
pub mod gradient;
mod input;
#[cfg(all(test, feature = "gpu"))]
pub(crate) mod input_gpu_tests;
#[cfg(test)]
mod input_tests;
#[cfg(feature = "gpu")]
pub(crate) mod plan;
mod policy;
#[cfg(feature = "gpu")]
pub(crate) mod problem;
pub(crate) mod reference;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use cpu::{Group, Product, Weight, matmul_groups};
pub use gated_mlp::gated_mlp;
pub use gradient::{
    ScalesGradient, WeightGradient, WeightPart, quantized_matmul_backward_scales,
    quantized_matmul_backward_weight, quantized_matmul_backward_x,
};
pub use input::{AddRmsNorm, Input, Norm, Operand};

use super::Check;
use super::glu::Gate;
use crate::{Cpu, Device, KernelError, QuantizedTensor, Tensor};
use lowbit_formats::FloatType;
use std::sync::Arc;

use input::CHECK;

/// Values of x that share a scale where x is rounded to 8 bits: as many as in llama.cpp's Q8_0.
pub(crate) const X_GROUP: usize = 32;

/// `y[.., n] = sum over k of x[.., k] * weight[n, k]`
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `x` | `[.., K]`, a tensor or what an op makes of others ([`Input`]) | f32, f16, bf16 |
/// | `weight` | `[N, K]` | any format |
/// | result | `[.., N]` | as `x` |
///
/// With `weight [B, N, K]` and `x [r*B, M, K]` the result is `[r*B, M, N]`: weight batch `b` serves
/// the `r` batches of `x` from `r*b` on.
///
/// Weights decode to f32 exactly as their format says; products and sums are f32, in no fixed
/// order; the result is rounded to `x`'s dtype once. On a CPU x is rounded to 8 bits first where
/// the weight is repacked and not of mxfp8 ([`QuantizedTensor::to_panels`]): each 32 values of a
/// row to multiples of a 127th of the greatest magnitude among them. A value that is not finite
/// then makes its row of the result NaN. On a CPU with AMX, x and the decoded weight of a product
/// of many rows are rounded to bf16 instead; a value that is not finite, or beyond bf16's range,
/// makes its row infinite or NaN. Where a GPU's matrix units multiply (many rows of f16 or bf16:
/// tensor cores, cooperative matrices), decoded weights are rounded to `x`'s dtype too, as MLX
/// does; one beyond f16's range (65504) is then infinite. `x` itself is not rounded on a GPU: rows
/// of f32 are multiplied in f32.
///
/// # Errors
/// [`KernelError::Shape`] when the shapes do not fit each other; [`KernelError::Value`] when `x` is
/// no float; [`KernelError::TooLarge`]; those of the op that makes `x`.
///
/// Source: `mx.quantized_matmul(transpose=True)`, mlx 0.32; `ggml_mul_mat`, which has the same
/// broadcast over batches.
pub fn quantized_matmul<'a, T: Operand + 'a>(
    x: impl Into<Input<'a, T>>,
    weight: &QuantizedTensor,
) -> Result<Tensor, KernelError> {
    let x = x.into();
    Ok(product(&x, weight, x.dtype(CHECK)?)?.0)
}

/// [`quantized_matmul()`] with a result of `dtype`, rounded to it once: f32 logits from
/// half-precision activations.
///
/// # Errors
/// As [`quantized_matmul()`].
pub fn quantized_matmul_to<'a, T: Operand + 'a>(
    x: impl Into<Input<'a, T>>,
    weight: &QuantizedTensor,
    dtype: FloatType,
) -> Result<Tensor, KernelError> {
    Ok(product(&x.into(), weight, dtype)?.0)
}

/// [`quantized_matmul()`] of a norm, and the sum that it is the norm of: `(sum, y)`.
///
/// # Errors
/// As [`quantized_matmul()`].
pub fn quantized_matmul_and_sum<T: Operand>(
    x: AddRmsNorm<'_, T>,
    weight: &QuantizedTensor,
) -> Result<(Tensor, Tensor), KernelError> {
    let x = Input::AddRmsNorm(x);
    let (y, sum) = product(&x, weight, x.dtype(CHECK)?)?;
    Ok((sum.expect("the norm of a sum comes with it"), y))
}

/// [`quantized_matmul()`] of one `x` and several weights. A CPU reads and rounds x once, and its
/// threads wait for each other once.
///
/// # Errors
/// As [`quantized_matmul()`].
pub fn quantized_matmul_each(x: &Tensor, weights: &[&QuantizedTensor]) -> Result<Vec<Tensor>, KernelError> {
    match x.device() {
        Device::Cpu(cpu) => {
            let input = Input::from(x);
            let dtype = input.dtype(CHECK)?;
            input.check(CHECK)?;
            let weights: Vec<_> = weights.iter().map(|weight| Weight::One(weight)).collect();
            on_cpu(cpu, x, &weights, dtype)
        }
        Device::Gpu(_) => weights.iter().map(|weight| quantized_matmul(x, weight)).collect(),
    }
}

/// [`quantized_matmul()`] of one `x` and a `weight` `[N, K]`, whose rows are several weights' after
/// each other: parts of the result's columns, `widths` wide, each a tensor of its own. A GPU with a
/// kernel for it computes all with one launch, and copies nothing.
///
/// # Errors
/// As [`quantized_matmul()`]; [`KernelError::Shape`] when the widths are not all of N.
pub fn quantized_matmul_parts(
    x: &Tensor,
    weight: &QuantizedTensor,
    widths: &[usize],
) -> Result<Vec<Tensor>, KernelError> {
    let all = widths.iter().try_fold(0usize, |all, width| all.checked_add(*width));
    if weight.shape().len() != 2 || all != Some(weight.n()) {
        let (got, want) = (weight.shape().to_vec(), format!("parts of {widths:?} rows were asked for"));
        return Err(KernelError::Shape { op: CHECK.0, operand: "weight", got, want });
    }
    #[cfg(feature = "gpu")]
    if let Device::Gpu(gpu) = x.device() {
        Input::from(x).check(CHECK)?;
        let shape = output_shape(x.shape(), weight)?;
        CHECK.same_device("weight", weight.device(), x.device())?;
        if let Some(parts) = gpu::multiply_parts(gpu, x, weight, widths, &shape)? {
            return Ok(parts);
        }
    }
    let mut start = 0;
    let weights = widths.iter().map(|width| {
        let end = start + width;
        let part = weight.slice(start, end);
        start = end;
        part
    });
    let weights = weights.collect::<Result<Vec<_>, _>>()?;
    quantized_matmul_each(x, &weights.iter().collect::<Vec<_>>())
}

/// [`glu()`](super::glu()) of the products of one `x` and two weights, the gate's `[N, K]` and then
/// that of what it is the gate of, as one `weight` `[2 N, K]`: `[.., N]`. Products are rounded to
/// x's dtype before that. A GPU with a kernel for it computes all with one launch, its sigmoid as
/// [`Input`] says.
///
/// # Errors
/// As [`quantized_matmul()`]; [`KernelError::Shape`] when the weight has no halves.
pub fn quantized_matmul_glu(x: &Tensor, weight: &QuantizedTensor, by: Gate) -> Result<Tensor, KernelError> {
    let n = weight.n() / 2;
    if weight.shape().len() != 2 || weight.n() != 2 * n {
        let (got, want) = (weight.shape().to_vec(), "[2 N, K] is wanted".into());
        return Err(KernelError::Shape { op: CHECK.0, operand: "weight", got, want });
    }
    #[cfg(feature = "gpu")]
    if let Device::Gpu(gpu) = x.device() {
        Input::from(x).check(CHECK)?;
        let shape = output_shape(x.shape(), weight)?;
        CHECK.same_device("weight", weight.device(), x.device())?;
        if let Some(y) = gpu::multiply_glu(gpu, x, weight, by, &shape)? {
            return Ok(y);
        }
    }
    let parts = quantized_matmul_parts(x, weight, &[n, n])?;
    super::glu(&parts[1], &parts[0], by)
}

/// The product, and the sum where x is the norm of one.
fn product<T: Operand>(
    x: &Input<'_, T>,
    weight: &QuantizedTensor,
    dtype: FloatType,
) -> Result<(Tensor, Option<Tensor>), KernelError> {
    x.check(CHECK)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let shape = output_shape(x.shape(), weight)?;
            CHECK.same_device("weight", weight.device(), x.device())?;
            gpu::multiply(gpu, x, weight, None, &shape, dtype)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            // Before x is made, which may be long.
            output_shape(x.shape(), weight)?;
            let (x, sum) = x.make()?;
            let mut y = on_cpu(cpu, x.as_ref(), &[Weight::One(weight)], dtype)?;
            Ok((y.pop().expect("a result per weight"), sum.map(|sum| sum.as_ref().clone())))
        }
    }
}

/// The products of x and each of `weights`, of `dtype`.
fn on_cpu(
    cpu: &Arc<Cpu>,
    x: &Tensor,
    weights: &[Weight<'_>],
    dtype: FloatType,
) -> Result<Vec<Tensor>, KernelError> {
    let mut results = Vec::with_capacity(weights.len());
    for weight in weights.iter().map(Weight::first) {
        CHECK.same_device("weight", weight.device(), x.device())?;
        results.push(CHECK.result(&output_shape(x.shape(), weight)?, x.device())?);
    }
    let x = CHECK.widened("x", x)?;
    let values = x.as_slice::<f32>()?;
    let mut products = Vec::with_capacity(weights.len());
    for (&weight, y) in weights.iter().zip(&mut results) {
        let (n, batches) = (weight.first().n(), weight.first().rows() / weight.first().n().max(1));
        let (x_batch, y_batch) = (values.len() / batches.max(1), y.len() / batches.max(1));
        let mut rest = y.as_mut_slice::<f32>()?;
        let mut groups = Vec::with_capacity(batches);
        for batch in 0..batches {
            let y = rest.split_off_mut(..y_batch).expect("a part per batch");
            groups.push(Group { weight_row: batch * n, x: &values[batch * x_batch..][..x_batch], y });
        }
        products.push(Product { weight, groups });
    }
    matmul_groups(cpu, products);
    results.into_iter().map(|y| y.cast(dtype.dtype())).collect()
}

fn output_shape(x: &[usize], weight: &QuantizedTensor) -> Result<Vec<usize>, KernelError> {
    product_shape(CHECK, x, weight.shape())
}

/// The shape of the product of an x and a weight of these shapes.
fn product_shape(check: Check, x: &[usize], weight: &[usize]) -> Result<Vec<usize>, KernelError> {
    let fits = match (weight, x) {
        ([_, k], [.., last]) => k == last,
        ([b, _, k], [batches, _, last]) => {
            k == last && (batches == b || *b > 0 && batches.is_multiple_of(*b))
        }
        _ => false,
    };
    if !fits {
        let want = format!("weight is {weight:?}");
        return Err(KernelError::Shape { op: check.0, operand: "x", got: x.to_vec(), want });
    }
    let mut shape = x.to_vec();
    *shape.last_mut().expect("x has a last dimension: it was matched above") = weight[weight.len() - 2];
    Ok(shape)
}
