//! A decoder as data. An architecture's file makes a [`DecoderSpec`] of a checkpoint's
//! configuration; [`Decoder::load`](super::Decoder::load) builds the layers from it.

use super::{
    AttentionConfig, DecoderConfig, DeltaNetConfig, KimiDeltaConfig, LatentAttentionConfig, Mamba2Config,
    MoeConfig, ShortConvConfig,
};
use crate::names::Name;
use lowbit_kernels::ops::Gate;

/// A whole decoder.
#[derive(Clone, Debug)]
pub struct DecoderSpec {
    /// Sizes.
    pub config: DecoderConfig,
    /// One per layer.
    pub layers: Vec<LayerSpec>,
    /// The name of the norm behind the last layer.
    pub norm: Name<'static>,
    /// Constant factors.
    pub multipliers: Multipliers,
    /// The size of the embeddings that each layer has of its own, if there are some: see
    /// [`LayerEmbeddings`](super::LayerEmbeddings).
    pub layer_embedding: Option<usize>,
}

impl DecoderSpec {
    /// The part of the model that has no gradient, if there is one: its weights cannot be learned.
    pub fn without_gradient(&self) -> Option<&'static str> {
        let of_layer = |layer: &LayerSpec| match &layer.mixer {
            MixerSpec::Attention(attention) if attention.sinks => Some("attention with sinks"),
            MixerSpec::Attention(attention) if attention.kv_of.is_some() => {
                Some("attention to an earlier layer's keys")
            }
            MixerSpec::Mamba2(_) => Some("Mamba-2"),
            MixerSpec::KimiDelta(_) => Some("Kimi Delta Attention"),
            _ => None,
        };
        let of_embeddings = self.layer_embedding.map(|_| "the embeddings of each layer");
        of_embeddings.or_else(|| self.layers.iter().find_map(of_layer))
    }
}

/// Factors of a decoder's values; 1 leaves them as they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Of the embedding.
    pub embedding: f32,
    /// Of the terms that a mixer and a feed-forward part add to the residual stream.
    pub residual: f32,
    /// Of logits.
    pub logits: f32,
    /// The bound that logits are bent towards, if there is one: [`lowbit_kernels::ops::softcap()`].
    pub softcap: Option<f32>,
    /// The name of each layer's factor of its result, where layers have one.
    pub layer: Option<Name<'static>>,
}

impl Multipliers {
    /// No factors.
    pub const NONE: Self = Self { embedding: 1.0, residual: 1.0, logits: 1.0, softcap: None, layer: None };
}

/// A layer: `h = x + after_mixer(mixer(norm(x)))`,
/// `y = h + after_feedforward(feedforward(norm(h)))`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct LayerSpec {
    pub norms: LayerNorms,
    pub mixer: MixerSpec,
    pub feedforward: FeedforwardSpec,
}

/// The names of a layer's RMSNorms. All have the decoder's size and eps.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorms {
    /// Before the mixer, if there is one.
    pub mixer: Option<Name<'static>>,
    /// Of the mixer's output, if there is one.
    pub after_mixer: Option<Name<'static>>,
    /// Before the feed-forward part, if there is one.
    pub feedforward: Option<Name<'static>>,
    /// Of its output, if there is one.
    pub after_feedforward: Option<Name<'static>>,
}

impl LayerNorms {
    /// No norms.
    pub const NONE: Self =
        Self { mixer: None, after_mixer: None, feedforward: None, after_feedforward: None };

    /// Norms before the mixer and before the feed-forward part alone.
    pub const fn before(mixer: Name<'static>, feedforward: Name<'static>) -> Self {
        Self {
            mixer: Some(mixer),
            after_mixer: None,
            feedforward: Some(feedforward),
            after_feedforward: None,
        }
    }

    /// Norms of what the mixer and the feed-forward part give alone.
    pub const fn after(mixer: Name<'static>, feedforward: Name<'static>) -> Self {
        Self {
            mixer: None,
            after_mixer: Some(mixer),
            feedforward: None,
            after_feedforward: Some(feedforward),
        }
    }
}

/// The part of a layer that mixes tokens.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum MixerSpec {
    Attention(AttentionConfig),
    LatentAttention(LatentAttentionConfig),
    DeltaNet(DeltaNetConfig),
    ShortConv(ShortConvConfig),
    Mamba2(Mamba2Config),
    KimiDelta(KimiDeltaConfig),
    /// No mixer: the layer is a feed-forward part alone.
    None,
}

/// The part of a layer that works on each token alone.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum FeedforwardSpec {
    Dense(MlpConfig),
    Sparse(MoeConfig),
    /// Both, beside each other: see [`ParallelMoe`](super::ParallelMoe).
    Parallel(MlpConfig, MoeConfig),
    /// No such part: the layer is a mixer alone.
    None,
}

/// An MLP: SwiGLU where it is gated and the gate is silu.
#[derive(Clone, Copy, Debug)]
pub struct MlpConfig {
    /// Rows of gate, and of up.
    pub intermediate_size: usize,
    /// The matrix of gate's rows and up's, if the checkpoint has them in one.
    pub fused: Option<Name<'static>>,
    /// The gate's function.
    pub gate: Gate,
    /// False if up is its own gate, without a projection of its own.
    pub gated: bool,
}

impl MlpConfig {
    /// SwiGLU, gate and up apart, as most checkpoints have it.
    pub const fn new(intermediate_size: usize) -> Self {
        Self { intermediate_size, fused: None, gate: Gate::Silu, gated: true }
    }
}
