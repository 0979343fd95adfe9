use super::{Linear, Mlp};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::{self, RouterParams};
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor};
use std::sync::Arc;

/// The sizes of a mixture of experts, as `config.json` names them.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct MoeConfig {
    pub num_experts: usize,
    pub num_experts_per_tok: usize,
    pub moe_intermediate_size: usize,
    /// Zero where there is no shared expert.
    pub shared_expert_intermediate_size: usize,
    /// Whether the chosen experts' weights are divided by their sum.
    pub norm_topk_prob: bool,
}

impl MoeConfig {
    /// Reads the sizes; `norm_topk_prob` is what an absent flag means.
    ///
    /// # Errors
    /// As [`Config::size`]; [`ModelError::Config`] for more chosen experts than there are.
    pub fn new(config: &Config<'_>, norm_topk_prob: bool) -> Result<Self, ModelError> {
        let num_experts = config.size("num_experts", "expert_count")?;
        let num_experts_per_tok = config.size("num_experts_per_tok", "expert_used_count")?;
        if num_experts_per_tok > num_experts {
            let want = format!("there are {num_experts} experts");
            return Err(config.refuse("num_experts_per_tok", &num_experts_per_tok.to_string(), &want));
        }
        let shared =
            config.optional_size("shared_expert_intermediate_size", "expert_shared_feed_forward_length")?;
        Ok(Self {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size: config.size("moe_intermediate_size", "expert_feed_forward_length")?,
            shared_expert_intermediate_size: shared.unwrap_or(0),
            norm_topk_prob: config.flag("norm_topk_prob", norm_topk_prob)?,
        })
    }
}

/// Each token goes through its best `num_experts_per_tok` experts, weighted by the router, and through the shared
/// expert, weighted by a sigmoid gate, where there is one.
#[derive(Clone, Debug)]
pub struct SparseMoe {
    router: Linear,
    params: RouterParams,
    gate_up: GateUp,
    down: Arc<QuantizedTensor>,
    shared: Option<(Mlp, Linear)>,
}

/// The first two projections of the experts, as the checkpoint has them.
#[derive(Clone, Debug)]
enum GateUp {
    /// One `[E, 2I, H]`: gate rows, then up rows.
    Fused(Arc<QuantizedTensor>, usize),
    Separate(Arc<QuantizedTensor>, Arc<QuantizedTensor>),
}

impl SparseMoe {
    /// The router, the experts and the shared expert below a layer's `mlp.` or `blk.N.`.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn load(weights: &Weights<'_>, config: &MoeConfig, hidden_size: usize) -> Result<Self, ModelError> {
        let mlp = weights.below("mlp.", "");
        let (experts, inner) = (config.num_experts, config.moe_intermediate_size);
        let expert_weight =
            |part: &str, gguf: &str, n, k| mlp.experts(part, gguf, [experts, n, k]).map(Arc::new);
        let fused = mlp.has("experts.gate_up_proj", "ffn_gate_up_exps.weight");
        let gate_up = if fused {
            let shape = [experts, 2 * inner, hidden_size];
            GateUp::Fused(Arc::new(mlp.matrix("experts.gate_up_proj", "ffn_gate_up_exps", &shape)?), inner)
        } else {
            let gate = expert_weight("gate_proj", "ffn_gate_exps", inner, hidden_size)?;
            GateUp::Separate(gate, expert_weight("up_proj", "ffn_up_exps", inner, hidden_size)?)
        };
        let down = if mlp.has("experts.down_proj", "") {
            Arc::new(mlp.matrix("experts.down_proj", "", &[experts, hidden_size, inner])?)
        } else {
            expert_weight("down_proj", "ffn_down_exps", hidden_size, inner)?
        };
        let shared = match config.shared_expert_intermediate_size {
            0 => None,
            inner => Some((
                Mlp::load(&mlp, "shared_expert.", "_shexp", hidden_size, inner)?,
                mlp.linear("shared_expert_gate", "ffn_gate_inp_shexp", 1, hidden_size)?,
            )),
        };
        let params = RouterParams { top_k: config.num_experts_per_tok, normalize: config.norm_topk_prob };
        let router = mlp.linear("gate", "ffn_gate_inp", experts, hidden_size)?;
        Ok(Self { router, params, gate_up, down, shared })
    }

    /// `[T, hidden_size]` to the same.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, KernelError> {
        let (ids, expert_weights) = ops::router_top_k(&self.router.forward(x)?, self.params)?;
        let tokens = x.reshape(&[x.dim(0), 1, x.dim(1)])?;
        let hidden = match &self.gate_up {
            GateUp::Fused(weight, inner) => {
                let both = ops::gather_qmm(&tokens, weight, &ids)?;
                ops::silu_mul(&ops::narrow(&both, 0, *inner)?, &ops::narrow(&both, *inner, *inner)?)?
            }
            GateUp::Separate(gate, up) => {
                ops::silu_mul(&ops::gather_qmm(&tokens, gate, &ids)?, &ops::gather_qmm(&tokens, up, &ids)?)?
            }
        };
        let y = ops::combine_experts(&ops::gather_qmm(&hidden, &self.down, &ids)?, &expert_weights)?;
        match &self.shared {
            None => Ok(y),
            Some((mlp, gate)) => ops::add(&y, &ops::sigmoid_mul(&mlp.forward(x)?, &gate.forward(x)?)?),
        }
    }
}
