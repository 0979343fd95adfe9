//! Chooses the experts of each token, and their weights.
//! ```text
//! p = softmax(logits[t])                       over all experts, in f32
//! ids[t, ..] = the top_k largest, largest first; of equal logits the lower id first
//! weights[t, i] = p[ids[t, i]], divided by their sum over i when `normalize`
//! ids[t, top_k] = E, weights[t, top_k] = sigmoid(shared[t])     with a shared expert, behind the others
//! ```
//! | operand | shape | dtype |
//! |---|---|---|
//! | `logits` | `[T, E]` | f32, f16 or bf16 |
//! | `shared` | `[T, 1]`, the gate of an expert that every token goes to; or none | as `logits` |
//! | `ids` | `[T, top_k]`, or `[T, top_k + 1]` with a shared expert | u32 |
//! | `weights` | as `ids` | f32 |
//!
//! A GPU does not look at the logits before: a token without a right answer gets experts 0 with
//! weights NaN. A shared expert's gate is not looked at anywhere: NaN gives weight NaN.
//!
//! Experts are chosen by their logits, which softmax leaves in order, so that the choice does not
//! depend on how an exponential is rounded.
//!
//! Sources: transformers 5 `Qwen3NextSparseMoeBlock` and `Qwen3NextTopKRouter` (which rounds the
//! weights to the logits' dtype; here they stay f32) and mlx-lm 0.32 `Qwen3NextSparseMoeBlock`
//! (whose order within the top k is open).

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
mod reference;
#[cfg(test)]
mod tests;

pub use gradient::{RouterTopKGradient, router_top_k_backward};

use super::Check;
use crate::simd::math;
use crate::{Device, KernelError, Tensor};

/// Options for choosing experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterParams {
    /// Experts a token.
    pub top_k: usize,
    /// Divide the chosen experts' weights by their sum (`norm_topk_prob`).
    pub normalize: bool,
}

/// Returns `(ids, weights)`.
///
/// # Errors
/// [`KernelError::Shape`] when `top_k` is 0 or more than there are experts, or `shared` does not
/// fit; [`KernelError::DType`] when it is of another type; [`KernelError::Value`] for logits that
/// are no floats, and for a token whose logits have a NaN, an infinity, or no finite one: no expert
/// is right then (NaN weights on a GPU).
pub fn router_top_k(
    logits: &Tensor,
    shared: Option<&Tensor>,
    params: RouterParams,
) -> Result<(Tensor, Tensor), KernelError> {
    let op = Check("router_top_k");
    let [tokens, experts] = check(op, logits, shared, params)?;
    let RouterParams { top_k, .. } = params;
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::router_top_k(op, gpu, logits, shared, params),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let wide = op.widened("logits", logits)?;
            let rows = wide.as_slice::<f32>()?.chunks_exact(experts);
            if let Some((token, logit)) = rows.enumerate().find_map(|(t, row)| Some((t, unroutable(row)?))) {
                let got = format!("{logit} in row {token} of {tokens}");
                let want = "every row is to have finite logits, or -inf beside finite ones".into();
                return Err(KernelError::Value { op: "router_top_k", operand: "logits", got, want });
            }
            let mut chosen = cpu::router_top_k(cpu, wide.as_slice()?, experts, params);
            if let Some(shared) = shared {
                let shared = op.widened("shared", shared)?;
                let gates = shared.as_slice::<f32>()?.iter().map(|&x| (experts as u32, math::sigmoid(x)));
                let tokens = chosen.chunks_exact(top_k).zip(gates);
                chosen = tokens.flat_map(|(chosen, shared)| [chosen, &[shared]].concat()).collect();
            }
            let (ids, weights): (Vec<u32>, Vec<f32>) = chosen.into_iter().unzip();
            let shape = [tokens, top_k + usize::from(shared.is_some())];
            Ok((Tensor::new(&ids, &shape, logits.device())?, Tensor::new(&weights, &shape, logits.device())?))
        }
    }
}

/// Checks the operands against the [module](self)'s table; returns T and E.
fn check(
    op: Check,
    logits: &Tensor,
    shared: Option<&Tensor>,
    params: RouterParams,
) -> Result<[usize; 2], KernelError> {
    let [tokens, experts] = op.dims("logits", logits, "[T, E]")?;
    let RouterParams { top_k, .. } = params;
    if top_k == 0 || top_k > experts {
        return Err(op.shape_error("logits", logits, format!("top_k is {top_k}: 1 to E are wanted")));
    }
    op.float("logits", logits)?;
    if let Some(shared) = shared {
        op.shape("shared", shared, &[tokens, 1], || format!("logits {:?}", logits.shape()))?;
        op.dtype("shared", shared, logits.dtype())?;
        op.same_device("shared", shared.device(), logits.device())?;
    }
    Ok([tokens, experts])
}

/// A logit for which the row has no right answer.
fn unroutable(row: &[f32]) -> Option<f32> {
    let bad = row.iter().copied().find(|x| x.is_nan() || *x == f32::INFINITY);
    bad.or_else(|| row.iter().all(|&x| x == f32::NEG_INFINITY).then_some(f32::NEG_INFINITY))
}
