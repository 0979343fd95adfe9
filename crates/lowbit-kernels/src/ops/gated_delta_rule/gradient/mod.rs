//! The gradients of [`gated_delta_rule()`](super::gated_delta_rule()).

mod cpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use super::cpu::Problem;
use super::{DeltaGates, GatedDeltaInputs, GatedDeltaRule};
use crate::ops::check::Check;
use crate::ops::{DeltaGatesGradient, delta_gates_backward, l2_norm_backward};
use crate::{KernelError, Tensor};
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

/// Token after token from a sequence's last, with `G` the gradient of the state after a token, 0 after the last one:
///
/// ```text
/// G     <- G + scale * q[t] dy[t]^T            dq[t] = scale * S[t] dy[t]
/// ddelta = G^T k[t]                            dbeta[t] = ddelta . (v[t] - (decay S[t-1])^T k[t])
/// dv[t]  = beta[t] * ddelta                    dk[t] = G delta[t] - (decay S[t-1]) dv[t]
/// G     <- G - k[t] dv[t]^T                    dlog_decay[t] = sum of G * (decay S[t-1]), element by element
/// G     <- decay * G
/// ```
/// dq and dk are summed over the value heads that read a key head. Where the op normalises q and k or computes the gates, the
/// gradients go on through these.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `inputs`, `state` | as in [`gated_delta_rule()`](super::gated_delta_rule()), the state as it was before | |
/// | `dy` | `[T, Hv, Dv]` | f32, f16 or bf16 |
/// | `dq`, `dk`, `dv` | as `q`, `k` and `v` | `dy`'s |
/// | `dlog_decay`, `dbeta` | `[T, Hv]` | f32 |
///
/// States are computed anew from checkpoints 32 tokens apart. The state before is a constant, and nothing is to depend on the
/// state after. Everything is f32, in an order that does not depend on the number of threads; [`GatedDeltaRule::form`] has no say.
///
/// Source: flash-linear-attention `fused_recurrent_gated_delta_rule` (the forward pass, derived).
///
/// # Errors
/// As [`gated_delta_rule()`](super::gated_delta_rule()); [`KernelError::Shape`] for a dy that does not fit;
/// [`KernelError::Unsupported`] on a GPU.
pub fn gated_delta_rule_backward(
    inputs: &GatedDeltaInputs,
    state: &Tensor,
    params: &GatedDeltaRule,
    dy: &Tensor,
) -> Result<GatedDeltaRuleGradient, KernelError> {
    let check = Check("gated_delta_rule_backward");
    let dims = super::check(inputs, state, params)?;
    check.shape("dy", dy, inputs.v.shape(), || format!("v {:?}", inputs.v.shape()))?;
    check.same_device("dy", dy.device(), inputs.q.device())?;
    let (dtype, cpu) = (check.float("dy", dy)?.dtype(), inputs.q.device().as_cpu(check.0)?);
    let sequences = check.sequences(inputs.cu_seqlens, inputs.q.dim(0), state)?;
    let wide =
        [("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("dy", dy)].map(|(n, x)| check.widened(n, x));
    let [raw_q, raw_k, v, dy] = wide;
    let (raw_q, raw_k, v, dy) = (raw_q?, raw_k?, v?, dy?);
    let (q, k) = (params.normalised(&raw_q)?, params.normalised(&raw_k)?);
    let (log_decay, beta) = inputs.gates.computed()?;
    let problem = Problem {
        q: q.as_slice()?,
        k: k.as_slice()?,
        v: v.as_slice()?,
        log_decay: log_decay.as_slice()?,
        beta: beta.as_slice()?,
        dims,
        params,
    };
    let new = |x: &Tensor| Tensor::allocate_zeros(x.shape(), DType::F32, x.device());
    let (mut dq, mut dk, mut dv) = (new(&q)?, new(&k)?, new(&v)?);
    let (mut dlog_decay, mut dbeta) = (new(&log_decay)?, new(&beta)?);
    let gradients = cpu::Gradients {
        dq: dq.as_mut_slice()?,
        dk: dk.as_mut_slice()?,
        dv: dv.as_mut_slice()?,
        dlog_decay: dlog_decay.as_mut_slice()?,
        dbeta: dbeta.as_mut_slice()?,
    };
    cpu::backward(cpu, &problem, &sequences, (state.as_slice()?, dy.as_slice()?), gradients);
    if let Some(norm) = params.qk_norm {
        dq = l2_norm_backward(&raw_q, &norm, &dq)?;
        dk = l2_norm_backward(&raw_k, &norm, &dk)?;
    }
    let dgates = match inputs.gates {
        DeltaGates::Computed { .. } => GatesGradient::Computed { dlog_decay, dbeta },
        DeltaGates::Raw { a, b, a_log, dt_bias } => {
            GatesGradient::Raw(delta_gates_backward([a, b], [a_log, dt_bias], [&dlog_decay, &dbeta])?)
        }
    };
    Ok(GatedDeltaRuleGradient { dq: dq.cast(dtype)?, dk: dk.cast(dtype)?, dv: dv.cast(dtype)?, dgates })
}
