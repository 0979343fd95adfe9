//! The rules by which the output layer is the embedding, which differ between the peers.

use crate::arch::{self, text_model};
use crate::{Config, ModelError, Weights};

/// The prefix of `lm_head` in the checkpoint.
pub(super) fn head_prefix(weights: &Weights<'_>) -> &'static str {
    if weights.has("language_model.lm_head.weight", "") { "language_model." } else { "" }
}

/// True if there is no output layer: the checkpoint was saved without it, and then its names have
/// no prefix either, as transformers' `Qwen3Model` has them. (GGUF cannot say this: no output layer
/// means the embedding there.)
pub(super) fn is_headless(weights: &Weights<'_>) -> bool {
    let has_head = weights.has(&format!("{}lm_head.weight", head_prefix(weights)), "");
    !weights.is_gguf() && !has_head && text_model(weights).prefix().is_empty()
}

/// True if the output layer is the embedding. In GGUF it is when there is no output layer.
/// Elsewhere `tie_word_embeddings` says it: for a multimodal model transformers reads the outer
/// one, mlx-lm the one in `text_config`; [`TiedByDefault`](crate::arch::TiedByDefault) has their
/// defaults. A file that has an output layer although it is said to be tied is only loaded if that
/// equals the embedding: transformers 5.23 would use it (`tie_weights`), mlx-lm 0.32 would drop it
/// (`sanitize`).
pub(super) fn is_tied(config: &Config<'_>, weights: &Weights<'_>) -> Result<bool, ModelError> {
    if config.is_gguf() {
        return Ok(!weights.has("", "output.weight"));
    }
    let [whole, text] = config.tied()?;
    let default = arch::find(config)?.tied_by_default;
    let by_kind = match config.is_mlx() {
        true => if config.is_wrapped() { text } else { whole }.unwrap_or(default.mlx_lm),
        false => whole.unwrap_or(default.transformers),
    };
    let head = format!("{}lm_head", head_prefix(weights));
    let embedding = format!("{}embed_tokens", text_model(weights).prefix());
    match weights.are_same(&head, &embedding) {
        // There is no output layer, and one of the configurations says that it is tied.
        None if !weights.has(&format!("{head}.weight"), "") => {
            Ok(by_kind || [whole, text].contains(&Some(true)))
        }
        None | Some(false) if by_kind => {
            let got = if whole.or(text).is_some() { "true" } else { "missing" };
            let want = format!(
                "{head}.weight is there and differs from {embedding}.weight: transformers would use it and mlx-lm would not"
            );
            Err(config.refuse("tie_word_embeddings", got, &want))
        }
        Some(true) => Ok(true),
        None | Some(false) => Ok(false),
    }
}
