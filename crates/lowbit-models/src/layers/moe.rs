use super::{Linear, MergedLinear, Mlp, MlpConfig};
use crate::names::{
    EXPERT_SCALE, EXPERTS_DOWN, EXPERTS_GATE, EXPERTS_UP, FUSED_DOWN, FUSED_GATE_UP, FUSED_SHARED_EXPERT,
    LATENT_DOWN, LATENT_UP, Name, ROUTER, SELECTION_BIAS, SHARED_EXPERT, SHARED_EXPERT_GATE, STACKED_UP,
};
use crate::tape::ops::{self, Input};
use crate::tape::{Inventory, Named, Var, shapes};
use crate::{Config, ModelError, Outline, Weights};
use lowbit_formats::{FloatType, Format};
use lowbit_kernels::ops::{Gate, RouterParams, RouterScores, dequant_gather, streams_experts};
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor};

/// The sizes of a mixture of experts, as `config.json` names them.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct MoeConfig {
    pub num_experts: usize,
    pub moe_intermediate_size: usize,
    /// The choice of `num_experts_per_tok` experts and their weights (`norm_topk_prob`).
    pub router: RouterParams,
    /// True if the choice has a bias of each expert.
    pub selection_bias: bool,
    /// Zero where there is no shared expert.
    pub shared_expert_intermediate_size: usize,
    /// True if the shared expert is weighed by a sigmoid gate; otherwise by 1.
    pub shared_expert_gate: bool,
    /// The function of the experts' gates, and of the shared one's.
    pub gate: Gate,
    /// True if experts' projections have biases.
    pub biases: bool,
    /// True if each expert's weight has a factor of its own.
    pub factors: bool,
    /// False if up is its own gate in the experts, without a projection of its own.
    pub gated: bool,
    /// The size that the experts' input is projected to, and their sum back from, if it is another
    /// than the hidden one.
    pub latent_size: Option<usize>,
}

impl MoeConfig {
    /// Reads the sizes; `norm_topk_prob` is the flag's default.
    ///
    /// # Errors
    /// As [`Config::size`]; [`ModelError::Config`] for more chosen experts than there are.
    pub fn new(config: &Config<'_>, norm_topk_prob: bool) -> Result<Self, ModelError> {
        let num_experts = config.size("num_experts", "expert_count")?;
        let inner = config.size("moe_intermediate_size", "expert_feed_forward_length")?;
        let shared =
            config.optional_size("shared_expert_intermediate_size", "expert_shared_feed_forward_length")?;
        let mut moe = Self::of(config, num_experts, inner)?;
        moe.shared_expert_intermediate_size = shared.unwrap_or(0);
        moe.router.normalize = config.flag("norm_topk_prob", norm_topk_prob)?;
        Ok(moe)
    }

