use std::path::Path;

use serde_json::{Map, Number, Value};

use super::{Checkpoint, mismatch};
use crate::FileError;
use crate::gguf::Metadata;

/// What a checkpoint recommends for generation: generation_config.json, or GGUF's `general.sampling.*`. What it does
/// not say is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct GenerationConfig {
    pub bos_token_id: Option<u32>,
    /// Any of these ends a text. From config.json where generation_config.json names none.
    pub eos_token_ids: Vec<u32>,
    /// `false` means greedy decoding, whatever the other fields say.
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

impl Checkpoint {
    /// The recommended sampling and the tokens that end a text.
    ///
    /// # Errors
    /// [`FileError::Json`], [`FileError::Value`] or [`FileError::Gguf`] when a value is not of its type.
    pub fn generation_config(&self) -> Result<GenerationConfig, FileError> {
        match self.metadata() {
            Some(metadata) => from_gguf(metadata),
            None => self.generation_config_json(),
        }
    }

    fn generation_config_json(&self) -> Result<GenerationConfig, FileError> {
        let mut config = match self.json("generation_config.json")? {
            Some((file, json)) => from_json(&file, &json)?,
            None => GenerationConfig::default(),
        };
        let file = self.path().join(super::CONFIG);
        let model = self.config()?;
        for json in [Some(model), model.get("text_config")].into_iter().flatten() {
            if config.eos_token_ids.is_empty() {
                config.eos_token_ids = ids(&file, json, "eos_token_id")?;
            }
            if config.bos_token_id.is_none() {
                config.bos_token_id = ids(&file, json, "bos_token_id")?.first().copied();
            }
        }
        Ok(config)
    }
}

impl GenerationConfig {
    /// generation_config.json; `None` where there is nothing to say. `file` is where it is from.
    ///
    /// # Errors
    /// [`FileError::Value`] for a number that JSON does not have.
    pub(crate) fn to_json(&self, file: &Path) -> Result<Option<String>, FileError> {
        let mut json = Map::new();
        if let Some(id) = self.bos_token_id {
            json.insert("bos_token_id".into(), id.into());
        }
        if !self.eos_token_ids.is_empty() {
            json.insert("eos_token_id".into(), self.eos_token_ids.clone().into());
        }
        let mut sampling = Map::new();
        if let Some(top_k) = self.top_k {
            sampling.insert("top_k".into(), top_k.into());
        }
        let floats = [
            ("temperature", self.temperature),
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("repetition_penalty", self.repetition_penalty),
        ];
        for (key, value) in floats {
            let Some(value) = value else { continue };
            // In as few digits as say this f32.
            let number = value.to_string().parse().ok().and_then(Number::from_f64);
            let number =
                number.ok_or_else(|| mismatch(file, key, "a finite number", &value.to_string().into()))?;
            sampling.insert(key.into(), number.into());
        }
        // transformers decodes greedily otherwise.
        if let Some(sample) = self.do_sample.or((!sampling.is_empty()).then_some(true)) {
            json.insert("do_sample".into(), sample.into());
        }
        json.append(&mut sampling);
        let text = |json| serde_json::to_string_pretty(&Value::Object(json)).map_err(FileError::json(file));
        if json.is_empty() { Ok(None) } else { text(json).map(Some) }
    }
}

fn from_json(file: &Path, json: &Value) -> Result<GenerationConfig, FileError> {
    if !json.is_object() {
        return Err(mismatch(file, "the whole", "an object", json));
    }
    let float = |key| optional(file, json, key, "a number", |value| value.as_f64().map(|value| value as f32));
    Ok(GenerationConfig {
        bos_token_id: ids(file, json, "bos_token_id")?.first().copied(),
        eos_token_ids: ids(file, json, "eos_token_id")?,
        do_sample: optional(file, json, "do_sample", "a bool", Value::as_bool)?,
        temperature: float("temperature")?,
        top_k: optional(file, json, "top_k", "a u32", |value| value.as_u64()?.try_into().ok())?,
        top_p: float("top_p")?,
        min_p: float("min_p")?,
        repetition_penalty: float("repetition_penalty")?,
    })
}

/// `None` when the key is absent or null.
fn optional<T>(
    file: &Path,
    json: &Value,
    key: &str,
    want: &'static str,
    convert: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>, FileError> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => convert(value).map(Some).ok_or_else(|| mismatch(file, key, want, value)),
    }
}

/// One id or a list of them.
fn ids(file: &Path, json: &Value, key: &str) -> Result<Vec<u32>, FileError> {
    let id = |value: &Value| value.as_u64()?.try_into().ok();
    let convert = |value: &Value| match value.as_array() {
        Some(values) => values.iter().map(id).collect(),
        None => Some(vec![id(value)?]),
    };
    Ok(optional(file, json, key, "a token id or a list of them", convert)?.unwrap_or_default())
}

fn from_gguf(metadata: &Metadata) -> Result<GenerationConfig, FileError> {
    let mut eos_token_ids = Vec::new();
    for key in ["eos", "eot", "eom"] {
        eos_token_ids.extend(metadata.find::<u32>(&format!("tokenizer.ggml.{key}_token_id"))?);
    }
    eos_token_ids.dedup();
    Ok(GenerationConfig {
        bos_token_id: metadata.find("tokenizer.ggml.bos_token_id")?,
        eos_token_ids,
        do_sample: None,
        temperature: metadata.find("general.sampling.temp")?,
        top_k: metadata.find("general.sampling.top_k")?,
        top_p: metadata.find("general.sampling.top_p")?,
        min_p: metadata.find("general.sampling.min_p")?,
        repetition_penalty: metadata.find("general.sampling.penalty_repeat")?,
    })
}
