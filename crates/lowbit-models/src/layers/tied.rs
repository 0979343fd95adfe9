//! Whether the output layer is the embedding. The peers do not agree on what decides that.

use crate::arch::{self, text_model};
use crate::{Config, ModelError, Weights};

/// What stands before `lm_head` in the checkpoint.
pub(super) fn head_prefix(weights: &Weights<'_>) -> &'static str {
    if weights.has("language_model.lm_head.weight", "") { "language_model." } else { "" }
}

/// Whether the output layer is the embedding: in GGUF, when there is no output layer. Elsewhere `tie_word_embeddings`
/// says it; of a multimodal model transformers takes the whole's, mlx-lm the `text_config`'s, and where it is missing
/// [`TiedByDefault`](crate::arch::TiedByDefault) says what each of them takes. A file that has an output layer, although it says that it is tied, is only
/// loaded when that is equal to the embedding: transformers 5.23 would use it (`tie_weights`), mlx-lm 0.32 drop it
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
        // Somebody ties it, and it cannot be otherwise.
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