    /// `num_experts` experts of `moe_intermediate_size` rows, of which none is shared, with weights
    /// that are divided by their sum.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of(
        config: &Config<'_>,
        num_experts: usize,
        moe_intermediate_size: usize,
    ) -> Result<Self, ModelError> {
        Self::by("num_experts_per_tok", config, [num_experts, moe_intermediate_size])
    }

    /// The same where `config.json` has the number of chosen experts as `key`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn by(
        key: &str,
        config: &Config<'_>,
        [num_experts, moe_intermediate_size]: [usize; 2],
    ) -> Result<Self, ModelError> {
        let top_k = config.size(key, "expert_used_count")?;
        if top_k > num_experts {
            let want = format!("there are {num_experts} experts");
            return Err(config.refuse(key, &top_k.to_string(), &want));
        }
        Ok(Self {
            num_experts,
            moe_intermediate_size,
            router: RouterParams::softmax(top_k, true),
            selection_bias: false,
            shared_expert_intermediate_size: 0,
            shared_expert_gate: true,
            gate: Gate::Silu,
            biases: false,
            factors: false,
            gated: true,
            latent_size: None,
        })
    }

    /// The same with sigmoids for scores, whose weights are normalised and scaled as
    /// `norm_topk_prob` and `routed_scaling_factor` say, and groups where the architecture has keys
    /// for them. `sum_eps` is the peers' constant beside the weights' sum.
    ///
    /// # Errors
    /// [`ModelError::Config`] for values of another kind, a scale that is no number, and groups
    /// that the experts do not make.
    pub fn with_sigmoids(mut self, config: &Config<'_>, sum_eps: f32) -> Result<Self, ModelError> {
        let [scale_key, norm_key] = match config.is_gguf() {
            true => ["expert_weights_scale", "expert_weights_norm"],
            false => ["routed_scaling_factor", "norm_topk_prob"],
        };
        let scale = match config.computes(scale_key) {
            true => config.optional_float(scale_key, scale_key)?,
            false => None,
        };
        let scale = scale.unwrap_or(1.0);
        let normalize = match config.is_gguf() {
            // Peers always divide.
            _ if !config.computes(norm_key) => true,
            true => config.gguf_flag(norm_key, false)?,
            false => config.flag(norm_key, true)?,
        };
        let [n_group, topk_group] = self.groups(config)?;
        self.router = RouterParams {
            normalize,
            scores: RouterScores::Sigmoid,
            sum_eps,
            scale: gguf_scale(config, scale),
            n_group,
            topk_group,
            ..self.router
        };
        Ok(self)
    }

    /// The same with softmax for scores, whose weights are scaled as `routed_scaling_factor` says,
    /// and not divided by their sum; `grouped` if experts are chosen in some groups alone.
    ///
    /// # Errors
    /// As [`Self::with_sigmoids`].
    pub fn with_scaled_softmax(mut self, config: &Config<'_>, grouped: bool) -> Result<Self, ModelError> {
        let scale = config.optional_float("routed_scaling_factor", "expert_weights_scale")?.unwrap_or(1.0);
        let [n_group, topk_group] = if grouped { self.groups(config)? } else { [1, 1] };
        self.router = RouterParams {
            scale: gguf_scale(config, scale),
            n_group,
            topk_group,
            ..RouterParams::softmax(self.router.top_k, false)
        };
        Ok(self)
    }

    /// Groups of experts, and those that are chosen from; where that is all, there are none.
    fn groups(&self, config: &Config<'_>) -> Result<[usize; 2], ModelError> {
        let gguf = ["expert_group_count", "expert_group_used_count"];
        let [count, chosen] = [("n_group", gguf[0]), ("topk_group", gguf[1])].map(|(json, gguf)| {
            let computed = config.computes(if config.is_gguf() { gguf } else { json });
            let size = if computed { config.optional_size(json, gguf) } else { Ok(None) };
            size.map(|size| size.filter(|&size| size > 0).unwrap_or(1))
        });
        let (count, chosen, top_k) = (count?, chosen?, self.router.top_k);
        let size = self.num_experts / count;
        let refuse = |index: usize, got: usize, want: &str| {
            let key = if config.is_gguf() { gguf[index] } else { ["n_group", "topk_group"][index] };
            Err(config.refuse(key, &got.to_string(), want))
        };
        if count > 1 && (!self.num_experts.is_multiple_of(count) || size < 2 || count > 32) {
            let want =
                format!("{} experts make no such groups of 2 or more, or they are over 32", self.num_experts);
            return refuse(0, count, &want);
        }
        if chosen > count || chosen * size < top_k {
            let want = format!("{top_k} experts are chosen in 1 to {count} groups of {size}");
            return refuse(1, chosen, &want);
        }
        Ok(if chosen == count { [1, 1] } else { [count, chosen] })
    }
}

/// The factor of weights; GGUF's 0 means none.
fn gguf_scale(config: &Config<'_>, scale: f64) -> f32 {
    if config.is_gguf() && scale == 0.0 { 1.0 } else { scale as f32 }
}

/// Each token goes through its best `num_experts_per_tok` experts, weighted by the router, and
/// through the shared expert where there is one, weighted by a sigmoid gate where that has one.
#[derive(Clone, Debug)]
pub struct SparseMoe {
    router: Router,
    /// f32 `[num_experts]`, if the choice has a bias.
    selection_bias: Option<Named<Tensor>>,
    /// The factor of each expert's weight, f32 `[num_experts, 1]`, if there is one.
    factors: Option<QuantizedTensor>,
    params: RouterParams,
    experts: Experts,
    /// The projections to the experts' input and back, if there are some.
    latent: Option<Box<[Linear; 2]>>,
}

