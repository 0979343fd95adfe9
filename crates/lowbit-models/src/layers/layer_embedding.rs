use super::block::{constant_row, scaled};
use super::{DecoderConfig, Linear, Residual, RmsNorm};
use crate::names::{
    EMBED_PER_LAYER, PER_LAYER_GATE, PER_LAYER_MODEL_PROJ, PER_LAYER_NORM, PER_LAYER_PROJ,
    PER_LAYER_PROJ_NORM,
};
use crate::tape::ops::{self, Input};
use crate::tape::{Inventory, Named, Var, shapes};
use crate::{ModelError, Weights};
use lowbit_kernels::ops::{Gate, narrow};
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor};

/// Embeddings of the tokens for each layer:
/// `(norm(h W^T / sqrt(hidden_size)) + sqrt(P) e) / sqrt(2)`, where `h` is the usual embedding with
/// its factor, and `e` a row of a table with `P` numbers for each layer.
///
/// Source: transformers 5.24 `Gemma4TextModel.project_per_layer_inputs`; llama.cpp
/// `src/models/gemma4.cpp`.
#[derive(Clone, Debug)]
pub struct LayerEmbeddings {
    /// `[vocab_size, layers * P]`.
    table: Named<QuantizedTensor>,
    projection: Linear,
    norm: RmsNorm,
    /// Numbers for each layer.
    width: usize,
    /// The factors of the table's rows, of the projection and of the sum, `[layers * P]` each.
    factors: [Option<Tensor>; 3],
}

impl LayerEmbeddings {
    /// The table and the projection, with `width` numbers for each layer.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(model: &Weights<'_>, config: &DecoderConfig, width: usize) -> Result<Self, ModelError> {
        let sizes = ["num_hidden_layers", "hidden_size_per_layer_input"];
        let all = model.product(sizes, [config.num_hidden_layers, width])?;
        let hidden = config.hidden_size;
        let factors = [(width as f32).sqrt(), (hidden as f32).sqrt().recip(), 0.5f32.sqrt()]
            .map(|factor| constant_row(factor, all, model.device()));
        Ok(Self {
            table: model.matrix(EMBED_PER_LAYER, &[config.vocab_size, all])?,
            projection: model.linear(PER_LAYER_MODEL_PROJ, all, hidden)?,
            norm: RmsNorm::load(model, PER_LAYER_PROJ_NORM, width, config.rms_norm_eps)?,
            width,
            factors: shapes::each(factors)?,
        })
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        all.weights.push(self.table.clone());
        self.projection.list(all);
        self.norm.list(all);
    }

    /// Those of T tokens, in the activations' type: `[T, layers * P]`. `x` has the tokens' usual
    /// embeddings.
    ///
    /// # Errors
    /// Those of the ops; [`KernelError::Value`] where a tape records these, which have no gradient.
    pub fn forward(&self, tokens: &Tensor, x: &Residual) -> Result<Var, KernelError> {
        if x.stream.tape().is_some() {
            let (got, want) = ("recorded".into(), "embeddings of each layer have no gradient".into());
            return Err(KernelError::Value { op: "embed", operand: "tokens", got, want });
        }
        let [of_table, of_projection, of_sum] = self.factors.each_ref().map(Option::as_ref);
        let own = scaled(ops::dequant_gather(None, &self.table, tokens)?, of_table)?;
        let y = scaled(self.projection.forward(&x.input(None).make()?.1)?, of_projection)?;
        let (rows, all) = (y.dim(0), y.dim(1));
        let y = self.norm.forward(&shapes::reshape(&y, &[rows, all / self.width, self.width])?)?;
        scaled(ops::add(&shapes::reshape(&y, &[rows, all])?, &own)?, of_sum)
    }

    /// The part of layer `index`, `[T, P]`.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn of_layer(&self, all: &Var, index: usize) -> Result<Var, KernelError> {
        Ok(narrow(all.tensor(), index * self.width, self.width)?.into())
    }
}

/// A layer's use of its own embeddings: `norm((gelu(h G^T) * e) W^T)`, which is added to `h`, the
/// residual stream behind the feed-forward part.
#[derive(Clone, Debug)]
pub struct LayerInput {
    gate: Linear,
    projection: Linear,
    norm: RmsNorm,
}

impl LayerInput {
    /// A layer's projections and norm, for embeddings of `width` numbers.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(weights: &Weights<'_>, config: &DecoderConfig, width: usize) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        Ok(Self {
            gate: weights.linear(PER_LAYER_GATE, width, hidden)?,
            projection: weights.linear(PER_LAYER_PROJ, hidden, width)?,
            norm: RmsNorm::load(weights, PER_LAYER_NORM, hidden, config.rms_norm_eps)?,
        })
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        self.gate.list(all);
        self.projection.list(all);
        self.norm.list(all);
    }

    /// The stream with what is added to it.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(&self, x: &Residual, own: &Var) -> Result<Residual, KernelError> {
        let (stream, input) = x.input(None).make()?;
        let gate = self.gate.forward(&input)?;
        let y = self.projection.forward(Input::Glu { x: own, gate: &gate, by: Gate::GeluTanh })?;
        Ok(Residual { stream, update: self.norm.forward(&y)? })
    }
}
