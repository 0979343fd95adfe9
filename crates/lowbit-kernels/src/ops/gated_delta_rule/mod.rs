//! The gated delta rule: linear attention whose state forgets and corrects itself.
//!
//! For each sequence and value head `h`, with key head `head_map(h)` and the f32 state
//! `S [Dk, Dv]`:
//! ```text
//! S     <- exp(log_decay[t, h]) * S
//! delta  = beta[t, h] * (v[t, h] - S^T k[t])
//! S     <- S + k[t] delta^T
//! y[t, h] = scale * S^T q[t]
//! ```
//! With [`Rule::Additive`] nothing is corrected: `delta = beta[t, h] * v[t, h]`. With a decay per
//! channel of the keys, row `c` of `S` is multiplied by `exp(log_decay[t, h, c])`.
//!
//! | operand | shape | dtype |
//! |---|---|---|
//! | `q`, `k` | `[T, Hk, Dk]` | f32, f16 or bf16, the same for `q`, `k` and `v`; see [`GatedDeltaRule::qk_norm`] |
//! | `v` | `[T, Hv, Dv]`, `Hv` a multiple of `Hk` | |
//! | `log_decay` | `[T, Hv]`, or `[T, Hv, Dk]`: a decay per channel; or made of others: see [`DeltaGates`] | f32 |
//! | `beta` | `[T, Hv]`, or made of others | f32 |
//! | `state` | `[S, Hv, Dk, Dv]`, or a pool of them, updated | f32 |
//! | `slots` | `[S]`: sequence `s` has state `slots[s]` of the pool; see [`GatedDeltaInputs::slots`] | u32 |
//! | `cu_seqlens` | `[S + 1]`: sequence `s` is tokens `cu_seqlens[s]..cu_seqlens[s + 1]` | u32 |
//! | `y` | `[T, Hv, Dv]` | as `q` |
//!
//! Operands of peers are converted by their callers: MLX, ggml and mlx-native keep the transposed
//! state, `[Dv, Dk]`; MLX takes the decay itself, whose logarithm is wanted here, and mlx-native
//! `-log_decay`.
//!
//! Everything is computed in f32; `y` is rounded once, to the activations' dtype. [`Form`] chooses
//! between one token after another and chunks of tokens as matrix products; they agree within
//! rounding. Chunks on a GPU (CUDA's tensor cores, or cooperative matrices; f16 and bf16
//! activations) round operands of products to that dtype, the state's too where it is read; sums,
//! gates and the state that is kept are f32. A NaN may then reach the tokens up to 15 before its
//! own. Chunks on a CPU with tiles of bf16 (AMX) round the state to bf16 where it is read, and the
//! keys and queries that it is multiplied with, unless [`GatedDeltaRule::exact`] is set; everything
//! else is f32. With a decay per channel a CPU always computes in f32, and a GPU token after token.
//! On a GPU `cu_seqlens` and `slots` are not looked at beforehand: a sequence whose
//! offsets do not rise, or go past `T`, or whose slot is past the pool, is left out, and what `y`
//! is for tokens of no sequence is undefined.
//!
//! Sources: transformers 5 `torch_recurrent_gated_delta_rule` and `torch_chunk_gated_delta_rule`;
//! mlx-lm 0.32 `gated_delta_ops`; Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024). Without
//! the correction: transformers 5.24 `mamba2_chunk_scan` without its `D`; mlx-lm 0.32 `ssm_update`.
//! With a decay per channel: flash-linear-attention 0.6 `naive_recurrent_kda`; "Kimi Linear"
//! (2025).

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
mod policy;
mod reference;
mod rounded;
#[cfg(test)]
mod tests;

pub use gradient::{GatedDeltaRuleGradient, GatesGradient, gated_delta_rule_backward};

use super::{ChannelDecay, Check, StepLimits, channel_gates, delta_gates, l2_norm, step_gates};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("gated_delta_rule");

/// The tokens of all sequences; shapes and dtypes as the [module](self) says.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct GatedDeltaInputs<'a> {
    pub q: &'a Tensor,
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    pub gates: DeltaGates<'a>,
    pub cu_seqlens: &'a Tensor,
    /// The rows of the state that the sequences read and write, as
    /// [`SlotState::slots`](super::SlotState::slots); `None` if sequence `s` has row `s`. With
    /// slots the bits of a step, one token per sequence, depend on the sequence's own operands
    /// alone: neither on its slot nor on the number of sequences. Gradients take no slots.
    pub slots: Option<&'a Tensor>,
}

impl GatedDeltaInputs<'_> {
    /// Sequences of a call; [`Check::offsets`] has checked the operands.
    #[cfg(feature = "gpu")]
    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }
}

