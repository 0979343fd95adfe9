mod checks;
mod per_layer;

use crate::ModelError;
use crate::arch::{self, Architecture, GgufFacts, JsonFacts, ModelType};
use crate::keys::{self, Absent, Key, ROPE, Role, Tables};
use lowbit_files::{Checkpoint, Layout, gguf, shown};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// A model's hyper-parameters, from `config.json` or from GGUF metadata. Getters take the key's
/// name in each: `size("hidden_size", "embedding_length")`. GGUF keys stand below the
/// architecture's name. A key is read as the architecture's table says ([`keys`]): a key that the
/// peers ignore counts as missing, and a missing key has its default.
pub struct Config<'a> {
    path: PathBuf,
    source: Source<'a>,
    /// The architecture that it describes, if that is known.
    found: Option<&'static Architecture>,
}

enum Source<'a> {
    /// `config.json`.
    Json {
        /// The text model's part: the whole, or a multimodal model's `text_config`.
        text: &'a Map<String, Value>,
        tables: Tables,
        /// The whole around a `text_config`.
        wrapper: Option<&'a Map<String, Value>>,
        model_type: Option<&'a str>,
        layout: Layout,
    },
    Gguf {
        metadata: &'a gguf::Metadata,
        architecture: String,
        tables: Tables,
    },
}

impl<'a> Config<'a> {
    /// The configuration of `checkpoint`.
    ///
    /// # Errors
    /// [`ModelError::File`] and [`ModelError::Config`] when it is missing or not an object.
    pub fn new(checkpoint: &'a Checkpoint) -> Result<Self, ModelError> {
        let path = checkpoint.path().to_path_buf();
        if let Some(metadata) = checkpoint.metadata() {
            let architecture = metadata.get::<&str>("general.architecture")?.to_string();
            let found = arch::gguf(&architecture, gguf_facts(metadata, &architecture)?);
            let tables = found.map_or(&[][..], |found| found.gguf_keys);
            return Ok(Self { path, source: Source::Gguf { metadata, architecture, tables }, found });
        }
        let root = object(&path, "config.json", checkpoint.config()?)?;
        let model_type = root.get("model_type").and_then(Value::as_str);
        let nested = root.get("text_config").filter(|text| !text.is_null());
        let inner = nested.and_then(|text| text.get("model_type")).and_then(Value::as_str);
        let later = root.get("use_bidirectional_attention");
        let facts = JsonFacts {
            experts: has_experts(root, checkpoint.layout()),
            sees_later: later.and_then(Value::as_bool) == Some(true),
        };
        let found = model_type.and_then(|name| arch::model_type(name, inner, facts));
        let text = match (nested, found) {
            (Some(text), Some((_, ModelType { wraps: true, .. }))) => object(&path, "text_config", text)?,
            _ => root,
        };
        let tables = found.map_or(&[][..], |(_, model_type)| model_type.tables);
        let wrapper = (!std::ptr::eq(text, root)).then_some(root);
        let source = Source::Json { text, tables, wrapper, model_type, layout: checkpoint.layout() };
        Ok(Self { path, source, found: found.map(|(architecture, _)| architecture) })
    }

    /// `model_type`, or GGUF's `general.architecture`.
    ///
    /// # Errors
    /// [`ModelError::ConfigMissing`].
    pub fn architecture(&self) -> Result<String, ModelError> {
        match &self.source {
            Source::Gguf { architecture, .. } => Ok(architecture.clone()),
            Source::Json { model_type, .. } => {
                model_type.map(str::to_string).ok_or_else(|| self.missing("model_type"))
            }
        }
    }

