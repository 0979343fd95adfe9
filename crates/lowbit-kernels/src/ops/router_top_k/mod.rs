//! Chooses the experts of each token, and their weights.
//! ```text
//! p = softmax(logits[t])                       over all experts, in f32, or sigmoid of each
//! c = p + bias                                 -inf for a logit of -inf
//! ids[t, ..] = the top_k largest of c, largest first; of equal ones the lower id first
//! weights[t, i] = p[ids[t, i]], divided by their sum over i plus `sum_eps` when `normalize`, times `scale`
//! ids[t, top_k] = E, weights[t, top_k] = sigmoid(shared[t])     with a shared expert, behind the others
//! ```
//! | operand | shape | dtype |
//! |---|---|---|
//! | `logits` | `[T, E]` | f32, f16 or bf16 |
//! | `bias` | `[E]`, beside sigmoids; or none: it chooses, and does not weigh | f32 |
//! | `shared` | `[T, 1]`, the gate of an expert that every token goes to; or none | as `logits` |
//! | `ids` | `[T, top_k]`, or `[T, top_k + 1]` with a shared expert | u32 |
//! | `weights` | as `ids` | f32 |
//!
//! The choice may be among groups of `E / n_group` experts after each other: those of the
//! `topk_group` groups whose two largest c have the largest sums with sigmoids, and whose largest
//! logits are the largest with softmax; and the lower ones of equal groups.
//!
//! A GPU does not look at the logits before: a token without a right answer gets experts 0 with
//! weights NaN. A shared expert's gate is not looked at anywhere: NaN gives weight NaN.
//!
//! With softmax experts are chosen by their logits, which it leaves in order, so that the choice
//! does not depend on how an exponential is rounded.
//!
//! Sources: transformers 5 `Qwen3NextSparseMoeBlock` and `Qwen3NextTopKRouter` (which rounds the
//! weights to the logits' dtype; here they stay f32), `Glm4MoeTopkRouter` and
//! `DeepseekV2TopkRouter`, and mlx-lm 0.32 `Qwen3NextSparseMoeBlock` (whose order within the top k
//! is open) and `group_expert_select` (whose c are 0 in groups that are not chosen: another choice
//! where a chosen c is negative).

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
use lowbit_formats::DType;

/// Options for choosing experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterParams {
    /// Experts a token.
    pub top_k: usize,
    /// Divide the chosen experts' weights by their sum (`norm_topk_prob`).
    pub normalize: bool,
    /// The function that makes scores of logits.
    pub scores: RouterScores,
    /// Added to the sum that divides weights, so that it is not 0; 0 beside softmax, which needs
    /// none.
    pub sum_eps: f32,
    /// Multiplies the weights, but for a shared expert's (`routed_scaling_factor`).
    pub scale: f32,
    /// Groups of experts, 1 to 32.
    pub n_group: usize,
    /// Groups that a token's experts are in.
    pub topk_group: usize,
}

/// The most groups: a GPU has a bit for each.
const MAX_GROUPS: usize = 32;

/// The function that makes scores of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouterScores {
    /// `e^x / sum e^x`, over all experts.
    Softmax,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
}

impl RouterParams {
    /// Softmax, no scale, no groups.
    pub const fn softmax(top_k: usize, normalize: bool) -> Self {
        let scores = RouterScores::Softmax;
        Self { top_k, normalize, scores, sum_eps: 0.0, scale: 1.0, n_group: 1, topk_group: 1 }
    }

    /// Sigmoids, no scale, no groups.
    pub const fn sigmoid(top_k: usize, normalize: bool, sum_eps: f32) -> Self {
        Self { scores: RouterScores::Sigmoid, sum_eps, ..Self::softmax(top_k, normalize) }
    }

    /// Checks that `experts` can be chosen from so.
    fn check(&self, op: Check, experts: usize) -> Result<(), KernelError> {
        let Self { top_k, sum_eps, scale, n_group, topk_group, .. } = *self;
        if self.scores == RouterScores::Softmax && sum_eps != 0.0 {
            return Err(op.value("sum_eps", sum_eps, "softmax has none"));
        }
        if !(sum_eps >= 0.0 && sum_eps.is_finite()) {
            return Err(op.value("sum_eps", sum_eps, "a finite number from 0 is wanted"));
        }
        if !scale.is_finite() {
            return Err(op.value("scale", scale, "a finite number is wanted"));
        }
        if n_group == 1 && topk_group == 1 {
            return Ok(());
        }
        if !(1..=MAX_GROUPS).contains(&n_group) {
            return Err(op.value("n_group", n_group, "1 to 32 groups are wanted"));
        }
        if !experts.is_multiple_of(n_group) || experts / n_group < 2 {
            let want = format!("{experts} experts make no such groups of 2 or more");
            return Err(op.value("n_group", n_group, want));
        }
        if topk_group == 0 || topk_group > n_group || topk_group * (experts / n_group) < top_k {
            let want =
                format!("{top_k} experts are chosen in 1 to {n_group} groups of {}", experts / n_group);
            return Err(op.value("topk_group", topk_group, want));
        }
        Ok(())
    }
}

/// Returns `(ids, weights)`.
///
/// # Errors
/// [`KernelError::Shape`] when `top_k` is 0 or more than there are experts, or `bias` or `shared`
/// does not fit; [`KernelError::DType`] when it is of another type; [`KernelError::Value`] for
/// logits that are no floats, for a bias beside softmax, a scale that is not finite, groups that
/// the experts do not make, and for a token whose logits have a NaN, an infinity, or no finite one,
/// or a bias with a NaN or infinity: no expert is right then (NaN weights on a GPU).
pub fn router_top_k(
    logits: &Tensor,
    bias: Option<&Tensor>,
    shared: Option<&Tensor>,
    params: RouterParams,
) -> Result<(Tensor, Tensor), KernelError> {
    let op = Check("router_top_k");
    let [tokens, experts] = check(op, logits, shared, params)?;
    let RouterParams { top_k, .. } = params;
    if let Some(bias) = bias {
        op.shape("bias", bias, &[experts], || format!("logits {:?}", logits.shape()))?;
        op.dtype("bias", bias, DType::F32)?;
        op.same_device("bias", bias.device(), logits.device())?;
        if params.scores == RouterScores::Softmax {
            return Err(op.value("bias", "there", "softmax has none"));
        }
    }
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::router_top_k(op, gpu, logits, [bias, shared], params),
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
            let bias = bias.map(Tensor::as_slice::<f32>).transpose()?;
            if let Some((id, x)) = bias.into_iter().flatten().enumerate().find(|(_, x)| !x.is_finite()) {
                let want = "a finite number is wanted";
                return Err(op.value("bias", format!("{x} for expert {id} of {experts}"), want));
            }
            let mut chosen = cpu::router_top_k(cpu, wide.as_slice()?, bias, experts, params);
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
    params.check(op, experts)?;
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