/// The source of `log_decay` and `beta`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum DeltaGates<'a> {
    /// They are there: `log_decay <= 0`.
    Computed { log_decay: &'a Tensor, beta: &'a Tensor },
    /// The op computes them, as [`delta_gates()`](super::delta_gates()) does of the same operands.
    Raw { a: &'a Tensor, b: &'a Tensor, a_log: &'a Tensor, dt_bias: &'a Tensor },
    /// The op computes them of steps of time, as [`step_gates()`](super::step_gates()) does.
    Steps { dt: &'a Tensor, a_log: &'a Tensor, dt_bias: &'a Tensor, limits: StepLimits },
    /// The op computes them with a decay per channel, as
    /// [`channel_gates()`](super::channel_gates()) does.
    Channels { a: &'a Tensor, b: &'a Tensor, a_log: &'a Tensor, dt_bias: &'a Tensor, decay: ChannelDecay },
}

impl DeltaGates<'_> {
    /// `(log_decay, beta)`.
    fn computed(&self) -> Result<(Tensor, Tensor), KernelError> {
        match *self {
            Self::Computed { log_decay, beta } => Ok((log_decay.clone(), beta.clone())),
            Self::Raw { a, b, a_log, dt_bias } => delta_gates(a, b, a_log, dt_bias),
            Self::Steps { dt, a_log, dt_bias, limits } => step_gates(dt, a_log, dt_bias, limits),
            Self::Channels { a, b, a_log, dt_bias, decay } => channel_gates(a, b, a_log, dt_bias, decay),
        }
    }

    /// True if each channel of the keys has a decay of its own.
    fn per_channel(&self) -> bool {
        match self {
            Self::Computed { log_decay, .. } => log_decay.shape().len() == 3,
            Self::Channels { .. } => true,
            Self::Raw { .. } | Self::Steps { .. } => false,
        }
    }

    /// Checks the operands of a call with these `v` and size of keys.
    fn check(&self, v: &Tensor, key_dim: usize) -> Result<(), KernelError> {
        let (op, want) = (CHECK, &v.shape()[..2]);
        let channels = [want[0], want[1], key_dim];
        let shaped = |name, x: &Tensor, want: &[usize]| {
            op.shape(name, x, want, || format!("v {:?}", v.shape()))?;
            op.same_device(name, x.device(), v.device())
        };
        let on = |name, x: &Tensor| shaped(name, x, want);
        match *self {
            Self::Computed { log_decay, beta } => {
                shaped("log_decay", log_decay, if self.per_channel() { &channels } else { want })?;
                on("beta", beta)?;
                for (name, gate) in [("log_decay", log_decay), ("beta", beta)] {
                    op.dtype(name, gate, DType::F32)?;
                }
            }
            Self::Raw { a, b, a_log, dt_bias } => {
                on("a", a)?;
                delta_gates::check(op, [a, b], [a_log, dt_bias])?;
            }
            Self::Steps { dt, a_log, dt_bias, limits } => {
                on("dt", dt)?;
                delta_gates::check_steps(op, dt, [a_log, dt_bias], limits)?;
            }
            Self::Channels { a, b, a_log, dt_bias, decay } => {
                shaped("a", a, &channels)?;
                delta_gates::check_channels(op, [a, b], [a_log, dt_bias], decay)?;
            }
        }
        Ok(())
    }
}

/// The options of the rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDeltaRule {
    /// The term that a token adds to the state.
    pub rule: Rule,
    /// The epsilon of the l2 norm that `q` and `k` get first, each head alone; `None` where the
    /// caller has done so. The same as [`l2_norm()`](super::l2_norm()) beforehand, but rounded to
    /// their dtype only in chunks on a GPU. Source: flash-linear-attention's
    /// `use_qk_l2norm_in_kernel`.
    pub qk_norm: Option<f32>,
    /// Multiplies `q`, normalised or not: `1 / sqrt(Dk)`, or 1 where the caller has done so.
    pub scale: f32,
    /// The key head that a value head reads.
    pub head_map: HeadMap,
    /// The way to compute it.
    pub form: Form,
    /// True if a CPU computes in f32 even where it could round operands of products with the state
    /// to bf16. A GPU computes as its operands' types say.
    pub exact: bool,
}

/// The term that a token adds to the state: `k delta^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// `delta = beta * (v - S^T k)`: the error of what the state predicts.
    Delta,
    /// `delta = beta * v`: Mamba-2 (`q` is its C, `k` its B, `v` its x, `beta` its step of time,
    /// and `log_decay` A times that). It has no gradient.
    Additive,
}

/// The key head that value head `h` reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadMap {
    /// `h / (Hv / Hk)`: transformers, MLX, Qwen3-Next's GGUF.
    Grouped,
    /// `h % Hk`: ggml, Qwen3.5's GGUF, mlx-native.
    Tiled,
}

/// The algorithm of the recurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// The faster one for each sequence's length.
    Auto,
    /// Token after token.
    Recurrent,
    /// Chunks of tokens, as matrix products.
    Chunked,
}

impl GatedDeltaRule {
    /// The conventions of transformers' Qwen3-Next and Qwen3.5: grouped heads, and `1 / sqrt(Dk)`
    /// applied here; `q` and `k` normalised already.
    pub fn new(key_head_dim: usize) -> Self {
        Self {
            rule: Rule::Delta,
            qk_norm: None,
            scale: (key_head_dim as f32).sqrt().recip(),
            head_map: HeadMap::Grouped,
            form: Form::Auto,
            exact: false,
        }
    }

