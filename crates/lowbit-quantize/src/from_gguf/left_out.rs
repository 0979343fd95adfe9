//! Parts of a GGUF file for which MLX's layout has no place.

use super::Source;
use crate::QuantizeError;
use crate::left_out::extras;
use lowbit_files::shown;

/// About the old file alone: its types, its parts, how many parameters there are.
const OF_THE_FILE: [&str; 6] = [
    "general.type",
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
    "general.size_label",
    "general.architecture",
];
const OF_THE_FILE_BELOW: [&str; 2] = ["split.", "quantize."];

/// Keys that go into generation_config.json, the tokenizer's files and config.json.
const CARRIED_OVER: [&str; 27] = [
    "general.name",
    "general.sampling.temp",
    "general.sampling.top_k",
    "general.sampling.top_p",
    "general.sampling.min_p",
    "general.sampling.penalty_repeat",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.seperator_token_id",
    "tokenizer.ggml.cls_token_id",
    "tokenizer.ggml.mask_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.chat_template",
    // The list of the names of the others.
    "tokenizer.chat_templates",
    // Between two texts, which no model here reads.
    "tokenizer.ggml.add_sep_token",
];
const CARRIED_OVER_BELOW: &str = "tokenizer.chat_template.";

/// Names in one warning.
const NAMES: usize = 32;

/// A sentence that names the keys without a place, and those about tensors.
pub(super) fn warnings(source: &Source<'_>) -> Result<Vec<String>, QuantizeError> {
    let Source { metadata, computed } = source;
    let path = computed.config.path().display();
    let own = format!("{}.", computed.architecture.gguf);
    let is_known = |key: &str| {
        // The model's loading has looked at these.
        key.starts_with(&own)
            || OF_THE_FILE.contains(&key)
            || OF_THE_FILE_BELOW.iter().any(|prefix| key.starts_with(prefix))
            || CARRIED_OVER.contains(&key)
            || key.starts_with(CARRIED_OVER_BELOW)
    };
    let keys: Vec<_> = metadata.iter().map(|(key, _)| key).filter(|key| !is_known(key)).collect();
    let mut warnings = vec![];
    if !keys.is_empty() {
        let more = keys.len().saturating_sub(NAMES);
        let named: Vec<_> = keys.iter().take(NAMES).map(|key| shown(key).to_string()).collect();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        warnings.push(format!("{path}: MLX's layout has no place for {}{more}: left out", named.join(", ")));
    }
    warnings.extend(extras(computed, &[]));
    Ok(warnings)
}
