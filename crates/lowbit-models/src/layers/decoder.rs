use super::tied::{head_prefix, is_tied};
use super::{Block, Embedding, Linear, Residual, RmsNorm, Step};
use crate::cache::{Cache, LayerCache};
use crate::names::{LM_HEAD, NORM};
use crate::{Config, ModelError, Weights};
use lowbit_formats::FloatType;
use lowbit_kernels::{Device, KernelError, Tensor};
use std::sync::Arc;

/// What every decoder's configuration has.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DecoderConfig {
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub vocab_size: usize,
    pub rms_norm_eps: f32,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
}

impl DecoderConfig {
    /// Reads the sizes. GGUF has its vocabulary's size in the embedding's shape, and ties it to the output by
    /// leaving the output out.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn new(config: &Config<'_>, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let vocab_size = match config.is_gguf() {
            // A missing embedding and one without dimensions are refused when it is asked for.
            true => {
                weights.shape("", "token_embd.weight").and_then(|shape| shape.first().copied()).unwrap_or(1)
            }
            false => config.size("vocab_size", "")?,
        };
        // Layers of the multi-token-prediction head follow the model's own in GGUF.
        let predictors =
            if config.is_gguf() { config.optional_size("", "nextn_predict_layers")?.unwrap_or(0) } else { 0 };
        let layers = config.size("num_hidden_layers", "block_count")?;
        weights.check_layers(if config.is_gguf() { "block_count" } else { "num_hidden_layers" }, layers)?;
        Ok(Self {
            hidden_size: config.size("hidden_size", "embedding_length")?,
            num_hidden_layers: layers.saturating_sub(predictors),
            vocab_size,
            rms_norm_eps: eps(config)?,
            max_position_embeddings: config.size("max_position_embeddings", "context_length")?,
            tie_word_embeddings: is_tied(config, weights)?,
        })
    }
}

fn eps(config: &Config<'_>) -> Result<f32, ModelError> {
    let (json, gguf) = ("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    let eps = config.float(json, gguf)? as f32;
    match eps >= 0.0 && eps.is_finite() {
        true => Ok(eps),
        false => {
            let key = if config.is_gguf() { gguf } else { json };
            Err(config.refuse(key, &eps.to_string(), "a number from 0 is wanted"))
        }
    }
}

/// Embedding, blocks, norm and output layer: the form of every architecture here.
#[derive(Clone, Debug)]
pub struct Decoder {
    embedding: Embedding,
    blocks: Arc<[Box<dyn Block>]>,
    norm: RmsNorm,
    head: Linear,
    activations: FloatType,
    /// The type of cached keys and values.
    cache: FloatType,
}

impl Decoder {
    /// Loads the embedding, the final norm and the output layer, and calls `block` for each layer. `weights` is the whole
    /// checkpoint, `model` the part of it that contains the layers.
    ///
    /// # Errors
    /// Those of the parts.
    pub fn load(
        weights: &Weights<'_>,
        model: &Weights<'_>,
        config: &DecoderConfig,
        block: impl Fn(usize, &Weights<'_>) -> Result<Box<dyn Block>, ModelError>,
    ) -> Result<Self, ModelError> {
        let embedding = Embedding::load(model, config.vocab_size, config.hidden_size)?;
        let top = weights.below(head_prefix(weights), "");
        let head = if config.tie_word_embeddings {
            top.ignore(LM_HEAD);
            embedding.as_linear()
        } else {
            top.linear(LM_HEAD, config.vocab_size, config.hidden_size)?
        };
        let blocks =
            (0..config.num_hidden_layers).map(|i| block(i, &model.layer(i))).collect::<Result<_, _>>()?;
        let norm = RmsNorm::load(model, NORM, config.hidden_size, config.rms_norm_eps)?;
        let (activations, cache) = (weights.activations(), weights.cache());
        Ok(Self { embedding, blocks, norm, head, activations, cache })
    }

    fn layer_caches(&self, device: &Device) -> Result<Vec<LayerCache>, KernelError> {
        self.blocks.iter().map(|block| block.cache(self.cache.dtype(), device)).collect()
    }

    /// The T tokens' states before the final norm and the output layer; `cache` advances by T tokens.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn hidden(&self, tokens: &Tensor, cache: &mut Cache) -> Result<Residual, KernelError> {
        let (count, device) = (tokens.len(), tokens.device());
        let step = Step::new(cache.position(), count, device)?;
        self.run(tokens, &step, cache)
    }

    /// Makes room for `tokens` more.
    pub(crate) fn reserve(
        &self,
        cache: &mut Cache,
        tokens: usize,
        device: &Device,
    ) -> Result<(), KernelError> {
        cache.reserve(tokens, || self.layer_caches(device)).map(|_| ())
    }

    /// As [`Self::hidden`], from device buffers alone.
    pub(crate) fn run(
        &self,
        tokens: &Tensor,
        step: &Step,
        cache: &mut Cache,
    ) -> Result<Residual, KernelError> {
        let (count, device) = (tokens.len(), tokens.device());
        let layers = cache.reserve(count, || self.layer_caches(device))?;
        let stream = self.embedding.forward(tokens)?;
        // Nothing is added before the first block.
        let update = Tensor::allocate_zeros(stream.shape(), self.activations.dtype(), device)?;
        let mut x = Residual { stream, update };
        for (block, cache) in self.blocks.iter().zip(layers) {
            x = block.forward(x, step, cache)?;
        }
        cache.advance(count);
        Ok(x)
    }

    /// States of T tokens to f32 logits `[T, vocab_size]`.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn logits(&self, hidden: &Residual) -> Result<Tensor, KernelError> {
        self.head.forward_f32(hidden.normed(&self.norm))
    }
}