    /// Mamba-2's conventions: nothing is corrected, grouped heads, `q` as it is.
    pub fn additive() -> Self {
        Self { rule: Rule::Additive, scale: 1.0, ..Self::new(1) }
    }

    /// `q` or `k` as the rule multiplies it.
    fn normalised(&self, x: &Tensor) -> Result<Tensor, KernelError> {
        self.qk_norm.map_or_else(|| Ok(x.clone()), |eps| l2_norm(x, eps))
    }
}

/// The sizes of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub key_heads: usize,
    pub key_dim: usize,
    pub value_heads: usize,
    pub value_dim: usize,
}

impl Dims {
    /// The key head that value head `head` reads.
    pub fn key_head(&self, map: HeadMap, head: usize) -> usize {
        match map {
            HeadMap::Grouped => head / (self.value_heads / self.key_heads),
            HeadMap::Tiled => head % self.key_heads,
        }
    }
}

/// Runs the rule over all sequences and leaves their last state in `state`.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that are
/// not as the [module](self) says; on the CPU [`KernelError::Id`] for a slot that the pool lacks.
/// NaN and infinity pass through.
pub fn gated_delta_rule(
    inputs: &GatedDeltaInputs,
    state: &mut Tensor,
    params: &GatedDeltaRule,
) -> Result<Tensor, KernelError> {
    let dims = check(inputs, state, params)?;
    let op = CHECK;
    match inputs.q.device().clone() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::gated_delta_rule(&gpu, inputs, state, dims, params),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match gpu {},
        Device::Cpu(cpu) => {
            let sequences = op.sequences(inputs.cu_seqlens, inputs.q.dim(0))?;
            let [q, k, v] =
                [("q", inputs.q), ("k", inputs.k), ("v", inputs.v)].map(|(n, x)| op.widened(n, x));
            let (q, k, v) = (params.normalised(&q?)?, params.normalised(&k?)?, v?);
            let (mut log_decay, beta) = inputs.gates.computed()?;
            let per_channel = inputs.gates.per_channel();
            if per_channel {
                cpu::exponentiate(&cpu, log_decay.as_mut_slice()?, dims);
            }
            let mut y = Tensor::empty(v.shape(), DType::F32, v.device());
            let problem = cpu::Problem {
                q: q.as_slice()?,
                k: k.as_slice()?,
                v: v.as_slice()?,
                decay: cpu::Decay::new(log_decay.as_slice()?, per_channel),
                beta: beta.as_slice()?,
                dims,
                params,
                slots: inputs.slots.map(Tensor::as_slice).transpose()?,
            };
            problem.run(&cpu, &sequences, y.as_mut_slice()?, state.as_mut_slice()?);
            y.cast(inputs.q.dtype())
        }
    }
}

fn check(inputs: &GatedDeltaInputs, state: &Tensor, params: &GatedDeltaRule) -> Result<Dims, KernelError> {
    let op = CHECK;
    let GatedDeltaInputs { q, k, v, gates, cu_seqlens, slots } = *inputs;
    let [tokens, key_heads, key_dim] = op.dims("q", q, "[T, Hk, Dk]")?;
    op.shape("k", k, q.shape(), || format!("q {:?}", q.shape()))?;
    let [_, value_heads, value_dim] = op.dims("v", v, "[T, Hv, Dv]")?;
    op.shape("v", v, &[tokens, value_heads, value_dim], || format!("q {:?}", q.shape()))?;
    if key_heads == 0 || key_dim == 0 {
        return Err(op.shape_error("q", q, "at least one key head of one element is wanted".into()));
    }
    if value_heads % key_heads != 0 {
        let want = format!("its heads are to be a multiple of the key heads of q {:?}", q.shape());
        return Err(op.shape_error("v", v, want));
    }
    params.qk_norm.map_or(Ok(()), |eps| op.eps(eps))?;
    op.float("q", q)?;
    op.dtype("k", k, q.dtype())?;
    op.dtype("v", v, q.dtype())?;
    gates.check(v, key_dim)?;
    let [states, ..] = op.dims::<4>("state", state, "[S, Hv, Dk, Dv]")?;
    let why = || format!("q {:?} and v {:?}", q.shape(), v.shape());
    op.shape("state", state, &[states, value_heads, key_dim, value_dim], why)?;
    op.dtype("state", state, DType::F32)?;
    op.offsets(cu_seqlens, state, slots)?;
    let others = [("k", k), ("v", v), ("cu_seqlens", cu_seqlens), ("state", state)];
    for (operand, other) in others.into_iter().chain(slots.map(|slots| ("slots", slots))) {
        op.same_device(operand, other.device(), q.device())?;
    }
    Ok(Dims { key_heads, key_dim, value_heads, value_dim })
}
