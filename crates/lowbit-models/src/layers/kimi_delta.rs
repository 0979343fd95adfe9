use super::verify::{StateRows, vars};
use super::{Linear, MergedLinear, PartInput, RmsNorm, Step};
use crate::cache::{DeltaCache, LayerCache};
use crate::names::{
    B_PROJ, F_A_PROJ, F_B_PROJ, G_A_PROJ, G_B_PROJ, K_CONV, K_PROJ, KDA_A_LOG, KDA_DT_BIAS, O_NORM, O_PROJ,
    Q_CONV, Q_PROJ, V_CONV, V_PROJ,
};
use crate::tape::ops::{self, ChannelRuleInputs, Input};
use crate::tape::{Inventory, Named, Var, shapes};
use crate::{ModelError, Outline, Weights};
use lowbit_kernels::ops::{Activation, ChannelDecay, Gate, GatedDeltaRule, SlotState};
use lowbit_kernels::{Device, KernelError, Tensor};

/// The epsilon of q's and k's l2norm, flash-linear-attention's.
const L2_EPS: f32 = 1e-6;

/// An architecture's layers of Kimi Delta Attention.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct KimiDeltaConfig {
    pub hidden_size: usize,
    pub num_heads: usize,
    /// Elements of a head's keys, and of its values.
    pub head_dim: usize,
    /// Taps of the convolutions.
    pub conv_kernel: usize,
    /// Of the norm of each head's result.
    pub rms_norm_eps: f32,
    pub decay: ChannelDecay,
    /// True if the projections to the gates of the decay and of the output have two parts, with
    /// `head_dim` values between them.
    pub low_rank: bool,
}

impl KimiDeltaConfig {
    /// Columns of all heads.
    pub fn width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Checks that no product of the sizes overflows.
    fn check(&self, weights: &Weights<'_>) -> Result<(), ModelError> {
        let Self { num_heads, head_dim, conv_kernel, .. } = *self;
        weights
            .product(["3", "the heads", "their size", "the taps"], [3, num_heads, head_dim, conv_kernel])?;
        // The recurrence's state has no tensor in the file.
        let state = [num_heads, head_dim, head_dim, size_of::<f32>()];
        weights.product(["the heads", "their size", "their size", "4 bytes"], state).map(drop)
    }
}

/// Kimi Delta Attention: a convolution over each of q, k and v, the delta rule with a decay per
/// channel of the keys, and a norm of each head times a sigmoid.
///
/// Source: transformers 5.24 `KimiLinearDeltaAttention`, `BailingHybridDeltaAttention`; mlx-lm 0.32
/// `KimiDeltaAttention`; "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
#[derive(Clone, Debug)]
pub struct KimiDelta {
    config: KimiDeltaConfig,
    /// q, k, v, the gates of the decay and of the output or what these are made of, and beta.
    in_proj: MergedLinear<6>,
    /// The second parts of the projections to the two gates.
    gate_projs: Option<[Linear; 2]>,
    /// `[3 width, taps]`: q's, k's and v's.
    convs: Named<Tensor>,
    /// `[num_heads]`.
    a_log: Named<Tensor>,
    /// `[num_heads, head_dim]`.
    dt_bias: Named<Tensor>,
    norm: RmsNorm,
    o_proj: Linear,
    /// [`GatedDeltaRule::exact`].
    exact: bool,
}

