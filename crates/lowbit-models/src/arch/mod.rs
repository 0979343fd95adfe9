//! The architectures, one file each. To add one: its file, and its line in [`ARCHITECTURES`].

mod llama;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;

use crate::layers::{Decoder, DecoderConfig};
use crate::{Config, ModelError, Weights};

/// An architecture's sizes and its decoder.
pub type Loaded = Result<(DecoderConfig, Decoder), ModelError>;

/// How a family of checkpoints is recognised and loaded.
pub struct Architecture {
    /// `model_type` in `config.json`.
    pub model_types: &'static [&'static str],
    /// `general.architecture` in GGUF.
    pub gguf: &'static str,
    /// Builds the decoder from its configuration and its weights.
    pub load: fn(&Config<'_>, &Weights<'_>) -> Loaded,
}

/// The one list.
pub const ARCHITECTURES: &[Architecture] = &[
    llama::LLAMA,
    qwen3::QWEN3,
    qwen3_moe::QWEN3_MOE,
    qwen3_next::QWEN3_NEXT,
    qwen3_5::QWEN3_5,
    qwen3_5::QWEN3_5_MOE,
];

/// The entry for what `config` says it is.
///
/// # Errors
/// [`ModelError::Architecture`] names what was found and what is supported.
pub fn find(config: &Config<'_>) -> Result<&'static Architecture, ModelError> {
    let found = config.architecture()?;
    let matches = |architecture: &&Architecture| match config.is_gguf() {
        true => architecture.gguf == found,
        false => architecture.model_types.contains(&found.as_str()),
    };
    ARCHITECTURES.iter().find(matches).ok_or_else(|| {
        let names: Vec<&str> = match config.is_gguf() {
            true => ARCHITECTURES.iter().map(|architecture| architecture.gguf).collect(),
            false => {
                ARCHITECTURES.iter().flat_map(|architecture| architecture.model_types).copied().collect()
            }
        };
        ModelError::Architecture { path: config.path().clone(), found, supported: names.join(", ") }
    })
}

/// The part of a checkpoint that holds the layers: text models have it at the top, multimodal ones deeper.
pub(crate) fn text_model<'a>(weights: &Weights<'a>) -> Weights<'a> {
    let prefixes = ["model.language_model.", "language_model.model."];
    let deeper = prefixes.iter().find(|prefix| weights.has(&format!("{prefix}embed_tokens.weight"), ""));
    weights.below(deeper.copied().unwrap_or("model."), "")
}

/// Tensors that text generation does without: multi-token prediction, vision, and constants that old exporters
/// wrote out.
pub fn is_extra(name: &str, layers: usize) -> bool {
    let predictor = format!("blk.{layers}.");
    name.starts_with("mtp.")
        || name.contains(".mtp.")
        || name.starts_with("model.visual.")
        || name.starts_with("vision_tower.")
        || name.ends_with("rotary_emb.inv_freq")
        || name.starts_with(&predictor)
}
