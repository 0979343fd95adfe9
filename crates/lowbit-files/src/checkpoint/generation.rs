use std::path::Path;

use serde_json::{Map, Number, Value};

use super::{Checkpoint, mismatch};
use crate::FileError;
use crate::gguf::{self, Metadata};

/// A checkpoint's recommendations for generation: generation_config.json, or GGUF's
/// `general.sampling.*`. Missing settings are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct GenerationConfig {
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text; from config.json if generation_config.json names none.
    pub eos_token_ids: Vec<u32>,
    /// `false` means greedy decoding, whatever the other fields say.
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// The number of last tokens that the repetition penalty looks at: GGUF's `penalty_last_n`.
    pub repetition_context: Option<usize>,
    /// The names of other recommended settings that change which tokens are sampled.
    pub unused: Vec<String>,
}

/// Keys of generation_config.json that change what transformers writes, with the number that
/// changes nothing.
const UNUSED: [(&str, f64); 21] = [
    ("bad_words_ids", 0.0),
    ("begin_suppress_tokens", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("exponential_decay_length_penalty", 0.0),
    ("forced_bos_token_id", 0.0),
    ("forced_eos_token_id", 0.0),
    ("frequency_penalty", 0.0),
    ("guidance_scale", 1.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("no_repeat_ngram_size", 0.0),
    ("num_beams", 1.0),
    ("penalty_alpha", 0.0),
    ("presence_penalty", 0.0),
    ("sequence_bias", 0.0),
    ("suppress_tokens", 0.0),
    ("top_h", 0.0),
    ("typical_p", 1.0),
    ("xtc_probability", 0.0),
];

/// The file of a directory that [`Checkpoint::generation_config`] reads.
const FILE: &str = "generation_config.json";

/// The prefix of the GGUF keys that [`Checkpoint::generation_config`] reads sampling from.
const PREFIX: &str = "general.sampling.";

impl Checkpoint {
    /// The recommended sampling and the tokens that end a text.
    ///
    /// # Errors
    /// [`FileError::Json`], [`FileError::Value`] or [`FileError::Gguf`] when a value is not of its
    /// type.
    pub fn generation_config(&self) -> Result<GenerationConfig, FileError> {
        match self.metadata() {
            Some(metadata) => from_gguf(metadata),
            None => self.generation_config_json(),
        }
    }

    /// The source of its recommended sampling, for messages: `generation_config.json` or
    /// `general.sampling`.
    pub fn generation_config_source(&self) -> &'static str {
        if self.metadata().is_some() { PREFIX.trim_end_matches('.') } else { FILE }
    }

    fn generation_config_json(&self) -> Result<GenerationConfig, FileError> {
        let mut config = match self.json(FILE)? {
            Some((file, json)) => from_json(&file, &json)?,
            None => GenerationConfig::default(),
        };
        let file = self.path().join(crate::names::CONFIG);
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
    /// The recommended temperature: 0 (greedy) where `do_sample` is false, and 1 where other
    /// sampling settings are recommended, but no temperature, as in transformers. `None` if nothing
    /// is recommended.
    ///
    /// Sampling settings count also without `do_sample`, as for llama.cpp's converter; transformers
    /// is greedy there.
    pub fn recommended_temperature(&self) -> Option<f32> {
        let filters = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        match self.do_sample {
            Some(false) => Some(0.0),
            Some(true) => Some(self.temperature.unwrap_or(1.0)),
            None => self.temperature.or(filters.then_some(1.0)),
        }
    }

    /// The content of generation_config.json; `None` if nothing is recommended. `file` is the
    /// source, for errors.
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
        // transformers decodes greedily where nothing is said, and refuses a temperature of 0.
        if let Some(temperature) = self.recommended_temperature() {
            json.insert("do_sample".into(), (temperature > 0.0).into());
            sampling.retain(|key, value| key != "temperature" || value.as_f64() > Some(0.0));
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
        // -1 keeps all, as 0 does.
        top_k: optional(file, json, "top_k", "an integer", |value| value.as_i64()?.max(0).try_into().ok())?,
        top_p: float("top_p")?,
        min_p: float("min_p")?,
        repetition_penalty: float("repetition_penalty")?,
        repetition_context: None,
        unused: UNUSED
            .iter()
            .filter(|&&(key, neutral)| json.get(key).is_some_and(|value| changes(key, value, neutral)))
            .map(|&(key, _)| key.into())
            .collect(),
    })
}

/// True if a value of generation_config.json changes anything.
fn changes(key: &str, value: &Value, neutral: f64) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        // A token id; 0 is one.
        Value::Number(_) if key.ends_with("_id") => true,
        Value::Number(number) => number.as_f64() != Some(neutral),
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
        Value::Bool(true) | Value::String(_) => true,
    }
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
    let key = |name: &str| format!("{PREFIX}{name}");
    let integer =
        |name: &str| Ok::<_, FileError>(metadata.find::<i32>(&key(name))?.map(|value| value.max(0)));
    Ok(GenerationConfig {
        bos_token_id: metadata.find("tokenizer.ggml.bos_token_id")?,
        eos_token_ids,
        do_sample: None,
        temperature: metadata.find(&key("temp"))?,
        top_k: integer("top_k")?.map(i32::cast_unsigned),
        top_p: metadata.find(&key("top_p"))?,
        min_p: metadata.find(&key("min_p"))?,
        repetition_penalty: metadata.find(&key("penalty_repeat"))?,
        repetition_context: integer("penalty_last_n")?.map(|tokens| tokens as usize),
        unused: unused_in_gguf(metadata),
    })
}

