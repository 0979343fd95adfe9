use super::{Linear, MergedLinear, Mlp, MlpConfig};
use crate::names::{
    EXPERTS_DOWN, EXPERTS_GATE, EXPERTS_UP, FUSED_DOWN, FUSED_GATE_UP, Name, ROUTER, SHARED_EXPERT,
    SHARED_EXPERT_GATE,
};
use crate::tape::ops::{self, Input};
use crate::tape::{Inventory, Named, Var, shapes};
use crate::{Config, ModelError, Outline, Weights};
use lowbit_kernels::ops::{Gate, RouterParams};
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor};

/// The sizes of a mixture of experts, as `config.json` names them.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct MoeConfig {
    pub num_experts: usize,
    pub num_experts_per_tok: usize,
    pub moe_intermediate_size: usize,
    /// Zero where there is no shared expert.
    pub shared_expert_intermediate_size: usize,
    /// True if the chosen experts' weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// The function of the experts' gates, and of the shared one's.
    pub gate: Gate,
    /// True if experts' projections have biases.
    pub biases: bool,
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
        Ok(Self {
            shared_expert_intermediate_size: shared.unwrap_or(0),
            norm_topk_prob: config.flag("norm_topk_prob", norm_topk_prob)?,
            ..Self::of(config, num_experts, inner)?
        })
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
        let num_experts_per_tok = config.size("num_experts_per_tok", "expert_used_count")?;
        if num_experts_per_tok > num_experts {
            let want = format!("there are {num_experts} experts");
            return Err(config.refuse("num_experts_per_tok", &num_experts_per_tok.to_string(), &want));
        }
        Ok(Self {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size,
            shared_expert_intermediate_size: 0,
            norm_topk_prob: true,
            gate: Gate::Silu,
            biases: false,
        })
    }
}

/// Each token goes through its best `num_experts_per_tok` experts, weighted by the router, and
/// through the shared expert, weighted by a sigmoid gate, where there is one.
#[derive(Clone, Debug)]
pub struct SparseMoe {
    router: Router,
    params: RouterParams,
    experts: Experts,
}

/// The projection that weighs the experts.
#[derive(Clone, Debug)]
enum Router {
    Alone(Linear),
    /// With the shared expert's gate, and that expert.
    Shared(Box<(MergedLinear<2>, Mlp)>),
}

/// The experts' weights: `gate_up` and `[E, H, I]`.
#[derive(Clone, Debug)]
struct Experts {
    gate_up: GateUp,
    down: Named<QuantizedTensor>,
    gate: Gate,
    /// Those of gate, up and down, f32 `[E, I]` and `[E, H]`.
    biases: Option<[Named<QuantizedTensor>; 3]>,
    /// True if the shared expert is the last of the stack: a single token's products with it then
    /// need no extra launches.
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
}

impl SparseMoe {
    /// A layer's router, experts and shared expert.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn load(weights: &Weights<'_>, config: &MoeConfig, hidden_size: usize) -> Result<Self, ModelError> {
        let mut experts = Experts::load(weights, config, hidden_size)?;
        let router = (ROUTER, config.num_experts);
        let router = match config.shared_expert_intermediate_size {
            0 => Router::Alone(weights.exactly().linear(router.0, router.1, hidden_size)?),
            inner => {
                let expert_config = MlpConfig { gate: config.gate, ..MlpConfig::new(inner) };
                let expert = Mlp::load(weights, SHARED_EXPERT, hidden_size, expert_config)?;
                let gate = (SHARED_EXPERT_GATE, 1);
                if let (true, Some(shared)) = (weights.joins_experts(), expert.weights()) {
                    experts = experts.with_shared(shared)?;
                }
                Router::Shared((weights.exactly().merged([router, gate], hidden_size)?, expert).into())
            }
        };
        let params = RouterParams { top_k: config.num_experts_per_tok, normalize: config.norm_topk_prob };
        Ok(Self { router, params, experts })
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        match &self.router {
            Router::Alone(router) => router.list(all),
            Router::Shared(shared) => {
                let (gates, expert) = &**shared;
                gates.list(all);
                expert.list(all);
            }
        }
        match &self.experts.gate_up {
            GateUp::Both(weight) | GateUp::Fused(weight) => all.weights.push(weight.clone()),
            GateUp::Separate(gate, up) => all.weights.extend([gate.clone(), up.clone()]),
        }
        all.weights.push(self.experts.down.clone());
        all.weights.extend(self.experts.biases.iter().flatten().cloned());
    }

    pub(crate) fn outline(&self, outline: &mut Outline) {
        outline.word("feedforward", "experts");
        outline.word("num_experts_per_tok", self.params.top_k);
        outline.word("norm_topk_prob", self.params.normalize);
        outline.word("shared expert", matches!(self.router, Router::Shared(_)));
        outline.word("experts' gate", format!("{:?}", self.experts.gate));
        outline.word("experts' biases", self.experts.biases.is_some());
    }

    /// `[T, hidden_size]` to the same.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(&self, x: &Var) -> Result<Var, KernelError> {
        let (logits, shared) = match &self.router {
            Router::Alone(router) => (router.forward(x)?, None),
            Router::Shared(shared) => {
                let (gates, expert) = &**shared;
                let [logits, gate] = gates.forward(x)?;
                (logits, Some((gate, expert)))
            }
        };
        let (among, apart) = match self.experts.shared && x.dim(0) == 1 {
            true => (shared, None),
            false => (None, shared),
        };
        let among = among.as_ref().map(|(gate, _)| gate);
        let (ids, expert_weights) = ops::router_top_k(&logits, among, self.params)?;
        let y = ops::combine_experts(&self.experts.forward(x, &ids)?, &expert_weights)?;
        match apart {
            None => Ok(y),
            Some((gate, expert)) => ops::add(&y, &ops::glu(&expert.forward(x)?, &gate, Gate::Sigmoid)?),
        }
    }
}

impl Experts {
    fn load(weights: &Weights<'_>, config: &MoeConfig, hidden_size: usize) -> Result<Self, ModelError> {
        let (experts, inner) = (config.num_experts, config.moe_intermediate_size);
        let stack = |name: Name<'_>, n, k| weights.experts(name, [experts, n, k]);
        let gate_up = if weights.has_module(FUSED_GATE_UP) {
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

    /// `x` `[T, H]` through the experts `ids` `[T, top_k]`: `[T, top_k, H]`.
    fn forward(&self, x: &Var, ids: &Tensor) -> Result<Var, KernelError> {
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