    /// The `model_type` of `config.json`, or of the `text_config` in it.
    pub fn text_type(&self) -> Option<&'a str> {
        let Source::Json { text, model_type, .. } = &self.source else { return None };
        text.get("model_type").and_then(Value::as_str).or(*model_type)
    }

    /// True for a GGUF file's configuration.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf { .. })
    }

    /// The architecture that it describes, if that is known.
    pub fn found(&self) -> Option<&'static Architecture> {
        self.found
    }

    /// True if mlx-lm made the checkpoint.
    pub fn is_mlx(&self) -> bool {
        matches!(self.source, Source::Json { layout: Layout::Mlx, .. })
    }

    /// The file or directory it is from, for errors.
    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// The value of `key`, or its default when it is missing; `None` if it has no default, if it is
    /// null, if the peers ignore it, and for GGUF.
    ///
    /// # Errors
    /// [`ModelError::Config`] when it is missing and the peers have different defaults, or when it
    /// contradicts the key's other name.
    pub fn json(&self, key: &str) -> Result<Option<Cow<'a, Value>>, ModelError> {
        let Source::Json { text, tables, .. } = &self.source else { return Ok(None) };
        let role = keys::role(tables, key);
        debug_assert!(role.is_some(), "{key} is read, but in no table");
        let Some(Role::Computed(absent)) = role else { return Ok(None) };
        let value = text.get(key);
        let alias = |other: &&Key| matches!(other.role, Role::Alias(name) if name == key);
        let alias = tables.iter().copied().flatten().find(alias);
        let named = alias.and_then(|alias| Some((alias.name, text.get(alias.name)?)));
        match (value, named) {
            (None, None) => self.absent(key, absent),
            (Some(value), Some((name, other))) if value != other => {
                let want = format!("{name}, another name for it, is {}", shown(other));
                Err(self.refuse(key, &value.to_string(), &want))
            }
            (Some(value), _) | (None, Some((_, value))) => {
                Ok(Some(value).filter(|value| !value.is_null()).map(Cow::Borrowed))
            }
        }
    }

    fn absent(&self, key: &str, absent: Absent) -> Result<Option<Cow<'a, Value>>, ModelError> {
        match absent {
            Absent::Required | Absent::Nothing => Ok(None),
            Absent::Disputed(default) if self.is_mlx() => {
                let want = format!(
                    "transformers then takes {default} and mlx-lm something else: an MLX checkpoint has to have it"
                );
                Err(self.refuse(key, "missing", &want))
            }
            Absent::Is(default) | Absent::Disputed(default) => Ok(Some(Cow::Owned(default.value()))),
        }
    }

    /// `tie_word_embeddings` as the file has it, at the top and, where there is one, in
    /// `text_config`.
    ///
    /// # Errors
    /// [`ModelError::Config`] when one is not a flag.
    pub fn tied(&self) -> Result<[Option<bool>; 2], ModelError> {
        let Source::Json { text, wrapper, .. } = &self.source else { return Ok([None, None]) };
        let flag = |map: &Map<String, Value>| match map.get("tie_word_embeddings") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => {
                Err(self.refuse("tie_word_embeddings", &other.to_string(), "true or false is wanted"))
            }
        };
        match wrapper {
            None => Ok([flag(text)?, None]),
            Some(root) => Ok([flag(root)?, flag(text)?]),
        }
    }

    /// True for a multimodal model's configuration with a `text_config`.
    pub fn is_wrapped(&self) -> bool {
        matches!(self.source, Source::Json { wrapper: Some(_), .. })
    }

    /// A size that may be absent.
    ///
    /// # Errors
    /// As [`Self::json`]; [`ModelError::Config`] when it is present but not a size.
    pub fn optional_size(&self, json: &str, gguf: &str) -> Result<Option<usize>, ModelError> {
        match &self.source {
            Source::Json { .. } => self.json(json)?.map(|value| self.to_size(json, &value)).transpose(),
            Source::Gguf { metadata, .. } => Ok(metadata.find::<usize>(&self.gguf_key(gguf))?),
        }
    }

    /// A size.
    ///
    /// # Errors
    /// [`ModelError::ConfigMissing`], or [`ModelError::Config`] when it is zero or not a size.
    pub fn size(&self, json: &str, gguf: &str) -> Result<usize, ModelError> {
        let key = if self.is_gguf() { gguf } else { json };
        match self.optional_size(json, gguf)? {
            Some(0) => Err(self.refuse(key, "0", "a size is at least 1")),
            Some(size) => Ok(size),
            None => Err(self.missing(key)),
        }
    }

    /// A number that may be absent.
    ///
    /// # Errors
    /// As [`Self::json`]; [`ModelError::Config`] when it is present but not a number.
    pub fn optional_float(&self, json: &str, gguf: &str) -> Result<Option<f64>, ModelError> {
        match &self.source {
            Source::Json { .. } => self.json(json)?.map(|value| self.to_float(json, &value)).transpose(),
            Source::Gguf { metadata, .. } => {
                let number = metadata.find::<f64>(&self.gguf_key(gguf))?;
                number.map(|number| self.in_f32(gguf, number, &number.to_string())).transpose()
            }
        }
    }

    /// A number.
    ///
    /// # Errors
    /// [`ModelError::ConfigMissing`] or [`ModelError::Config`].
    pub fn float(&self, json: &str, gguf: &str) -> Result<f64, ModelError> {
        let missing = || self.missing(if self.is_gguf() { gguf } else { json });
        self.optional_float(json, gguf)?.ok_or_else(missing)
    }

    /// A string that may be absent.
    ///
    /// # Errors
    /// As [`Self::json`]; [`ModelError::Config`] or [`ModelError::File`] when it is present but not
    /// a string.
    pub fn text(&self, json: &str, gguf: &str) -> Result<Option<String>, ModelError> {
        match &self.source {
            Source::Json { .. } => match self.json(json)?.as_deref() {
                None => Ok(None),
                Some(Value::String(text)) => Ok(Some(text.clone())),
                Some(other) => Err(self.refuse(json, &other.to_string(), "a string is wanted")),
            },
            Source::Gguf { metadata, .. } => {
                Ok(metadata.find::<&str>(&self.gguf_key(gguf))?.map(str::to_string))
            }
        }
    }

    /// A JSON flag; `default` where it is null or the peers ignore it.
    ///
    /// # Errors
    /// As [`Self::json`]; [`ModelError::Config`] when it is present but not a flag.
    pub fn flag(&self, json: &str, default: bool) -> Result<bool, ModelError> {
        match self.json(json)?.as_deref() {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.refuse(json, &other.to_string(), "true or false is wanted")),
        }
    }

    /// A GGUF flag; `default` where it is absent.
    ///
    /// # Errors
    /// [`ModelError::File`] when it is present but not a flag.
    pub fn gguf_flag(&self, gguf: &str, default: bool) -> Result<bool, ModelError> {
        let Source::Gguf { metadata, .. } = &self.source else { return Ok(default) };
        Ok(metadata.find::<bool>(&self.gguf_key(gguf))?.unwrap_or(default))
    }

    /// A JSON list of numbers, empty where it is absent.
    ///
    /// # Errors
    /// As [`Self::json`]; [`ModelError::Config`] when it is there and no list of numbers.
    pub fn floats(&self, json: &str) -> Result<Vec<f32>, ModelError> {
        match self.json(json)?.as_deref() {
            None => Ok(vec![]),
            Some(Value::Array(values)) => {
                values.iter().map(|value| Ok(self.to_float(json, value)? as f32)).collect()
            }
            Some(other) => Err(self.refuse(json, &other.to_string(), "a list of numbers is wanted")),
        }
    }

    /// A least and a largest number, the latter perhaps infinite; `None` where the key is absent.
    ///
    /// # Errors
    /// As [`Self::json`]; [`ModelError::Config`] when it is there and no list of two numbers.
    pub fn bounds(&self, json: &str) -> Result<Option<[f32; 2]>, ModelError> {
        let Some(value) = self.json(json)? else { return Ok(None) };
        let number = |value: &Value| match value.get("__float__").and_then(Value::as_str) {
            // transformers' spelling.
            Some("Infinity") => Ok::<_, ModelError>(f32::INFINITY),
            _ => Ok(self.to_float(json, value)? as f32),
        };
        match value.as_array().map(Vec::as_slice) {
            Some([least, most]) => Ok(Some([number(least)?, number(most)?])),
            _ => Err(self.refuse(json, &value.to_string(), "a list of two numbers is wanted")),
        }
    }

    /// True if the key has this word for a value.
    ///
    /// # Errors
    /// As [`Self::json`].
    pub fn word(&self, json: &str, word: &str) -> Result<bool, ModelError> {
        Ok(self.json(json)?.is_some_and(|value| value.as_str() == Some(word)))
    }

    /// The eps of a decoder's RMSNorms.
    ///
    /// # Errors
    /// As [`Self::float`]; [`ModelError::Config`] when it is no number from 0 on.
    pub fn norm_eps(&self) -> Result<f32, ModelError> {
        let named = ["norm_eps", "layer_norm_epsilon"].into_iter().find(|key| self.computes(key));
        let json = named.unwrap_or("rms_norm_eps");
        let gguf = "attention.layer_norm_rms_epsilon";
        let other = "attention.layer_norm_epsilon";
        let eps = match self.is_gguf() && self.computes(other) {
            true => self.optional_float("", gguf)?.or(self.optional_float("", other)?),
            false => self.optional_float(json, gguf)?,
        };
        let missing = || self.missing(if self.is_gguf() { gguf } else { json });
        let eps = eps.ok_or_else(missing)? as f32;
        match eps >= 0.0 && eps.is_finite() {
            true => Ok(eps),
            false => {
                let key = if self.is_gguf() { gguf } else { json };
                Err(self.refuse(key, &eps.to_string(), "a number from 0 is wanted"))
            }
        }
    }

    /// A JSON list of sizes, empty where it is absent.
    ///
    /// # Errors
    /// As [`Self::json`]; [`ModelError::Config`] when it is present but not a list of sizes.
    pub fn sizes(&self, json: &str) -> Result<Vec<usize>, ModelError> {
        match self.json(json)?.as_deref() {
            None => Ok(vec![]),
            Some(Value::Array(values)) => values.iter().map(|value| self.to_size(json, value)).collect(),
            Some(other) => Err(self.refuse(json, &other.to_string(), "a list of whole numbers is wanted")),
        }
    }

    /// The number of tokens with an embedding; `None` if the configuration does not have it.
    ///
    /// # Errors
    /// [`ModelError::Config`] when it is not a size.
    pub fn vocab_size(&self, checkpoint: &Checkpoint) -> Result<Option<usize>, ModelError> {
        match &self.source {
            Source::Gguf { .. } => {
                let embedding = checkpoint.tensors().get("token_embd.weight");
                Ok(embedding.and_then(|view| view.shape.first().copied()))
            }
            Source::Json { tables: [], .. } => Ok(None),
            Source::Json { .. } => self.optional_size("vocab_size", ""),
        }
    }

    /// `rope_parameters`, `rope_scaling` or `linear_attn_config` as a configuration of its own;
    /// `None` when it is absent or empty.
    ///
    /// # Errors
    /// [`ModelError::Config`] when it is not an object.
    pub fn section(&self, json: &str) -> Result<Option<Config<'a>>, ModelError> {
        let Source::Json { text, model_type, layout, .. } = self.source else { return Ok(None) };
        let Some(value) = text.get(json).filter(|value| !value.is_null()) else { return Ok(None) };
        let section =
            value.as_object().ok_or_else(|| self.refuse(json, &value.to_string(), "an object is wanted"))?;
        // Inside a rotary embedding's stand those of each kind of layer.
        let tables = keys::of_object(json).unwrap_or(&[ROPE]);
        let source = Source::Json { text: section, tables, wrapper: None, model_type, layout };
        let found = self.found;
        Ok((!section.is_empty()).then(|| Config { path: self.path.clone(), source, found }))
    }

    /// True if both have the same keys with the same values.
    pub fn is_same(&self, other: &Config<'_>) -> bool {
        match (&self.source, &other.source) {
            (Source::Json { text: one, .. }, Source::Json { text: another, .. }) => one == another,
            _ => false,
        }
    }

    /// The first key whose value is an object.
    pub fn first_object(&self) -> Option<&'a str> {
        let Source::Json { text, .. } = &self.source else { return None };
        text.iter().find(|(_, value)| value.is_object()).map(|(key, _)| key.as_str())
    }

    /// True if the architecture computes with `key`.
    pub fn computes(&self, key: &str) -> bool {
        let (Source::Json { tables, .. } | Source::Gguf { tables, .. }) = &self.source;
        matches!(keys::role(tables, key), Some(Role::Computed(_)))
    }

    /// True if `config.json` has `key` with a value.
    pub fn has(&self, key: &str) -> bool {
        self.stored(key).is_some()
    }

    /// True if `config.json` has `key`, be it null.
    pub fn says(&self, key: &str) -> bool {
        matches!(&self.source, Source::Json { text, .. } if text.contains_key(key))
    }

    /// The number in the file, even if the architecture ignores the key.
    ///
    /// # Errors
    /// [`ModelError::Config`] when it is present but not a number.
    pub fn stored_float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.stored(key).map(|value| self.to_float(key, value)).transpose()
    }

    fn stored(&self, key: &str) -> Option<&'a Value> {
        let Source::Json { text, .. } = &self.source else { return None };
        text.get(key).filter(|value| !value.is_null())
    }

    /// The error for a key that must be there.
    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::ConfigMissing { path: self.path.clone(), key: key.into() }
    }

    /// The error for a value that cannot be used.
    pub fn refuse(&self, key: &str, got: &str, want: &str) -> ModelError {
        let (key, got) = (shown(key).to_string(), shown(got).to_string());
        ModelError::Config { path: self.path.clone(), key, got, want: want.into() }
    }

    fn gguf_key(&self, key: &str) -> String {
        let Source::Gguf { architecture, tables, .. } = &self.source else { return key.into() };
        let computed = matches!(keys::role(tables, key), Some(Role::Computed(_)));
        debug_assert!(computed, "{key} is read, but not in {architecture}'s table");
        format!("{architecture}.{key}")
    }

    fn to_size(&self, key: &str, value: &Value) -> Result<usize, ModelError> {
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.ok_or_else(|| self.refuse(key, &value.to_string(), "a whole number is wanted"))
    }

    fn to_float(&self, key: &str, value: &Value) -> Result<f64, ModelError> {
        let number =
            value.as_f64().ok_or_else(|| self.refuse(key, &value.to_string(), "a number is wanted"))?;
        self.in_f32(key, number, &value.to_string())
    }

    /// `number`, which the file spells `got`, if it is still one in f32, the type that the peers
    /// compute in.
    fn in_f32(&self, key: &str, number: f64, got: &str) -> Result<f64, ModelError> {
        let narrow = number as f32;
        let want = match () {
            () if !number.is_finite() => "a number is wanted",
            () if narrow.is_infinite() => "it is computed with in f32, which ends at 3.4e38",
            () if narrow == 0.0 && number != 0.0 => "it is computed with in f32, where that is 0",
            () => return Ok(number),
        };
        Err(self.refuse(key, got, want))
    }
}