/// The names of sampling keys that are not read and not switched off by a 0.
fn unused_in_gguf(metadata: &Metadata) -> Vec<String> {
    const USED: [&str; 6] = ["temp", "top_k", "top_p", "min_p", "penalty_repeat", "penalty_last_n"];
    let is_off = |name: &str| match metadata.value(&format!("{PREFIX}{name}")) {
        None => true,
        Some(value) => value.integer() == Some(0) || matches!(*value, gguf::Value::F32(0.0)),
    };
    let unused = metadata.iter().filter_map(|(key, _)| key.strip_prefix(PREFIX)).filter(|name| match *name {
        // They say how, not whether.
        "mirostat_tau" | "mirostat_eta" => !is_off("mirostat"),
        "xtc_threshold" => !is_off("xtc_probability"),
        name => !USED.contains(&name) && !is_off(name),
    });
    unused.map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::Value;

    #[test]
    fn sampling_keys_of_gguf_are_read_or_named() {
        let config = |entries: &[(&str, Value)]| {
            let mut metadata = Metadata::new(Path::new("m.gguf").into());
            for (key, value) in entries {
                metadata.insert(format!("{PREFIX}{key}"), value.clone()).unwrap();
            }
            from_gguf(&metadata).unwrap()
        };
        let all = config(&[
            ("temp", Value::F32(0.6)),
            ("top_k", Value::I32(-1)),
            ("penalty_repeat", Value::F32(1.1)),
            ("penalty_last_n", Value::I32(32)),
            ("mirostat", Value::I32(2)),
            ("mirostat_tau", Value::F32(5.0)),
            ("xtc_probability", Value::F32(0.5)),
            ("sequence", Value::String("top_k;temperature".into())),
        ]);
        assert_eq!((all.temperature, all.top_k, all.repetition_context), (Some(0.6), Some(0), Some(32)));
        assert_eq!(all.repetition_penalty, Some(1.1));
        assert_eq!(all.unused, ["mirostat", "mirostat_tau", "xtc_probability", "sequence"]);
        let off = config(&[
            ("mirostat", Value::I32(0)),
            ("mirostat_eta", Value::F32(0.1)),
            ("xtc_probability", Value::F32(0.0)),
            ("xtc_threshold", Value::F32(0.1)),
        ]);
        assert_eq!(off, GenerationConfig::default());
    }
}
