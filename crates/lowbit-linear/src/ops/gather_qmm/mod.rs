//! Products with experts of a stack, chosen row by row.

mod bench;
mod cpu;
mod gated;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
mod policy;
#[cfg(test)]
mod tests;

pub use gated::{gated_experts, streams_experts};
pub use gradient::{gather_qmm_backward_scales, gather_qmm_backward_weight, gather_qmm_backward_x};

#[cfg(feature = "gpu")]
use super::quantized_matmul::gpu::{Experts, multiply};
#[cfg(feature = "gpu")]
use super::quantized_matmul::problem::Routing;
use super::{Check, Input, Operand};
use crate::{Device, KernelError, QuantizedTensor, Tensor};

const CHECK: Check = Check("gather_qmm");

/// `y[p, t, slot, n] = sum over k of x[t, slot, k] * weight[p, ids[t, slot], n, k]`
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `x` | `[T, 1, K]` (all slots share it) or `[T, top_k, K]`, a tensor or what an op makes of others ([`Input`]) | f32, f16, bf16 |
/// | `weight` | `[E, N, K]`, or `[P, E, N, K]` for `P` products of one x | any format |
/// | `ids` | `[T, top_k]` | u32 |
/// | result | `[T, top_k, N]`, or `[P, T, top_k, N]` | as `x` |
///
/// Rounding is [`quantized_matmul`](super::quantized_matmul())'s. On a GPU nothing is read for an
/// id that is not below `E`, and its row of the result is NaN.
///
/// # Errors
/// [`KernelError::Id`], on a CPU, for an id that is not below `E`; [`KernelError::Shape`] when the
/// shapes do not fit each other; [`KernelError::DType`] when `ids` are not u32;
/// [`KernelError::Value`] when `x` is no float; [`KernelError::TooLarge`]; those of the op that
/// makes `x`.
///
/// Source: `mx.gather_qmm(transpose=True)`, mlx 0.32; `ggml_mul_mat_id`.
pub fn gather_qmm<'a, T: Operand + 'a>(
    x: impl Into<Input<'a, T>>,
    weight: &QuantizedTensor,
    ids: &Tensor,
) -> Result<Tensor, KernelError> {
    let x = x.into();
    x.check(CHECK)?;
    let dtype = x.dtype(CHECK)?;
    let shape = output_shape(x.shape(), weight, ids)?;
    CHECK.ids("ids", ids, weight.shape()[weight.shape().len() - 3])?;
    CHECK.same_device("weight", weight.device(), x.device())?;
    CHECK.same_device("ids", ids.device(), x.device())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let experts = Some(Experts { ids, routing: routing(x.shape(), weight, ids) });
            Ok(multiply(gpu, &x, weight, experts, &shape, dtype)?.0)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let mut y = CHECK.result(&shape, x.device())?;
            let x = CHECK.widened("x", x.make()?.0.as_ref())?;
            cpu::gather_qmm(cpu, &x, weight, ids, y.as_mut_slice()?)?;
            y.cast(dtype.dtype())
        }
    }
}

/// The product of an x of this shape, as a GPU sees it.
#[cfg(feature = "gpu")]
fn routing(x: &[usize], weight: &QuantizedTensor, ids: &Tensor) -> Routing {
    let share = if x[1] == 1 { ids.dim(1) } else { 1 };
    Routing { experts: weight.shape()[weight.shape().len() - 3], pairs: ids.len(), share }
}

fn output_shape(x: &[usize], weight: &QuantizedTensor, ids: &Tensor) -> Result<Vec<usize>, KernelError> {
    product_shape(CHECK, x, weight, ids)
}

/// The shape of the products of an x of this shape; errors name `check`'s op.
fn product_shape(
    check: Check,
    x: &[usize],
    weight: &QuantizedTensor,
    ids: &Tensor,
) -> Result<Vec<usize>, KernelError> {
    let (products, n, k) = match *weight.shape() {
        [experts, n, k] if experts > 0 => (None, n, k),
        [products, experts, n, k] if experts > 0 => (Some(products), n, k),
        _ => {
            let want = "[E, N, K] or [P, E, N, K] with an expert at least is wanted".into();
            let got = weight.shape().to_vec();
            return Err(KernelError::Shape { op: check.0, operand: "weight", got, want });
        }
    };
    let [tokens, top_k] = check.dims("ids", ids, "[T, top_k]")?;
    match *x {
        [t, slots, last] if t == tokens && (slots == 1 || slots == top_k) && last == k => {
            Ok(products.into_iter().chain([tokens, top_k, n]).collect())
        }
        _ => {
            let want = format!("ids are {:?} and weight is {:?}", ids.shape(), weight.shape());
            Err(KernelError::Shape { op: check.0, operand: "x", got: x.to_vec(), want })
        }
    }
}