/// The projection that weighs the experts.
#[derive(Clone, Debug)]
enum Router {
    Alone(Linear),
    /// With the shared expert's gate, and that expert.
    Gated(Box<(MergedLinear<2>, Mlp)>),
    /// With a shared expert that has no gate.
    Ungated(Box<(Linear, Mlp)>),
}

/// The experts' weights: `gate_up` and `[E, H, I]`.
#[derive(Clone, Debug)]
struct Experts {
    gate_up: GateUp,
    down: Named<QuantizedTensor>,
    gate: Gate,
    /// Those of gate, up and down, f32 `[E, I]` and `[E, H]`.
    biases: Option<[Named<QuantizedTensor>; 3]>,
    /// True if the shared expert is the last of the stack: see [`Experts::takes_shared`].
    shared: bool,
}

/// The first two projections of the experts.
#[derive(Clone, Debug)]
enum GateUp {
    /// One `[2, E, I, H]`: on a GPU both are one product.
    Both(Named<QuantizedTensor>),
    /// One `[E, 2I, H]`, as checkpoints have it: gate rows, then up rows.
    Fused(Named<QuantizedTensor>),
    Separate(Named<QuantizedTensor>, Named<QuantizedTensor>),
    /// Ups that are their own gates.
    Up(Named<QuantizedTensor>),
}