/// The facts of a GGUF file by which architectures with the same name are told apart.
fn gguf_facts(metadata: &gguf::Metadata, architecture: &str) -> Result<GgufFacts, ModelError> {
    let key = |name: &str| format!("{architecture}.{name}");
    let experts = metadata.find::<usize>(&key("expert_count"))?;
    let window = metadata.find::<usize>(&key("attention.sliding_window"));
    let eps = metadata.find::<f64>(&key("attention.layer_norm_rms_epsilon")).ok().flatten();
    let sigmoids = match metadata.find::<usize>(&key("expert_gating_func")).ok().flatten() {
        // llama.cpp knows GLM-4.7-Flash by its vocabulary.
        None | Some(0) => metadata.find::<usize>(&key("vocab_size")).ok().flatten() == Some(154_880),
        Some(function) => function == 2,
    };
    Ok(GgufFacts {
        experts: experts.is_some_and(|experts| experts > 0),
        windows: matches!(window, Ok(Some(1..))),
        sigmoids,
        other_eps: eps.is_some_and(|eps| eps as f32 != 1e-6),
    })
}

/// True if a model has experts, of those that may be without. A list of its layers says it; a
/// missing number has a default above 0 in transformers, and none in mlx-lm.
fn has_experts(root: &Map<String, Value>, layout: Layout) -> bool {
    let kinds = ["hybrid_override_pattern", "layers_block_type", "layer_types"];
    let mut kinds = kinds.into_iter().filter_map(|key| root.get(key));
    let is_expert = |kind: &Value| kind.as_str() == Some("moe");
    let lists = |kinds: &Value| match kinds {
        Value::String(letters) => letters.contains('E'),
        kinds => kinds.as_array().is_some_and(|kinds| kinds.iter().any(is_expert)),
    };
    match root.get("num_local_experts") {
        _ if root.contains_key("hybrid_override_pattern") || root.contains_key("layers_block_type") => {
            kinds.any(lists)
        }
        None => layout != Layout::Mlx,
        Some(count) => count.as_u64().is_some_and(|count| count > 0),
    }
}

fn object<'a>(path: &Path, key: &str, value: &'a Value) -> Result<&'a Map<String, Value>, ModelError> {
    let refuse = || ModelError::Config {
        path: path.into(),
        key: key.into(),
        got: shown(value).to_string(),
        want: "an object is wanted".into(),
    };
    value.as_object().ok_or_else(refuse)
}
