use super::{Attention, DecoderConfig, GatedDeltaNet, Mlp, RmsNorm, SparseMoe};
use crate::cache::LayerCache;
use crate::names::{INPUT_NORM, Name};
use crate::{ModelError, Weights};
use lowbit_formats::DType;
use lowbit_kernels::ops::AddRmsNorm;
use lowbit_kernels::{Device, KernelError, Tensor};

/// One layer of a decoder. Most architectures' are a [`PreNormBlock`]; one whose layers are put together in another way
/// has its own in its file.
pub trait Block: std::fmt::Debug + Send + Sync {
    /// An empty cache for this layer, keys and values in `dtype`.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    fn cache(&self, dtype: DType, device: &Device) -> Result<LayerCache, KernelError>;

    /// T tokens through the layer. `cache` is one that [`Self::cache`] made.
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`] for the cache of another kind of layer.
    fn forward(&self, x: Residual, step: &Step, cache: &mut LayerCache) -> Result<Residual, KernelError>;
}

/// The error for a cache that another kind of layer made.
pub fn wrong_cache() -> KernelError {
    let (got, want) = ("of another kind".to_string(), "each layer made its own".to_string());
    KernelError::Value { op: "block", operand: "cache", got, want }
}

/// What mixes tokens in a block.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Mixer {
    Attention(Box<Attention>),
    DeltaNet(Box<GatedDeltaNet>),
}

/// What works on each token alone.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Feedforward {
    Dense(Box<Mlp>),
    Sparse(Box<SparseMoe>),
}

/// `h = x + mixer(norm1(x)); y = h + feedforward(norm2(h))`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct PreNormBlock {
    pub input_norm: RmsNorm,
    pub mixer: Mixer,
    pub post_norm: RmsNorm,
    pub feedforward: Feedforward,
}

impl PreNormBlock {
    /// The block's two norms around `mixer` and `feedforward`; `post` is the name of the second one.
    ///
    /// # Errors
    /// As [`RmsNorm::load`].
    pub fn load(
        weights: &Weights<'_>,
        config: &DecoderConfig,
        post: Name<'_>,
        mixer: Mixer,
        feedforward: Feedforward,
    ) -> Result<Box<dyn Block>, ModelError> {
        let norm = |names| RmsNorm::load(weights, names, config.hidden_size, config.rms_norm_eps);
        Ok(Box::new(Self { input_norm: norm(INPUT_NORM)?, post_norm: norm(post)?, mixer, feedforward }))
    }
}

impl Block for PreNormBlock {
    fn cache(&self, dtype: DType, device: &Device) -> Result<LayerCache, KernelError> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.cache(dtype, device).map(LayerCache::Attention),
            Mixer::DeltaNet(net) => net.cache(device).map(LayerCache::DeltaNet),
        }
    }

    fn forward(&self, x: Residual, step: &Step, cache: &mut LayerCache) -> Result<Residual, KernelError> {
        let normed = x.normed(&self.input_norm);
        let (stream, update) = match (&self.mixer, cache) {
            (Mixer::Attention(mixer), LayerCache::Attention(cache)) => {
                mixer.forward(normed, &step.positions, cache)?
            }
            (Mixer::DeltaNet(mixer), LayerCache::DeltaNet(cache)) => {
                mixer.forward(normed, &step.cu_seqlens, cache)?
            }
            _ => return Err(wrong_cache()),
        };
        let x = Residual { stream, update };
        let normed = x.normed(&self.post_norm);
        let (stream, update) = match &self.feedforward {
            Feedforward::Dense(mlp) => mlp.forward_sum(normed)?,
            Feedforward::Sparse(moe) => {
                let (stream, normed) = normed.tensors()?;
                (stream, moe.forward(&normed)?)
            }
        };
        Ok(Residual { stream, update })
    }
}

/// The residual stream and what the last layer adds to it: the sum is taken together with the norm that follows, by the
/// product that reads that norm where there is only one.
#[derive(Debug)]
pub struct Residual {
    /// f32 `[T, hidden_size]`.
    pub stream: Tensor,
    /// The same shape, in the activations' type.
    pub update: Tensor,
}

impl Residual {
    /// The sum's norm in the activations' type.
    pub fn normed<'a>(&'a self, norm: &'a RmsNorm) -> AddRmsNorm<'a> {
        norm.of_sum(&self.stream, &self.update)
    }

    /// Of these tokens alone.
    pub(crate) fn rows(&self, start: usize, end: usize) -> Result<Self, KernelError> {
        Ok(Self { stream: self.stream.rows(start, end)?, update: self.update.rows(start, end)? })
    }
}

/// Where the tokens of a forward pass stand, in tensors, so that a captured pass can be replayed with new ones.
#[derive(Debug)]
pub struct Step {
    /// u32 `[T]`.
    pub positions: Tensor,
    /// u32 `[0, T]`.
    pub cu_seqlens: Tensor,
}

impl Step {
    /// `tokens` tokens from `start` on.
    pub(crate) fn new(start: usize, tokens: usize, device: &Device) -> Result<Self, KernelError> {
        let positions: Vec<u32> = (start..start + tokens).map(|position| position as u32).collect();
        Ok(Self {
            positions: Tensor::new(&positions, &[tokens], device)?,
            cu_seqlens: Tensor::new(&[0, tokens as u32], &[2], device)?,
        })
    }
}