impl SparseMoe {
    /// A layer's router, experts and shared expert.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn load(weights: &Weights<'_>, config: &MoeConfig, hidden_size: usize) -> Result<Self, ModelError> {
        let mut experts = Experts::load(weights, config, config.latent_size.unwrap_or(hidden_size))?;
        let latent = match config.latent_size {
            None => None,
            Some(latent) => {
                let down = weights.linear(LATENT_DOWN, latent, hidden_size)?;
                Some([down, weights.linear(LATENT_UP, hidden_size, latent)?].into())
            }
        };
        let router = (ROUTER, config.num_experts);
        let alone = || weights.exactly().linear(router.0, router.1, hidden_size);
        let shared = |inner| {
            let fused = weights.has_module(FUSED_SHARED_EXPERT).then_some(FUSED_SHARED_EXPERT);
            let (gate, gated) = (config.gate, config.gated);
            let config = MlpConfig { gate, gated, fused, ..MlpConfig::new(inner) };
            Mlp::load(weights, SHARED_EXPERT, hidden_size, config)
        };
        let router = match config.shared_expert_intermediate_size {
            0 => Router::Alone(alone()?),
            inner if !config.shared_expert_gate => Router::Ungated((alone()?, shared(inner)?).into()),
            inner => {
                let expert = shared(inner)?;
                let gate = (SHARED_EXPERT_GATE, 1);
                if let (true, Some(shared)) = (weights.joins_experts(), expert.weights()) {
                    experts = experts.with_shared(shared)?;
                }
                Router::Gated((weights.exactly().merged([router, gate], hidden_size)?, expert).into())
            }
        };
        let bias = config.selection_bias.then(|| weights.vector(SELECTION_BIAS, config.num_experts));
        let (bias, params) = (bias.transpose()?, config.router);
        let factors = config.factors.then(|| factors(weights, config.num_experts)).transpose()?;
        Ok(Self { router, selection_bias: bias, factors, params, experts, latent })
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        match &self.router {
            Router::Alone(router) => router.list(all),
            Router::Gated(shared) => {
                let (gates, expert) = &**shared;
                gates.list(all);
                expert.list(all);
            }
            Router::Ungated(shared) => {
                let (router, expert) = &**shared;
                router.list(all);
                expert.list(all);
            }
        }
        match &self.experts.gate_up {
            GateUp::Both(weight) | GateUp::Fused(weight) | GateUp::Up(weight) => {
                all.weights.push(weight.clone());
            }
            GateUp::Separate(gate, up) => all.weights.extend([gate.clone(), up.clone()]),
        }
        all.weights.push(self.experts.down.clone());
        all.weights.extend(self.experts.biases.iter().flatten().cloned());
        self.latent.iter().flat_map(|latent| latent.iter()).for_each(|linear| linear.list(all));
    }

    pub(crate) fn outline(&self, outline: &mut Outline) {
        outline.word("feedforward", "experts");
        let RouterParams { top_k, normalize, scores, scale, n_group, topk_group, .. } = self.params;
        outline.word("num_experts_per_tok", top_k);
        outline.word("norm_topk_prob", normalize);
        outline.word("router's scores", format!("{scores:?}"));
        outline.word("selection bias", self.selection_bias.is_some());
        outline.numbers("routed_scaling_factor", &[scale]);
        outline.word("n_group", n_group);
        outline.word("topk_group", topk_group);
        outline.word("shared expert", !matches!(self.router, Router::Alone(_)));
        outline.word("shared expert's gate", matches!(self.router, Router::Gated(_)));
        outline.word("experts' gate", format!("{:?}", self.experts.gate));
        outline.word("experts' biases", self.experts.biases.is_some());
        outline.word("experts' factors", self.factors.is_some());
        outline.word("experts are gated", !matches!(self.experts.gate_up, GateUp::Up(_)));
        outline.word("latent projections", self.latent.is_some());
    }

    /// `[T, hidden_size]` to the same.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(&self, x: &Var) -> Result<Var, KernelError> {
        self.forward_routed(x, x)
    }

    /// The same where the router reads `routed`, of x's shape.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward_routed(&self, x: &Var, routed: &Var) -> Result<Var, KernelError> {
        let (logits, shared) = match &self.router {
            Router::Alone(router) => (logits(routed, router)?, None),
            Router::Gated(shared) => {
                let (gates, expert) = &**shared;
                let [logits, gate] = in_threes(routed, |x| gates.forward(x))?;
                (logits, Some((Some(gate), expert)))
            }
            Router::Ungated(shared) => {
                let (router, expert) = &**shared;
                (logits(routed, router)?, Some((None, expert)))
            }
        };
        let (among, apart) = match self.experts.takes_shared(x, self.params.top_k) {
            true => (shared, None),
            false => (None, shared),
        };
        let among = among.as_ref().and_then(|(gate, _)| gate.as_ref());
        let bias = self.selection_bias.as_ref().map(|bias| &bias.value);
        let (ids, expert_weights) = ops::router_top_k(&logits, bias, among, self.params)?;
        let expert_weights = self.with_factors(expert_weights, &ids)?;
        let combined = |x: &Var| ops::combine_experts(&self.experts.forward(x, &ids)?, &expert_weights);
        let y = match self.latent.as_deref() {
            Some([input, output]) => output.forward(&combined(&input.forward(x)?)?)?,
            None => combined(x)?,
        };
        match apart {
            None => Ok(y),
            Some((None, expert)) => ops::add(&y, &expert.forward(x)?),
            Some((Some(gate), expert)) => ops::add(&y, &ops::glu(&expert.forward(x)?, &gate, Gate::Sigmoid)?),
        }
    }

    /// The weights `[T, top_k]` of the experts `ids`, times these experts' factors.
    fn with_factors(&self, weights: Var, ids: &Tensor) -> Result<Var, KernelError> {
        let Some(factors) = &self.factors else { return Ok(weights) };
        let factors = dequant_gather(factors, ids, FloatType::F32)?;
        ops::mul(&weights, &factors.reshape(weights.tensor().shape())?.into())
    }
}

fn logits(x: &Var, router: &Linear) -> Result<Var, KernelError> {
    let [logits] = in_threes(x, |x| Ok([router.forward(x)?]))?;
    Ok(logits)
}

/// Rows of x up to which a router's product on a CPU does not depend on the rows beside a row.
const FEW: usize = 16;

