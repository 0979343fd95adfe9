use super::verify::{StateRows, vars};
use super::{Linear, MergedLinear, PartInput, RmsNorm, Step};
use crate::arch::Mamba2Keys;
use crate::cache::{DeltaCache, LayerCache};
use crate::names::{
    MAMBA_A_LOG, MAMBA_CONV, MAMBA_CONV_BIAS, MAMBA_D, MAMBA_DT_BIAS, MAMBA_IN, MAMBA_NORM, MAMBA_OUT,
};
use crate::tape::ops::{self, StepRuleInputs};
use crate::tape::{Inventory, Named, Var, shapes};
use crate::{Config, ModelError, Outline, Weights};
use lowbit_kernels::ops::{Activation, Gate, GatedDeltaRule, SlotState, StepLimits};
use lowbit_kernels::{Device, KernelError, Tensor};

/// An architecture's Mamba-2 layers.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Mamba2Config {
    pub hidden_size: usize,
    pub num_heads: usize,
    pub head_dim: usize,
    pub state_size: usize,
    /// Heads share B and C in so many groups.
    pub n_groups: usize,
    /// Taps of the convolution.
    pub conv_kernel: usize,
    /// Of the gated norm, whose groups are those of B and C.
    pub rms_norm_eps: f32,
    /// Of steps of time.
    pub limits: StepLimits,
}

impl Mamba2Config {
    /// Reads the sizes; `head_dim` is the size of heads where `config.json` does not say it, and
    /// `limits` are the steps' where it has none.
    ///
    /// # Errors
    /// As [`Config::size`]; [`ModelError::Config`] for heads that the groups do not divide, and for
    /// limits that are no two numbers from 0 on.
    pub fn new(
        config: &Config<'_>,
        keys: &Mamba2Keys,
        head_dim: impl FnOnce(usize) -> Result<usize, ModelError>,
        limits: StepLimits,
    ) -> Result<Self, ModelError> {
        let num_heads = config.size(keys.num_heads, "ssm.time_step_rank")?;
        let head_dim = match config.is_gguf() {
            true => {
                let inner = config.size("", "ssm.inner_size")?;
                if !inner.is_multiple_of(num_heads) {
                    let want = format!("the {num_heads} heads have one size each");
                    return Err(config.refuse("ssm.inner_size", &inner.to_string(), &want));
                }
                inner / num_heads
            }
            false => match config.word(keys.head_dim, "auto")? {
                true => head_dim(num_heads)?,
                false => config.size(keys.head_dim, "")?,
            },
        };
        let n_groups = config.size(keys.n_groups, "ssm.group_count")?;
        if !num_heads.is_multiple_of(n_groups) {
            let want = format!("it does not divide the {num_heads} heads");
            let key = if config.is_gguf() { "ssm.group_count" } else { keys.n_groups };
            return Err(config.refuse(key, &n_groups.to_string(), &want));
        }
        let limits = match config.bounds(keys.limits)? {
            Some([least, most]) => StepLimits { least, most },
            None => limits,
        };
        if !(limits.least >= 0.0 && limits.least <= limits.most) {
            let got = format!("[{}, {}]", limits.least, limits.most);
            return Err(config.refuse(keys.limits, &got, "numbers from 0 on are wanted, the least first"));
        }
        Ok(Self {
            hidden_size: config.size("hidden_size", "embedding_length")?,
            num_heads,
            head_dim,
            state_size: config.size(keys.state_size, "ssm.state_size")?,
            n_groups,
            conv_kernel: config.size(keys.conv_kernel, "ssm.conv_kernel")?,
            rms_norm_eps: config.norm_eps()?,
            limits,
        })
    }

    /// Checks that no product of the sizes overflows.
    fn check(&self, weights: &Weights<'_>) -> Result<(), ModelError> {
        weights.product(["the heads", "their size"], [self.num_heads, self.head_dim])?;
        weights.product(["the groups", "the state's size"], [self.n_groups, self.state_size])?;
        weights.product(["the channels", "the taps"], [self.conv_dim(), self.conv_kernel])?;
        // The recurrence's state has no tensor in the file.
        let state = [self.num_heads, self.head_dim, self.state_size, size_of::<f32>()];
        weights.product(["the heads", "their size", "the state's size", "4 bytes"], state).map(drop)
    }

