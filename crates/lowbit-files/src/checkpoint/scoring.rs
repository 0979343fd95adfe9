//! The scores of documents for a query: the files that sentence-transformers writes
//! beside a language model that was trained as a reranker.
//!
//! Source: sentence-transformers 6.2, `CrossEncoder`, `LogitScore` and `Transformer`.

use super::{Checkpoint, mismatch};
use crate::names::CONFIG;
use crate::{FileError, shown};
use serde_json::{Map, Value};
use std::path::Path;

/// The way from a model's logits to a score.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ScoringConfig {
    /// The token whose logit, after the chat template's text, speaks for the document.
    pub true_token: u32,
    /// The token whose logit is subtracted.
    pub false_token: Option<u32>,
    /// True if a score is the logistic function of that, false if it is the logits' difference.
    pub sigmoid: bool,
    /// True if messages' contents are lists of parts for the template, false if they are texts;
    /// `None` where nothing says it.
    pub in_parts: Option<bool>,
    /// True if the template is asked for the start of an answer.
    pub add_generation_prompt: bool,
    /// Variables of the template.
    pub variables: Map<String, Value>,
}

impl ScoringConfig {
    /// With these tokens, and otherwise as sentence-transformers does it where nothing is said.
    pub fn new(true_token: u32, false_token: Option<u32>) -> Self {
        Self {
            true_token,
            false_token,
            sigmoid: true,
            in_parts: None,
            add_generation_prompt: false,
            variables: Map::new(),
        }
    }
}

const SCORE: &str = "LogitScore";

impl Checkpoint {
    /// The checkpoint's settings of scoring; `None` for one that has none. GGUF files have no
    /// place for it.
    ///
    /// # Errors
    /// [`FileError::Value`] for settings that lowbit does not compute, and for malformed ones;
    /// [`FileError::Json`] and [`FileError::Io`].
    pub fn scoring_config(&self) -> Result<Option<ScoringConfig>, FileError> {
        let modules = self.modules()?;
        let Some(module) = modules.iter().find(|module| module.class == SCORE) else { return Ok(None) };
        let missing = |file| FileError::Missing { file, key: "true_token_id".into() };
        let Some((file, json)) = self.module_config(&module.folder)? else {
            return Err(missing(self.path().join(&module.folder).join(CONFIG)));
        };
        let token = |key: &str| match &json[key] {
            Value::Null => Ok(None),
            value => match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
                Some(id) => Ok(Some(id)),
                None => Err(mismatch(&file, key, "a token's id", value)),
            },
        };
        let true_token = token("true_token_id")?.ok_or_else(|| missing(file.clone()))?;
        match &json["module_input_name"] {
            Value::Null => {}
            Value::String(name) if name == "causal_logits" => {}
            other => return Err(mismatch(&file, "module_input_name", "causal_logits", other)),
        }
        let mut config = ScoringConfig::new(true_token, token("false_token_id")?);
        config.sigmoid = self.has_sigmoid()?;
        if let Some((file, json)) = self.transformer_config()? {
            rendering(&file, &json, &mut config)?;
        }
        Ok(Some(config))
    }

    /// The function of scores that config.json names, by default the logistic one.
    fn has_sigmoid(&self) -> Result<bool, FileError> {
        let Some((file, json)) = self.json(CONFIG)? else { return Ok(true) };
        let older = "sbert_ce_default_activation_function";
        let (key, value) = match &json["sentence_transformers"]["activation_fn"] {
            Value::Null => (older, &json[older]),
            value => ("sentence_transformers.activation_fn", value),
        };
        match value.as_str().map(|name| name.rsplit('.').next().unwrap_or_default()) {
            None if value.is_null() => Ok(true),
            Some("Sigmoid") => Ok(true),
            Some("Identity") => Ok(false),
            _ => Err(mismatch(&file, key, "torch's Sigmoid or Identity", value)),
        }
    }
}

/// The arguments that the template is called with.
fn rendering(file: &Path, json: &Value, config: &mut ScoringConfig) -> Result<(), FileError> {
    match &json["modality_config"]["message"]["format"] {
        Value::Null => {}
        Value::String(name) if name == "structured" => config.in_parts = Some(true),
        Value::String(name) if name == "flat" => config.in_parts = Some(false),
        Value::String(name) if name == "auto" => {}
        other => return Err(mismatch(file, "modality_config.message.format", "structured or flat", other)),
    }
    let Some(groups) = json["processing_kwargs"].as_object() else { return Ok(()) };
    for (group, arguments) in groups {
        let of = |key: &str| format!("processing_kwargs.{group}.{key}");
        let Some(arguments) = arguments.as_object() else {
            return Err(mismatch(file, &format!("processing_kwargs.{group}"), "an object", arguments));
        };
        for (key, value) in arguments {
            match (group.as_str(), key.as_str(), value) {
                ("chat_template", "add_generation_prompt", Value::Bool(add)) => {
                    config.add_generation_prompt = *add;
                }
                // Texts that were cut keep the template's end here, as with this.
                ("chat_template", "restore_suffix", Value::Bool(true)) => {}
                // A text alone needs no padding.
                (_, "padding" | "padding_side" | "return_tensors", _) => {}
                ("chat_template", "add_generation_prompt" | "restore_suffix", _) => {
                    return Err(mismatch(file, &of(key), "true, or left out", value));
                }
                ("chat_template", "truncation" | "max_length" | "continue_final_message", _) => {
                    return Err(mismatch(file, &of(key), "nothing: it is not computed", value));
                }
                ("chat_template", name, value) => drop(config.variables.insert(name.into(), value.clone())),
                _ => {
                    let want = "chat_template's: other settings are not computed";
                    return Err(FileError::Value {
                        file: file.into(),
                        key: of(key),
                        want,
                        got: shown(value).to_string(),
                    });
                }
            }
        }
    }
    Ok(())
}
