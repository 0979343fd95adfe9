//! The gradients of [`gated_delta_rule()`](super::gated_delta_rule()).

mod cpu;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use super::cpu::{Decay, Problem};
use super::{DeltaGates, Dims, GatedDeltaInputs, GatedDeltaRule, Rule};
use crate::ops::Check;
use crate::ops::{DeltaGatesGradient, delta_gates_backward, l2_norm_backward};
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;

/// The gradients of [`gated_delta_rule()`](super::gated_delta_rule()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct GatedDeltaRuleGradient {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    pub dgates: GatesGradient,
}

/// The gradients of [`DeltaGates`], of what these were made of.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum GatesGradient {
    Computed { dlog_decay: Tensor, dbeta: Tensor },
    Raw(DeltaGatesGradient),
}

/// Token after token from a sequence's last, with `G` the gradient of the state after a token, 0
/// after the last one:
///
/// ```text
/// G     <- G + scale * q[t] dy[t]^T            dq[t] = scale * S[t] dy[t]
/// ddelta = G^T k[t]                            dbeta[t] = ddelta . (v[t] - (decay S[t-1])^T k[t])
/// dv[t]  = beta[t] * ddelta                    dk[t] = G delta[t] - (decay S[t-1]) dv[t]
/// G     <- G - k[t] dv[t]^T                    dlog_decay[t] = sum of G * (decay S[t-1]), element by element
/// G     <- decay * G
/// ```
/// dq and dk are summed over the value heads that read a key head. Where the op normalises q and k
/// or computes the gates, the gradients go on through these.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `inputs`, `state` | as in [`gated_delta_rule()`](super::gated_delta_rule()), the state as it was before | |
/// | `dy` | `[T, Hv, Dv]` | f32, f16 or bf16 |
/// | `dq`, `dk`, `dv` | as `q`, `k` and `v` | `dy`'s |
/// | `dlog_decay`, `dbeta` | `[T, Hv]` | f32 |
///
/// States are computed anew from checkpoints: 32 tokens apart on the CPU, and 64 on a GPU, which
/// sums up what tokens of a chunk make of each other. The state before is a constant, and nothing
/// is to depend on the state after. Everything is f32, in an order that does not depend on the
/// number of threads and is the same in every launch; [`GatedDeltaRule::form`] has no say. On a GPU
/// `cu_seqlens` is not looked at beforehand: a sequence whose offsets do not rise, or go past `T`,
/// is left out, and the gradients of tokens of no sequence are 0.
///
/// Source: flash-linear-attention `fused_recurrent_gated_delta_rule` (the forward pass, derived).
///
/// # Errors
/// As [`gated_delta_rule()`](super::gated_delta_rule()); [`KernelError::Shape`] for a dy that does
/// not fit; [`KernelError::Value`] for [`Rule::Additive`], [`DeltaGates::Steps`] and a decay per
/// channel, which have no gradient.
pub fn gated_delta_rule_backward(
    inputs: &GatedDeltaInputs,
    state: &Tensor,
    params: &GatedDeltaRule,
    dy: &Tensor,
) -> Result<GatedDeltaRuleGradient, KernelError> {
    let check = Check("gated_delta_rule_backward");
    let dims = super::check(inputs, state, params)?;
    if params.rule != Rule::Delta {
        return Err(check.value("rule", format!("{:?}", params.rule), "gradients are those of Delta"));
    }
    if let DeltaGates::Steps { .. } = inputs.gates {
        return Err(check.value("gates", "Steps", "gradients are those of Computed and Raw"));
    }
    if inputs.gates.per_channel() {
        return Err(check.value("log_decay", "per channel", "gradients are those of a decay per head"));
    }
    if let Some(slots) = inputs.slots {
        let want = format!("gradients take none: state {:?} has one row per sequence", state.shape());
        return Err(check.shape_error("slots", slots, want));
    }
    check.shape("dy", dy, inputs.v.shape(), || format!("v {:?}", inputs.v.shape()))?;
    check.same_device("dy", dy.device(), inputs.q.device())?;
    let dtype = check.float("dy", dy)?.dtype();
    let wide =
        [("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("dy", dy)].map(|(n, x)| check.widened(n, x));
    let [raw_q, raw_k, v, dy] = wide;
    let (raw_q, raw_k, v, dy) = (raw_q?, raw_k?, v?, dy?);
    let (q, k) = (params.normalised(&raw_q)?, params.normalised(&raw_k)?);
    let (log_decay, beta) = inputs.gates.computed()?;
    let operands = Operands {
        q: &q,
        k: &k,
        v: &v,
        log_decay: &log_decay,
        beta: &beta,
        cu_seqlens: inputs.cu_seqlens,
        state,
        dy: &dy,
    };
    let Gradients { mut dq, mut dk, dv, dlog_decay, dbeta } = match inputs.q.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward(gpu, &operands, dims, params)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => backward(cpu, check, &operands, dims, params)?,
    };
    if let Some(eps) = params.qk_norm {
        dq = l2_norm_backward(&raw_q, eps, &dq)?;
        dk = l2_norm_backward(&raw_k, eps, &dk)?;
    }
    let dgates = match inputs.gates {
        DeltaGates::Computed { .. } => GatesGradient::Computed { dlog_decay, dbeta },
        DeltaGates::Raw { a, b, a_log, dt_bias } => {
            GatesGradient::Raw(delta_gates_backward([a, b], [a_log, dt_bias], [&dlog_decay, &dbeta])?)
        }
        DeltaGates::Steps { .. } | DeltaGates::Channels { .. } => unreachable!("refused above"),
    };
    Ok(GatedDeltaRuleGradient { dq: dq.cast(dtype)?, dk: dk.cast(dtype)?, dv: dv.cast(dtype)?, dgates })
}

/// The operands, in f32 but for the offsets: q and k as the rule multiplies them, and the gates.
struct Operands<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    log_decay: &'a Tensor,
    beta: &'a Tensor,
    cu_seqlens: &'a Tensor,
    state: &'a Tensor,
    dy: &'a Tensor,
}

