use super::verify::{StateRows, vars};
use super::{Linear, MergedLinear, PartInput, RmsNorm, Step};
use crate::cache::{DeltaCache, LayerCache};
use crate::names::{
    A_LOG, CONV1D, DELTA_NORM, DT_BIAS, IN_PROJ_A, IN_PROJ_B, IN_PROJ_BA, IN_PROJ_QKV, IN_PROJ_QKVZ,
    IN_PROJ_Z, OUT_PROJ,
};
use crate::tape::ops::{self, DeltaRuleInputs};
use crate::tape::{Inventory, Named, Var, shapes};
use crate::{Config, ModelError, Outline, Weights};
use lowbit_kernels::ops::{Activation, GatedDeltaRule, HeadMap, SlotState};
use lowbit_kernels::{Device, KernelError, Tensor};

/// The epsilon of q's and k's l2norm, transformers' and flash-linear-attention's.
const L2_EPS: f32 = 1e-6;

/// An architecture's gated delta nets.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DeltaNetConfig {
    pub hidden_size: usize,
    pub linear_num_key_heads: usize,
    pub linear_num_value_heads: usize,
    pub linear_key_head_dim: usize,
    pub linear_value_head_dim: usize,
    pub linear_conv_kernel_dim: usize,
    pub rms_norm_eps: f32,
    pub head_map: HeadMap,
}

impl DeltaNetConfig {
    /// Reads the sizes.
    ///
    /// # Errors
    /// As [`Config::size`]; [`ModelError::Config`] when value heads are no multiple of key heads.
    pub fn new(config: &Config<'_>, head_map: HeadMap) -> Result<Self, ModelError> {
        let value_heads = config.size("linear_num_value_heads", "ssm.time_step_rank")?;
        let value_head_dim = match config.is_gguf() {
            true => config.size("", "ssm.inner_size")? / value_heads,
            false => config.size("linear_value_head_dim", "")?,
        };
        if value_head_dim == 0 {
            let want = format!("the {value_heads} value heads have at least one element each");
            return Err(config.refuse("ssm.inner_size", "less", &want));
        }
        let key_heads = config.size("linear_num_key_heads", "ssm.group_count")?;
        if !value_heads.is_multiple_of(key_heads) {
            let want = format!("a multiple of the {key_heads} key heads is wanted");
            return Err(config.refuse("linear_num_value_heads", &value_heads.to_string(), &want));
        }
        Ok(Self {
            hidden_size: config.size("hidden_size", "embedding_length")?,
            linear_num_key_heads: key_heads,
            linear_num_value_heads: value_heads,
            linear_key_head_dim: config.size("linear_key_head_dim", "ssm.state_size")?,
            linear_value_head_dim: value_head_dim,
            linear_conv_kernel_dim: config.size("linear_conv_kernel_dim", "ssm.conv_kernel")?,
            rms_norm_eps: config.norm_eps()?,
            head_map,
        })
    }

    /// Checks that no product of the sizes overflows.
    fn check(&self, weights: &Weights<'_>) -> Result<(), ModelError> {
        let keys = (self.linear_num_key_heads, self.linear_key_head_dim);
        let values = (self.linear_num_value_heads, self.linear_value_head_dim);
        weights.product(["linear_num_key_heads", "linear_key_head_dim"], [keys.0, keys.1])?;
        weights.product(["linear_num_value_heads", "linear_value_head_dim"], [values.0, values.1])?;
        let sizes = [self.conv_dim(), self.linear_conv_kernel_dim];
        weights.product(["the channels", "linear_conv_kernel_dim"], sizes)?;
        // The recurrence's state has no tensor in the file.
        let state = [values.0, keys.1, values.1, size_of::<f32>()];
        let names = ["linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "4 bytes"];
        weights.product(names, state).map(drop)
    }

    /// The states of so many sequences that have not begun.
    fn states(&self, sequences: usize, device: &Device) -> Result<DeltaCache, KernelError> {
        let conv = [sequences, self.conv_dim(), self.linear_conv_kernel_dim - 1];
        let [heads, keys, values] =
            [self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim];
        DeltaCache::of_sizes(conv, [sequences, heads, keys, values], device)
    }

    /// Columns of all keys (and of all queries).
    pub fn key_dim(&self) -> usize {
        self.linear_num_key_heads * self.linear_key_head_dim
    }

    /// Columns of all values.
    pub fn value_dim(&self) -> usize {
        self.linear_num_value_heads * self.linear_value_head_dim
    }

    /// Channels of the convolution: q, k and v.
    pub fn conv_dim(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }
}

/// The checkpoint's arrangement of the input projections.
#[derive(Clone, Debug)]
pub enum Projections {
    /// One each: q, k and v together, z, b and a.
    Split(MergedLinear<4>),
    /// q, k, v and z grouped by key head; likewise b and a.
    Interleaved(MergedLinear<2>),
    /// q, k and v together and z, but b and a grouped by key head.
    InterleavedGates(MergedLinear<3>),
}

/// Gated delta net: a convolution over q, k and v, the gated delta rule, and a gated norm.
#[derive(Clone, Debug)]
pub struct GatedDeltaNet {
    config: DeltaNetConfig,
    projections: Projections,
    conv: Named<Tensor>,
    a_log: Named<Tensor>,
    dt_bias: Named<Tensor>,
    norm: RmsNorm,
    out_proj: Linear,
    /// [`GatedDeltaRule::exact`].
    exact: bool,
}

/// The projections of x.
struct Projected {
    qkv: Var,
    z: Var,
    b: Var,
    a: Var,
}

impl GatedDeltaNet {
    pub(crate) fn outline(&self, outline: &mut Outline) {
        let DeltaNetConfig { linear_num_key_heads, linear_num_value_heads, .. } = self.config;
        outline.word("mixer", "gated delta net");
        outline.word("linear_num_key_heads", linear_num_key_heads);
        outline.word("linear_num_value_heads", linear_num_value_heads);
        outline.word("linear_key_head_dim", self.config.linear_key_head_dim);
        outline.word("linear_value_head_dim", self.config.linear_value_head_dim);
        outline.word("linear_conv_kernel_dim", self.config.linear_conv_kernel_dim);
        outline.numbers("gated norm's eps", &[self.config.rms_norm_eps]);
    }