/// The products of a router with `x`, `[T, H]`. A router's are exact, and those of one row, of a
/// few and of many add up in different orders on a CPU: few rows are multiplied two or three at a
/// time, so that each has the same bits alone and among others.
fn in_threes<const N: usize>(
    x: &Var,
    product: impl Fn(&Var) -> Result<[Var; N], KernelError>,
) -> Result<[Var; N], KernelError> {
    let tokens = x.dim(0);
    let differ = x.tensor().device().plan().sums_by_rows;
    if !differ || x.tape().is_some() || !(1..=FEW).contains(&tokens) || [2, 3].contains(&tokens) {
        return product(x);
    }
    let mut parts: [Vec<Var>; N] = std::array::from_fn(|_| vec![]);
    for start in (0..tokens).step_by(3) {
        let rows = x.tensor().rows(start, tokens.min(start + 3))?;
        let ys = match rows.dim(0) {
            1 => {
                let two = shapes::rows_joined(&[rows.clone(), rows])?;
                shapes::each(product(&two.into())?.map(|y| y.tensor().rows(0, 1)))?.map(Var::from)
            }
            _ => product(&rows.into())?,
        };
        parts.iter_mut().zip(ys).for_each(|(part, y)| part.push(y));
    }
    shapes::each(parts.map(|part| shapes::join_rows(&part)))
}

/// [`SparseMoe::factors`].
fn factors(weights: &Weights<'_>, experts: usize) -> Result<QuantizedTensor, ModelError> {
    let values = weights.vector(EXPERT_SCALE, experts)?.value.reshape(&[experts, 1])?;
    Ok(QuantizedTensor::new(Format::Float(FloatType::F32), &[experts, 1], vec![values])?)
}

impl Experts {
    fn load(weights: &Weights<'_>, config: &MoeConfig, hidden_size: usize) -> Result<Self, ModelError> {
        let (experts, inner) = (config.num_experts, config.moe_intermediate_size);
        let stack = |name: Name<'_>, n, k| weights.experts(name, [experts, n, k]);
        let gate_up = if !config.gated {
            GateUp::Up(match weights.has_module(STACKED_UP) {
                true => weights.matrix(STACKED_UP, &[experts, inner, hidden_size])?,
                false => stack(EXPERTS_UP, inner, hidden_size)?,
            })
        } else if weights.has_module(FUSED_GATE_UP) {
            let both = weights.product(["2", "moe_intermediate_size"], [2, inner])?;
            let shape = [experts, both, hidden_size];
            GateUp::Fused(weights.matrix(FUSED_GATE_UP, &shape)?)
        } else {
            let gate = stack(EXPERTS_GATE, inner, hidden_size)?;
            GateUp::Separate(gate, stack(EXPERTS_UP, inner, hidden_size)?)
        };
        let down = if weights.has_module(FUSED_DOWN) {
            weights.matrix(FUSED_DOWN, &[experts, hidden_size, inner])?
        } else {
            stack(EXPERTS_DOWN, hidden_size, inner)?
        };
        let gate_up = if weights.joins_experts() { gate_up.joined()? } else { gate_up };
        let bias = |name, n| weights.expert_biases(name, experts, n);
        let biases = match config.biases {
            true => {
                Some([bias(EXPERTS_GATE, inner)?, bias(EXPERTS_UP, inner)?, bias(EXPERTS_DOWN, hidden_size)?])
            }
            false => None,
        };
        Ok(Self { gate_up, down, gate: config.gate, biases, shared: false })
    }

    /// The stack with one more expert, of these weights for gate, up and down, if their shapes and
    /// formats fit.
    fn with_shared(self, weights: [&Named<QuantizedTensor>; 3]) -> Result<Self, KernelError> {
        let GateUp::Both(both) = &self.gate_up else { return Ok(self) };
        if self.biases.is_some() {
            return Ok(self);
        }
        let alike = |weight: &QuantizedTensor, stack: &QuantizedTensor| {
            weight.format() == stack.format()
                && weight.shape().ends_with(&stack.shape()[stack.shape().len() - 2..])
        };
        let [gate, up, down] = weights.map(|weight| &weight.value);
        if !(alike(gate, &both.value) && alike(up, &both.value) && alike(down, &self.down.value)) {
            return Ok(self);
        }
        let one = |weight: &QuantizedTensor| weight.reshape(&[1, weight.n(), weight.k()]);
        let [gates, ups] = halves(&both.value)?;
        let gate_up = GateUp::Both(both.with(pair([&gates, &one(gate)?, &ups, &one(up)?])?));
        let down = self.down.with(QuantizedTensor::concat(&[&self.down.value, &one(down)?])?);
        Ok(Self { gate_up, down, shared: true, ..self })
    }

