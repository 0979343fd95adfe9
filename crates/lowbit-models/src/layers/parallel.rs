use super::{DecoderConfig, Mlp, MlpConfig, MoeConfig, Residual, RmsNorm, SparseMoe};
use crate::names::{
    MLP, Name, POST_FEEDFORWARD_NORM_1, POST_FEEDFORWARD_NORM_2, PRE_FEEDFORWARD_NORM_2, ROUTER_SCALE,
};
use crate::tape::ops;
use crate::tape::{Inventory, Var};
use crate::{ModelError, Outline, Weights};
use lowbit_kernels::{KernelError, Tensor};

/// An MLP and experts beside each other, each between norms of its own:
/// `y = norm_1(mlp(x)) + norm_2(experts(pre_norm_2(h)))`, where `h` is the residual stream and `x`
/// its norm. The router reads a norm of `h`, too.
///
/// Source: transformers 5.24 `Gemma4TextDecoderLayer`; llama.cpp `src/models/gemma4.cpp`.
#[derive(Clone, Debug)]
pub struct ParallelMoe {
    mlp: Mlp,
    moe: SparseMoe,
    after_mlp: RmsNorm,
    before_experts: RmsNorm,
    after_experts: RmsNorm,
    /// Its weight is [`ROUTER_SCALE`] times `hidden_size^-0.5`.
    before_router: RmsNorm,
}

impl ParallelMoe {
    /// A layer's MLP, experts and norms.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(
        weights: &Weights<'_>,
        (mlp, moe): (MlpConfig, &MoeConfig),
        config: &DecoderConfig,
    ) -> Result<Self, ModelError> {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let norm = |name: Name<'_>| RmsNorm::load(weights, name, hidden, eps);
        let factor = (hidden as f32).sqrt().recip();
        let scales: Vec<f32> =
            weights.values(ROUTER_SCALE, hidden)?.into_iter().map(|scale| scale * factor).collect();
        let scales = Tensor::new(&scales, &[hidden], weights.device())?;
        Ok(Self {
            mlp: Mlp::load(weights, MLP, hidden, mlp)?,
            moe: SparseMoe::load(weights, moe, hidden)?,
            after_mlp: norm(POST_FEEDFORWARD_NORM_1)?,
            before_experts: norm(PRE_FEEDFORWARD_NORM_2)?,
            after_experts: norm(POST_FEEDFORWARD_NORM_2)?,
            before_router: RmsNorm::constant(scales, eps),
        })
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        self.mlp.list(all);
        self.after_mlp.list(all);
        self.before_experts.list(all);
        self.moe.list(all);
        self.after_experts.list(all);
    }

    pub(crate) fn outline(&self, outline: &mut Outline) {
        self.moe.outline(outline);
        outline.word("MLP beside experts", format!("{:?}", self.mlp.gate()));
    }

    /// The residual stream, and what the two add to it, `[T, hidden_size]`; `before_mlp` is the
    /// norm of the MLP's input.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(&self, x: &Residual, before_mlp: Option<&RmsNorm>) -> Result<(Var, Var), KernelError> {
        let (stream, of_mlp) = self.mlp.forward_sum(x.input(before_mlp))?;
        let routed = x.normed(&self.before_router).make()?.1;
        let of_experts = self.moe.forward_routed(&x.normed(&self.before_experts).make()?.1, &routed)?;
        let (of_mlp, of_experts) =
            (self.after_mlp.forward(&of_mlp)?, self.after_experts.forward(&of_experts)?);
        Ok((stream, ops::add(&of_mlp, &of_experts)?))
    }
}