    /// A layer's weights.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(weights: &Weights<'_>, config: &DeltaNetConfig) -> Result<Self, ModelError> {
        config.check(weights)?;
        let (heads, width) = (config.linear_num_value_heads, config.linear_conv_kernel_dim);
        let conv = weights.vector(CONV1D, config.conv_dim() * width)?;
        let mut a_log = weights.vector(A_LOG, heads)?;
        if weights.is_gguf() {
            // GGUF stores -exp(A_log).
            let rates = weights.values(A_LOG, heads)?;
            let logs: Vec<f32> = rates.iter().map(|rate| (-rate).ln()).collect();
            a_log.value = Tensor::new(&logs, &[heads], weights.device())?;
        }
        Ok(Self {
            projections: Projections::load(weights, config)?,
            conv: conv.with(conv.value.reshape(&[config.conv_dim(), width])?),
            a_log,
            dt_bias: weights.vector(DT_BIAS, heads)?,
            norm: RmsNorm::load(weights, DELTA_NORM, config.linear_value_head_dim, config.rms_norm_eps)?,
            out_proj: weights.linear(OUT_PROJ, config.hidden_size, config.value_dim())?,
            config: config.clone(),
            exact: weights.is_exact(),
        })
    }

    /// An empty cache for this layer.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn cache(&self, device: &Device) -> Result<DeltaCache, KernelError> {
        self.config.states(1, device)
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        match &self.projections {
            Projections::Split(projections) => projections.list(all),
            Projections::Interleaved(projections) => projections.list(all),
            Projections::InterleavedGates(projections) => projections.list(all),
        }
        all.tensors.extend([&self.conv, &self.a_log, &self.dt_bias].map(Named::clone));
        self.norm.list(all);
        self.out_proj.list(all);
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
        let (tokens, config) = (x.update().dim(0), &self.config);
        let (sum, Projected { qkv, z, b, a }) = self.projections.forward(x, config)?;
        let device = qkv.tensor().device();
        let new = |sequences| config.states(sequences, device);
        let mix =
            |inputs: [&Var; 3], rows: StateRows<'_>, states: &mut DeltaCache| self.mix(inputs, rows, states);
        let o = step.with_states([&qkv, &a, &b], caches, new, mix)?;
        let o = shapes::reshape(&o, &[tokens, config.value_dim()])?;
        Ok((sum, self.out_proj.forward(self.norm.gated(&o, &z))?))
    }

    /// As [`Block::catch_up`](super::Block::catch_up).
    pub(super) fn catch_up(
        &self,
        inputs: &[Tensor],
        rows: StateRows<'_>,
        states: &mut DeltaCache,
    ) -> Result<(), KernelError> {
        let [qkv, a, b] = vars(inputs)?;
        self.mix([&qkv, &a, &b], rows, states).map(drop)
    }

    /// The convolution and the rule for sequences at these places, `[T, Hv, Dv]`.
    fn mix(
        &self,
        [qkv, a, b]: [&Var; 3],
        StateRows { cu_seqlens, slots, form }: StateRows<'_>,
        cache: &mut DeltaCache,
    ) -> Result<Var, KernelError> {
        let (tokens, config) = (qkv.dim(0), &self.config);
        let (key_dim, value_dim) = (config.key_dim(), config.value_dim());
        let states = SlotState { state: &mut cache.conv, slots };
        let (silu, widths) = (Some(Activation::Silu), [key_dim, key_dim, value_dim]);
        let [q, k, v] = ops::causal_conv1d_parts(qkv, (&self.conv, None), states, cu_seqlens, silu, widths)?;
        let keys = [tokens, config.linear_num_key_heads, config.linear_key_head_dim];
        let values = [tokens, config.linear_num_value_heads, config.linear_value_head_dim];
        let rule = GatedDeltaRule {
            qk_norm: Some(L2_EPS),
            head_map: config.head_map,
            exact: self.exact,
            form,
            ..GatedDeltaRule::new(config.linear_key_head_dim)
        };
        let (q, k) = (shapes::reshape(&q, &keys)?, shapes::reshape(&k, &keys)?);
        let v = shapes::reshape(&v, &values)?;
        let (a_log, dt_bias) = (&self.a_log, &self.dt_bias);
        let inputs = DeltaRuleInputs { qkv: [&q, &k, &v], a, b, a_log, dt_bias, cu_seqlens, slots };
        ops::gated_delta_rule(&inputs, &mut cache.state, &rule)
    }
}