    /// Columns of all heads.
    pub fn inner_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Columns of B, and of C.
    fn group_columns(&self) -> usize {
        self.n_groups * self.state_size
    }

    /// Channels of the convolution: x, B and C.
    pub fn conv_dim(&self) -> usize {
        self.inner_size() + 2 * self.group_columns()
    }

    /// Rows of the projection of the input: z, x, B, C and a step of time for each head.
    pub fn projections(&self) -> [usize; 3] {
        [self.inner_size(), self.conv_dim(), self.num_heads]
    }
}

/// Mamba-2: a convolution over x, B and C, the gated delta rule without its correction, and a norm
/// behind a gate.
///
/// Source: transformers 5.24 `GraniteMoeHybridMambaLayer`; mlx-lm 0.32 `ssm_update`; Dao and Gu,
/// "Transformers are SSMs" (2024).
#[derive(Clone, Debug)]
pub struct Mamba2 {
    config: Mamba2Config,
    in_proj: MergedLinear<3>,
    conv: Named<Tensor>,
    conv_bias: Option<Named<Tensor>>,
    a_log: Named<Tensor>,
    dt_bias: Named<Tensor>,
    /// The factor of x that is added to the result, `[num_heads * head_dim]`.
    skip: Named<Tensor>,
    norm: GroupNorm,
    out_proj: Linear,
    /// [`GatedDeltaRule::exact`].
    exact: bool,
}

/// An RMSNorm of each group of columns.
#[derive(Clone, Debug)]
struct GroupNorm {
    /// Of all columns where there is one group; of a group, with a weight of ones, otherwise.
    norm: RmsNorm,
    /// The weight of all groups, where there are several.
    weight: Option<Named<Tensor>>,
}

impl GroupNorm {
    fn load(weights: &Weights<'_>, config: &Mamba2Config) -> Result<Self, ModelError> {
        let (columns, groups) = (config.inner_size(), config.n_groups);
        let weight = weights.norm(MAMBA_NORM, columns)?;
        if groups == 1 {
            return Ok(Self { norm: RmsNorm::new(weight, config.rms_norm_eps), weight: None });
        }
        let ones = vec![1f32; columns / groups];
        let ones = weight.with(Tensor::new(&ones, &[ones.len()], weights.device())?);
        Ok(Self { norm: RmsNorm::new(ones, config.rms_norm_eps), weight: Some(weight) })
    }

    fn list(&self, all: &mut Inventory) {
        match &self.weight {
            Some(weight) => all.tensors.push(weight.clone()),
            None => self.norm.list(all),
        }
    }

    /// Of `[T, columns]`.
    fn forward(&self, x: &Var) -> Result<Var, KernelError> {
        let Some(weight) = &self.weight else { return self.norm.forward(x) };
        let (rows, columns) = (x.dim(0), x.dim(1));
        let size = self.norm.parts().0.len();
        let groups = shapes::reshape(x, &[rows * columns / size, size])?;
        let normed = shapes::reshape(&self.norm.forward(&groups)?, &[rows, columns])?;
        ops::mul(&normed, &weight.value.clone().into())
    }
}