/// Theirs, in f32.
struct Gradients {
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dlog_decay: Tensor,
    dbeta: Tensor,
}

impl Gradients {
    fn zeros(of: &Operands<'_>) -> Result<Self, KernelError> {
        let new = |x: &Tensor| Tensor::allocate_zeros(x.shape(), DType::F32, x.device());
        Ok(Self {
            dq: new(of.q)?,
            dk: new(of.k)?,
            dv: new(of.v)?,
            dlog_decay: new(of.log_decay)?,
            dbeta: new(of.beta)?,
        })
    }
}

/// On the CPU.
fn backward(
    cpu: &Cpu,
    check: Check,
    operands: &Operands<'_>,
    dims: Dims,
    params: &GatedDeltaRule,
) -> Result<Gradients, KernelError> {
    let Operands { q, k, v, log_decay, beta, cu_seqlens, state, dy } = *operands;
    let sequences = check.sequences(cu_seqlens, q.dim(0))?;
    let problem = Problem {
        q: q.as_slice()?,
        k: k.as_slice()?,
        v: v.as_slice()?,
        decay: Decay::Heads(log_decay.as_slice()?),
        beta: beta.as_slice()?,
        dims,
        params,
        slots: None,
    };
    let mut all = Gradients::zeros(operands)?;
    let gradients = cpu::Gradients {
        dq: all.dq.as_mut_slice()?,
        dk: all.dk.as_mut_slice()?,
        dv: all.dv.as_mut_slice()?,
        dlog_decay: all.dlog_decay.as_mut_slice()?,
        dbeta: all.dbeta.as_mut_slice()?,
    };
    cpu::backward(cpu, &problem, &sequences, (state.as_slice()?, dy.as_slice()?), gradients);
    Ok(all)
}