impl Projections {
    /// Loads whichever arrangement the checkpoint has.
    fn load(weights: &Weights<'_>, config: &DeltaNetConfig) -> Result<Self, ModelError> {
        let (hidden, heads) = (config.hidden_size, config.linear_num_value_heads);
        let (qkv, values) = (config.conv_dim(), config.value_dim());
        if weights.has_module(IN_PROJ_QKVZ) {
            let parts = [(IN_PROJ_QKVZ, qkv + values), (IN_PROJ_BA, 2 * heads)];
            return Ok(Self::Interleaved(weights.merged(parts, hidden)?));
        }
        let (qkv, z) = ((IN_PROJ_QKV, qkv), (IN_PROJ_Z, values));
        if weights.has_module(IN_PROJ_BA) {
            return Ok(Self::InterleavedGates(weights.merged([qkv, z, (IN_PROJ_BA, 2 * heads)], hidden)?));
        }
        let (b, a) = ((IN_PROJ_B, heads), (IN_PROJ_A, heads));
        Ok(Self::Split(weights.merged([qkv, z, b, a], hidden)?))
    }

    /// The sum that x is, or is the norm of, and the projections of x.
    fn forward(&self, x: PartInput<'_>, config: &DeltaNetConfig) -> Result<(Var, Projected), KernelError> {
        match self {
            Self::Split(projections) => {
                let (sum, [qkv, z, b, a]) = projections.forward_sum(x)?;
                Ok((sum, Projected { qkv, z, b, a }))
            }
            Self::Interleaved(projections) => {
                let value = config.value_dim() / config.linear_num_key_heads;
                let key = config.linear_key_head_dim;
                let (sum, [qkvz, ba]) = projections.forward_sum(x)?;
                let [q, k, v, z] = deinterleave(&qkvz, config, [key, key, value, value])?;
                let [b, a] = split_gates(&ba, config)?;
                Ok((sum, Projected { qkv: shapes::concat([&q, &k, &v])?, z, b, a }))
            }
            Self::InterleavedGates(projections) => {
                let (sum, [qkv, z, ba]) = projections.forward_sum(x)?;
                let [b, a] = split_gates(&ba, config)?;
                Ok((sum, Projected { qkv, z, b, a }))
            }
        }
    }
}

fn split_gates(ba: &Var, config: &DeltaNetConfig) -> Result<[Var; 2], KernelError> {
    let heads = config.linear_num_value_heads / config.linear_num_key_heads;
    deinterleave(ba, config, [heads, heads])
}

/// Splits columns that are grouped by key head, `widths` of each kind per head, into one
/// `[T, Hk * width]` per kind.
fn deinterleave<const N: usize>(
    x: &Var,
    config: &DeltaNetConfig,
    widths: [usize; N],
) -> Result<[Var; N], KernelError> {
    let (tokens, heads) = (x.dim(0), config.linear_num_key_heads);
    let x = shapes::reshape(x, &[tokens, heads, widths.iter().sum()])?;
    let parts = shapes::split_columns(&x, widths)?;
    shapes::each(parts.map(|part| shapes::reshape(&part, &[tokens, heads * part.dim(-1)])))
}