impl Mamba2 {
    /// A layer's weights.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(weights: &Weights<'_>, config: &Mamba2Config) -> Result<Self, ModelError> {
        config.check(weights)?;
        let (heads, channels, width) = (config.num_heads, config.conv_dim(), config.conv_kernel);
        let conv = weights.vector(MAMBA_CONV, channels * width)?;
        let conv_bias = match weights.has(MAMBA_CONV_BIAS.0, MAMBA_CONV_BIAS.1) {
            true => Some(weights.vector(MAMBA_CONV_BIAS, channels)?),
            false => None,
        };
        let mut a_log = weights.vector(MAMBA_A_LOG, heads)?;
        if weights.is_gguf() {
            // GGUF stores -exp(A_log).
            let rates = weights.values(MAMBA_A_LOG, heads)?;
            let logs: Vec<f32> = rates.iter().map(|rate| (-rate).ln()).collect();
            a_log.value = Tensor::new(&logs, &[heads], weights.device())?;
        }
        let skip = weights.vector(MAMBA_D, heads)?;
        let factors = weights.values(MAMBA_D, heads)?;
        let row: Vec<f32> = factors.iter().flat_map(|&d| std::iter::repeat_n(d, config.head_dim)).collect();
        Ok(Self {
            in_proj: weights.fused(MAMBA_IN, config.projections(), config.hidden_size)?,
            conv: conv.with(conv.value.reshape(&[channels, width])?),
            conv_bias,
            a_log,
            dt_bias: weights.vector(MAMBA_DT_BIAS, heads)?,
            skip: skip.with(Tensor::new(&row, &[row.len()], weights.device())?),
            norm: GroupNorm::load(weights, config)?,
            out_proj: weights.linear(MAMBA_OUT, config.hidden_size, config.inner_size())?,
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
        let Mamba2Config { num_heads, head_dim, state_size, conv_kernel, .. } = self.config;
        let conv = [sequences, self.config.conv_dim(), conv_kernel - 1];
        DeltaCache::of_sizes(conv, [sequences, num_heads, state_size, head_dim], device)
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        self.in_proj.list(all);
        let tensors = [&self.conv, &self.a_log, &self.dt_bias, &self.skip];
        all.tensors.extend(tensors.into_iter().chain(&self.conv_bias).map(Named::clone));
        self.norm.list(all);
        self.out_proj.list(all);
    }

    pub(crate) fn outline(&self, outline: &mut Outline) {
        let Mamba2Config { num_heads, head_dim, state_size, n_groups, conv_kernel, .. } = self.config;
        outline.word("mixer", "mamba2");
        outline.word("mamba2's heads", num_heads);
        outline.word("mamba2's head_dim", head_dim);
        outline.word("mamba2's state_size", state_size);
        outline.word("mamba2's n_groups", n_groups);
        outline.word("mamba2's conv_kernel", conv_kernel);
        outline.word("mamba2's conv_bias", self.conv_bias.is_some());
        outline.numbers("gated norm's eps", &[self.config.rms_norm_eps]);
        let StepLimits { least, most } = self.config.limits;
        // The largest number in JSON stands for none.
        outline.numbers("time_step_limit", &[least, most.min(f32::MAX)]);
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
        let (sum, [z, channels, dt]) = self.in_proj.forward_sum(x)?;
        let device = channels.tensor().device();
        let new = |sequences| self.states(sequences, device);
        let mix =
            |inputs: [&Var; 2], rows: StateRows<'_>, states: &mut DeltaCache| self.mix(inputs, rows, states);
        let y = step.with_states([&channels, &dt], caches, new, mix)?;
        let y = self.norm.forward(&ops::glu(&y, &z, Gate::Silu)?)?;
        Ok((sum, self.out_proj.forward(&y)?))
    }

    /// As [`Block::catch_up`](super::Block::catch_up).
    pub(super) fn catch_up(
        &self,
        inputs: &[Tensor],
        rows: StateRows<'_>,
        states: &mut DeltaCache,
    ) -> Result<(), KernelError> {
        let [channels, dt] = vars(inputs)?;
        self.mix([&channels, &dt], rows, states).map(drop)
    }

    /// The convolution and the rule for sequences at these places, `[T, num_heads * head_dim]`.
    fn mix(
        &self,
        [channels, dt]: [&Var; 2],
        StateRows { cu_seqlens, slots, form }: StateRows<'_>,
        cache: &mut DeltaCache,
    ) -> Result<Var, KernelError> {
        let (tokens, config) = (channels.dim(0), &self.config);
        let widths = [config.inner_size(), config.group_columns(), config.group_columns()];
        let states = SlotState { state: &mut cache.conv, slots };
        let taps = (&self.conv, self.conv_bias.as_ref());
        let silu = Some(Activation::Silu);
        let [x, b, c] = ops::causal_conv1d_parts(channels, taps, states, cu_seqlens, silu, widths)?;
        let groups = [tokens, config.n_groups, config.state_size];
        let (q, k) = (shapes::reshape(&c, &groups)?, shapes::reshape(&b, &groups)?);
        let v = shapes::reshape(&x, &[tokens, config.num_heads, config.head_dim])?;
        let inputs = StepRuleInputs {
            qkv: [&q, &k, &v],
            dt,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            limits: config.limits,
            cu_seqlens,
            slots,
        };
        let rule = GatedDeltaRule { exact: self.exact, form, ..GatedDeltaRule::additive() };
        let y = ops::additive_rule(&inputs, &mut cache.state, &rule)?;
        let y = shapes::reshape(&y, &[tokens, config.inner_size()])?;
        ops::add(&y, &ops::mul(&x, &self.skip.value.clone().into())?)
    }
}
