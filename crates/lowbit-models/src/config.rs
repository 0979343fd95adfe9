use crate::ModelError;
use lowbit_files::{Checkpoint, gguf};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// A model's hyper-parameters, from `config.json` or from GGUF metadata. Getters take the key's name in each:
/// `size("hidden_size", "embedding_length")`. GGUF keys stand below the architecture's name.
pub struct Config<'a> {
    path: PathBuf,
    source: Source<'a>,
}

enum Source<'a> {
    /// `config.json`; a multimodal model's text part comes first.
    Json {
        root: &'a Map<String, Value>,
        text: &'a Map<String, Value>,
    },
    Gguf {
        metadata: &'a gguf::Metadata,
        architecture: String,
    },
}

impl<'a> Config<'a> {
    /// The configuration of `checkpoint`.
    ///
    /// # Errors
    /// [`ModelError::File`] and [`ModelError::Config`] when it is missing or no object.
    pub fn new(checkpoint: &'a Checkpoint) -> Result<Self, ModelError> {
        let path = checkpoint.path().to_path_buf();
        if let Some(metadata) = checkpoint.metadata() {
            let architecture = metadata.get::<&str>("general.architecture")?.to_string();
            return Ok(Self { path, source: Source::Gguf { metadata, architecture } });
        }
        let config = checkpoint.config()?;
        let object = |key: &str, value: &'a Value| {
            let refuse = || ModelError::Config {
                path: path.clone(),
                key: key.into(),
                got: value.to_string(),
                want: "an object is wanted".into(),
            };
            value.as_object().ok_or_else(refuse)
        };
        let root = object("config.json", config)?;
        let text = root.get("text_config").map_or(Ok(root), |text| object("text_config", text))?;
        Ok(Self { path, source: Source::Json { root, text } })
    }

    /// `model_type` (of the text model where there is one), or GGUF's `general.architecture`.
    ///
    /// # Errors
    /// [`ModelError::ConfigMissing`].
    pub fn architecture(&self) -> Result<String, ModelError> {
        match &self.source {
            Source::Gguf { architecture, .. } => Ok(architecture.clone()),
            Source::Json { root, .. } => match root.get("model_type").and_then(Value::as_str) {
                Some(name) => Ok(name.to_string()),
                None => Err(self.missing("model_type")),
            },
        }
    }

    /// Whether this is a GGUF file's.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf { .. })
    }

    /// The file or directory it is from, for errors.
    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// The JSON value of `key`, unless it is null or this is GGUF.
    pub fn json(&self, key: &str) -> Option<&'a Value> {
        match &self.source {
            Source::Json { root, text } => {
                text.get(key).or_else(|| root.get(key)).filter(|value| !value.is_null())
            }
            Source::Gguf { .. } => None,
        }
    }

    /// A size that may be absent.
    ///
    /// # Errors
    /// [`ModelError::Config`] when it is there and no size.
    pub fn optional_size(&self, json: &str, gguf: &str) -> Result<Option<usize>, ModelError> {
        match &self.source {
            Source::Json { .. } => self.json(json).map(|value| self.to_size(json, value)).transpose(),
            Source::Gguf { metadata, architecture } => {
                Ok(metadata.find::<usize>(&format!("{architecture}.{gguf}"))?)
            }
        }
    }

    /// A size.
    ///
    /// # Errors
    /// [`ModelError::ConfigMissing`], or [`ModelError::Config`] when it is zero or no size.
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
    /// [`ModelError::Config`] when it is there and no number.
    pub fn optional_float(&self, json: &str, gguf: &str) -> Result<Option<f64>, ModelError> {
        match &self.source {
            Source::Json { .. } => self.json(json).map(|value| self.to_float(json, value)).transpose(),
            Source::Gguf { metadata, architecture } => {
                Ok(metadata.find::<f64>(&format!("{architecture}.{gguf}"))?)
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

    /// A GGUF string below the architecture's name.
    ///
    /// # Errors
    /// [`ModelError::File`] when it is there and no string.
    pub fn gguf_string(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match &self.source {
            Source::Json { .. } => Ok(None),
            Source::Gguf { metadata, architecture } => {
                Ok(metadata.find::<&str>(&format!("{architecture}.{key}"))?)
            }
        }
    }

    /// A JSON flag, or `default` where it is absent.
    ///
    /// # Errors
    /// [`ModelError::Config`] when it is there and no flag.
    pub fn flag(&self, json: &str, default: bool) -> Result<bool, ModelError> {
        match self.json(json) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.refuse(json, &other.to_string(), "true or false is wanted")),
        }
    }

    /// `layer_types[layer]`, where the configuration lists them; GGUF lists which layers are recurrent.
    ///
    /// # Errors
    /// [`ModelError::Config`] when the list is too short or holds no strings, [`ModelError::File`] when GGUF's holds
    /// no bools.
    pub fn layer_type(&self, layer: usize) -> Result<Option<&'a str>, ModelError> {
        if let Source::Gguf { metadata, architecture } = &self.source {
            let key = format!("{architecture}.attention.recurrent_layers");
            let Some(recurrent) = metadata.find::<&[bool]>(&key)? else { return Ok(None) };
            return match recurrent.get(layer) {
                Some(true) => Ok(Some("linear_attention")),
                Some(false) => Ok(Some("full_attention")),
                None => {
                    let got = format!("a list of {}", recurrent.len());
                    Err(self.refuse(&key, &got, &format!("layer {layer} has no entry")))
                }
            };
        }
        let Some(types) = self.json("layer_types") else { return Ok(None) };
        let kind = types.get(layer).and_then(Value::as_str);
        let refuse =
            || self.refuse("layer_types", &types.to_string(), &format!("layer {layer} has no entry"));
        kind.map(Some).ok_or_else(refuse)
    }

    /// An object inside the configuration as a configuration of its own.
    pub fn section(&self, json: &str) -> Option<Config<'a>> {
        let section = self.json(json)?.as_object()?;
        Some(Config { path: self.path.clone(), source: Source::Json { root: section, text: section } })
    }

    /// The error for a key that must be there.
    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::ConfigMissing { path: self.path.clone(), key: key.into() }
    }

    /// The error for a value that cannot be used.
    pub fn refuse(&self, key: &str, got: &str, want: &str) -> ModelError {
        ModelError::Config { path: self.path.clone(), key: key.into(), got: got.into(), want: want.into() }
    }

    fn to_size(&self, key: &str, value: &Value) -> Result<usize, ModelError> {
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.ok_or_else(|| self.refuse(key, &value.to_string(), "a whole number is wanted"))
    }

    fn to_float(&self, key: &str, value: &Value) -> Result<f64, ModelError> {
        let float = value.as_f64().filter(|float| float.is_finite());
        float.ok_or_else(|| self.refuse(key, &value.to_string(), "a number is wanted"))
    }
}