    /// True if the shared expert's products with `x` `[T, H]`, beside `top_k` other experts', are
    /// those of the stack's last: a single token's need no launches of their own then, and a step's
    /// neither where a kernel reads it once for all tokens.
    fn takes_shared(&self, x: &Var, top_k: usize) -> bool {
        match &self.gate_up {
            GateUp::Both(both) if self.shared => {
                x.dim(0) == 1 || x.tape().is_none() && streams_experts(x.tensor(), &both.value, top_k + 1)
            }
            _ => false,
        }
    }

    /// `x` `[T, H]` through the experts `ids` `[T, top_k]`: `[T, top_k, H]`.
    fn forward(&self, x: &Var, ids: &Tensor) -> Result<Var, KernelError> {
        if let (GateUp::Both(both), None, None) = (&self.gate_up, &self.biases, x.tape()) {
            return ops::gated_experts(x, [both, &self.down], ids, self.gate);
        }
        let tokens = shapes::reshape(x, &[x.dim(0), 1, x.dim(1)])?;
        let product = |weight| ops::gather_qmm((&tokens).into(), weight, ids);
        let [gate, up] = match &self.gate_up {
            GateUp::Both(both) => {
                let y = product(both)?;
                let halves = shapes::split_rows(&y, &[0..1, 1..2])?;
                let half = |i: usize| shapes::reshape(&halves[i], &y.tensor().shape()[1..]);
                [half(0)?, half(1)?]
            }
            GateUp::Fused(fused) => {
                let inner = fused.value.n() / 2;
                shapes::split_columns(&product(fused)?, [inner, inner])?
            }
            GateUp::Separate(gate, up) => [product(gate)?, product(up)?],
            GateUp::Up(up) => {
                let up = product(up)?;
                [up.clone(), up]
            }
        };
        let Some([of_gate, of_up, of_down]) = &self.biases else {
            return ops::gather_qmm(Input::Glu { x: &up, gate: &gate, by: self.gate }, &self.down, ids);
        };
        let gate = ops::add_expert_biases(&gate, of_gate, ids)?;
        let up = ops::add_expert_biases(&up, of_up, ids)?;
        let y = ops::gather_qmm(Input::Glu { x: &up, gate: &gate, by: self.gate }, &self.down, ids)?;
        ops::add_expert_biases(&y, of_down, ids)
    }
}

impl GateUp {
    /// As [`Self::Both`], where gate and up have one format.
    fn joined(self) -> Result<Self, KernelError> {
        match self {
            Self::Fused(fused) => {
                let (inner, weight) = (fused.value.n() / 2, &fused.value);
                let both = pair([&weight.narrow(0, inner)?, &weight.narrow(inner, inner)?])?;
                Ok(Self::Both(fused.with(both)))
            }
            Self::Separate(gate, up) if gate.value.format() == up.value.format() => {
                Ok(Self::Both(gate.with(pair([&gate.value, &up.value])?)))
            }
            other => Ok(other),
        }
    }
}

/// Stacks `parts`, `[E_i, I, H]` each, first the gates and then the ups, as one
/// `[2, sum E_i / 2, I, H]`.
fn pair<const N: usize>(parts: [&QuantizedTensor; N]) -> Result<QuantizedTensor, KernelError> {
    let all = QuantizedTensor::concat(&parts)?;
    all.reshape(&[2, all.shape()[0] / 2, all.n(), all.k()])
}

/// The inverse of [`pair`] of two.
fn halves(both: &QuantizedTensor) -> Result<[QuantizedTensor; 2], KernelError> {
    let half = |i| both.slice(i, i + 1)?.reshape(&both.shape()[1..]);
    Ok([half(0)?, half(1)?])
}