impl KimiDelta {
    /// A layer's weights.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(weights: &Weights<'_>, config: &KimiDeltaConfig) -> Result<Self, ModelError> {
        config.check(weights)?;
        let KimiDeltaConfig { hidden_size: hidden, num_heads: heads, head_dim, .. } = *config;
        let width = config.width();
        let gate = if config.low_rank { head_dim } else { width };
        let parts = [
            (Q_PROJ, width),
            (K_PROJ, width),
            (V_PROJ, width),
            (F_A_PROJ, gate),
            (G_A_PROJ, gate),
            (B_PROJ, heads),
        ];
        let second = |name| weights.linear(name, width, head_dim);
        let gate_projs = match config.low_rank {
            true => Some([second(F_B_PROJ)?, second(G_B_PROJ)?]),
            false => None,
        };
        let mut a_log = weights.vector(KDA_A_LOG, heads)?;
        if weights.is_gguf() {
            a_log.value = Tensor::new(&stored_logs(weights, config)?, &[heads], weights.device())?;
        }
        let dt_bias = weights.vector(KDA_DT_BIAS, width)?;
        Ok(Self {
            in_proj: weights.merged(parts, hidden)?,
            gate_projs,
            convs: convolutions(weights, config)?,
            a_log,
            dt_bias: dt_bias.with(dt_bias.value.reshape(&[heads, head_dim])?),
            norm: RmsNorm::load(weights, O_NORM, head_dim, config.rms_norm_eps)?,
            o_proj: weights.linear(O_PROJ, hidden, width)?,
            config: *config,
            exact: weights.is_exact(),
        })
    }

    /// An empty cache for this layer.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn cache(&self, device: &Device) -> Result<DeltaCache, KernelError> {
        self.states(1, device)
    }

    /// The states of so many sequences that have not begun.
    fn states(&self, sequences: usize, device: &Device) -> Result<DeltaCache, KernelError> {
        let KimiDeltaConfig { num_heads, head_dim, conv_kernel, .. } = self.config;
        let conv = [sequences, 3 * self.config.width(), conv_kernel - 1];
        DeltaCache::of_sizes(conv, [sequences, num_heads, head_dim, head_dim], device)
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        self.in_proj.list(all);
        self.gate_projs.iter().flatten().for_each(|proj| proj.list(all));
        all.tensors.extend([&self.a_log, &self.dt_bias].map(Named::clone));
        self.norm.list(all);
        self.o_proj.list(all);
    }

    pub(crate) fn outline(&self, outline: &mut Outline) {
        let KimiDeltaConfig { num_heads, head_dim, conv_kernel, decay, low_rank, .. } = self.config;
        outline.word("mixer", "kimi delta attention");
        outline.word("kimi delta attention's heads", num_heads);
        outline.word("kimi delta attention's head_dim", head_dim);
        outline.word("kimi delta attention's taps", conv_kernel);
        outline.word("kimi delta attention's decay", format!("{decay:?}"));
        outline.word("kimi delta attention's gates have two parts", low_rank);
        outline.numbers("gated norm's eps", &[self.config.rms_norm_eps]);
    }

    /// T tokens, whose input is a sum or the norm of one, `[T, hidden_size]`. Returns that sum and
    /// the result, of the same shape; each sequence's cache advances by its tokens.
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`](super::wrong_cache) for the cache of another kind of
    /// layer.
    pub fn forward(
        &self,
        x: PartInput<'_>,
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<(Var, Var), KernelError> {
        let KimiDeltaConfig { num_heads: heads, head_dim, .. } = self.config;
        let (tokens, width) = (x.update().dim(0), self.config.width());
        let (sum, [q, k, v, decay, gate, b]) = self.in_proj.forward_sum(x)?;
        let [decay, gate] = match &self.gate_projs {
            Some([of_decay, of_gate]) => [of_decay.forward(&decay)?, of_gate.forward(&gate)?],
            None => [decay, gate],
        };
        let qkv = shapes::concat([&q, &k, &v])?;
        let device = qkv.tensor().device();
        let new = |sequences| self.states(sequences, device);
        let mix =
            |inputs: [&Var; 3], rows: StateRows<'_>, states: &mut DeltaCache| self.mix(inputs, rows, states);
        let y = step.with_states([&qkv, &decay, &b], caches, new, mix)?;
        let y = self.norm.forward(&shapes::reshape(&y, &[tokens * heads, head_dim])?)?;
        let y = shapes::reshape(&y, &[tokens, width])?;
        Ok((sum, self.o_proj.forward(Input::Glu { x: &y, gate: &gate, by: Gate::Sigmoid })?))
    }

    /// As [`Block::catch_up`](super::Block::catch_up).
    pub(super) fn catch_up(
        &self,
        inputs: &[Tensor],
        rows: StateRows<'_>,
        states: &mut DeltaCache,
    ) -> Result<(), KernelError> {
        let [qkv, decay, b] = vars(inputs)?;
        self.mix([&qkv, &decay, &b], rows, states).map(drop)
    }

    /// The convolutions and the rule for sequences at these places, `[T, num_heads, head_dim]`.
    fn mix(
        &self,
        [qkv, decay, b]: [&Var; 3],
        StateRows { cu_seqlens, slots, form }: StateRows<'_>,
        cache: &mut DeltaCache,
    ) -> Result<Var, KernelError> {
        let KimiDeltaConfig { num_heads: heads, head_dim, .. } = self.config;
        let states = SlotState { state: &mut cache.conv, slots };
        let (silu, widths) = (Some(Activation::Silu), [self.config.width(); 3]);
        let parts = ops::causal_conv1d_parts(qkv, (&self.convs, None), states, cu_seqlens, silu, widths)?;
        let shape = [qkv.dim(0), heads, head_dim];
        let [q, k, v] = shapes::each(parts.map(|part| shapes::reshape(&part, &shape)))?;
        let rule = GatedDeltaRule {
            qk_norm: Some(L2_EPS),
            exact: self.exact,
            form,
            ..GatedDeltaRule::new(head_dim)
        };
        let inputs = ChannelRuleInputs {
            qkv: [&q, &k, &v],
            a: &shapes::reshape(decay, &shape)?,
            b,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            decay: self.config.decay,
            cu_seqlens,
            slots,
        };
        ops::channel_rule(&inputs, &mut cache.state, &rule)
    }
}

/// `A_log` of a GGUF file: it stores `-exp(A_log)`, or with a bound `exp(A_log)`.
fn stored_logs(weights: &Weights<'_>, config: &KimiDeltaConfig) -> Result<Vec<f32>, ModelError> {
    let sign = match config.decay {
        ChannelDecay::Softplus => -1.0,
        ChannelDecay::Bounded(_) => 1.0,
    };
    let rates = weights.values(KDA_A_LOG, config.num_heads)?;
    Ok(rates.iter().map(|rate| (sign * rate).ln()).collect())
}

/// The kernels over q, k and v, one after the other.
fn convolutions(weights: &Weights<'_>, config: &KimiDeltaConfig) -> Result<Named<Tensor>, ModelError> {
    let (width, taps) = (config.width(), config.conv_kernel);
    let first = weights.vector(Q_CONV, width * taps)?;
    let mut values = vec![];
    for name in [Q_CONV, K_CONV, V_CONV] {
        values.extend(weights.values(name, width * taps)?);
    }
    Ok(first.with(Tensor::new(&values, &[3 * width, taps], weights.device())?))
}
