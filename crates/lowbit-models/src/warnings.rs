use crate::{Config, ModelError};
use lowbit_files::{Checkpoint, shown};

/// Names in one warning.
const NAMES: usize = 8;

/// Warnings about `checkpoint`, a sentence for the user each: parts that lowbit ignores, and
/// harmless contradictions. They name keys in no table, quantization overrides of modules that do
/// not exist, scales of activations, adapters, and stop ids outside the vocabulary.
///
/// # Errors
/// Those of [`Config::new`] and of [`Checkpoint::generation_config`].
pub fn warnings(checkpoint: &Checkpoint) -> Result<Vec<String>, ModelError> {
    let config = Config::new(checkpoint)?;
    let mut warnings = vec![];
    let path = config.path().display();
    let unknown = config.unknown_keys();
    if !unknown.is_empty() {
        warnings.push(format!(
            "{path}: {} of the configuration {} not known to lowbit: what it means is not computed",
            listed(&unknown),
            if unknown.len() == 1 { "is" } else { "are" }
        ));
    }
    let overrides = checkpoint.surplus_quantization();
    if !overrides.is_empty() {
        warnings.push(format!(
            "{path}: the quantization has entries for {}, but there are no such modules",
            listed(&overrides)
        ));
    }
    if let [_, ..] = checkpoint.without_effect() {
        let kinds = listed(checkpoint.without_effect());
        let method = checkpoint.method().unwrap_or("NVFP4");
        warnings.push(format!("{path}: {kinds} of {method} without effect: activations are floats"));
    }
    if let (Some(method), 1..) = (checkpoint.method(), checkpoint.expanded()) {
        warnings.push(format!(
            "{path}: {} weights of {method} become f32 when they are read, 4 to 7 times as large: make a smaller \
             checkpoint with `lowbit quantize`",
            checkpoint.expanded()
        ));
    }
    for adapter in checkpoint.adapters() {
        warnings
            .push(format!("{path}: {adapter} is not applied: lowbit computes the model without the adapter"));
    }
    if let Some(vocab_size) = config.vocab_size(checkpoint)? {
        let outside = |id: &&u32| **id as usize >= vocab_size;
        let ids = checkpoint.generation_config()?.eos_token_ids;
        let ids: Vec<_> = ids.iter().filter(outside).map(u32::to_string).collect();
        if !ids.is_empty() {
            warnings.push(format!(
                "{path}: eos_token_id {} can never end a text: the vocabulary has {vocab_size} tokens",
                listed(&ids)
            ));
        }
    }
    Ok(warnings)
}

/// The first names, and how many more there are.
fn listed(names: &[String]) -> String {
    let first = names.iter().take(NAMES).map(|name| shown(name).to_string()).collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(NAMES) {
        None | Some(0) => first,
        Some(more) => format!("{first} and {more} more"),
    }
}
