//! Tensors of a checkpoint that text generation does not need.

use super::Architecture;

/// Kinds of tensors that text generation does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extra {
    /// Of the layers that predict further tokens.
    Prediction,
    /// Of the vision tower.
    Vision,
    /// Of the part that hears.
    Audio,
    /// A constant that the peers compute themselves.
    Constant,
    /// Of the linear layers behind pooling, in GGUF.
    Dense,
}

/// Name endings of constants that exporters wrote: rotary tables, positions and causal masks.
const CONSTANTS: [&str; 6] = [
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "position_ids",
    "attn.bias",
    "attn.masked_bias",
];

/// Prefixes of what sees images.
const VISION: [&str; 10] = [
    "model.visual.",
    "visual.",
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "embed_vision.",
    "model.embed_vision.",
    "vision_embedder.",
    "model.vision_embedder.",
];

/// Prefixes of what hears.
const AUDIO: [&str; 4] = ["audio_tower.", "model.audio_tower.", "embed_audio.", "model.embed_audio."];

impl Architecture {
    /// The kind of the tensor `name`, if it is outside the text model: its `layers` layers and the
    /// tensors around them.
    pub fn extra(&self, name: &str, layers: usize) -> Option<Extra> {
        let below = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        let layer = || match self.conversion.predicts_in_layers {
            true => gguf_layer(name).or_else(|| json_layer(name)),
            false => gguf_layer(name),
        };
        let predicts = || layer().is_some_and(|layer| layer >= layers);
        match name {
            _ if name.contains(".mtp.") || below(&["mtp."]) || predicts() => Some(Extra::Prediction),
            _ if self.conversion.sees_later && below(&["dense_2.", "dense_3."]) => Some(Extra::Dense),
            _ if below(&VISION) => Some(Extra::Vision),
            _ if below(&AUDIO) => Some(Extra::Audio),
            _ if CONSTANTS.iter().any(|end| name.ends_with(end)) => Some(Extra::Constant),
            _ => None,
        }
    }

    /// True if text generation does not need the tensor: see [`Self::extra`].
    pub fn is_extra(&self, name: &str, layers: usize) -> bool {
        self.extra(name, layers).is_some()
    }
}

/// The layer of GGUF's tensor `blk.N.`.
pub(crate) fn gguf_layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// The layer of Hugging Face's tensor `model.layers.N.`.
fn json_layer(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}
