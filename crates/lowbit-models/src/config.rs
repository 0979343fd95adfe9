use crate::ModelError;
use crate::arch::{self, Architecture, ModelType};
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
            let experts = metadata.find::<usize>(&format!("{architecture}.expert_count"))?;
            let found = arch::gguf(&architecture, experts.is_some_and(|experts| experts > 0));
            let tables = found.map_or(&[][..], |found| found.gguf_keys);
            return Ok(Self { path, source: Source::Gguf { metadata, architecture, tables }, found });
        }
        let root = object(&path, "config.json", checkpoint.config()?)?;
        let model_type = root.get("model_type").and_then(Value::as_str);
        let nested = root.get("text_config").filter(|text| !text.is_null());
        let inner = nested.and_then(|text| text.get("model_type")).and_then(Value::as_str);
        let found = model_type.and_then(|name| arch::model_type(name, inner));
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

    /// The kind of layer `layer` of `layers` where the configuration lists kinds: one of `kinds`.
    /// transformers' older names are read as the newer ones. GGUF lists the recurrent layers.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a list of another length, and when it holds other kinds;
    /// [`ModelError::File`] when GGUF's holds no bools.
    pub fn layer_type(
        &self,
        layer: usize,
        layers: usize,
        kinds: &[&'static str],
    ) -> Result<Option<&'static str>, ModelError> {
        if let Source::Gguf { metadata, tables, .. } = &self.source {
            let name = "attention.recurrent_layers";
            if keys::role(tables, name).is_none() {
                return Ok(None);
            }
            let key = self.gguf_key(name);
            let Some(recurrent) = metadata.find::<&[bool]>(&key)? else { return Ok(None) };
            return match recurrent.get(layer) {
                Some(true) => Ok(Some("linear_attention")),
                Some(false) => Ok(Some("full_attention")),
                None => {
                    let want = format!("layer {layer} has no entry");
                    Err(self.refuse(&key, &format!("{} entries", recurrent.len()), &want))
                }
            };
        }
        let Some(types) = self.json("layer_types")? else { return Ok(None) };
        let list = types
            .as_array()
            .ok_or_else(|| self.refuse("layer_types", &types.to_string(), "a list is wanted"))?;
        if list.len() != layers {
            let want = format!("num_hidden_layers is {layers}");
            return Err(self.refuse("layer_types", &format!("a list of {}", list.len()), &want));
        }
        let kind = match list[layer].as_str() {
            Some("attention") => Some("full_attention"),
            Some("mamba") => Some("linear_attention"),
            kind => kind,
        };
        match kinds.iter().copied().find(|&known| Some(known) == kind) {
            Some(kind) => Ok(Some(kind)),
            None => {
                let want = format!("this architecture has {}", kinds.join(" and "));
                Err(self.refuse(&format!("layer_types[{layer}]"), &list[layer].to_string(), &want))
            }
        }
    }

    /// A GGUF list of flags, one per layer, or the length of a pattern of which the last layer's
    /// flag alone is false; `length` is llama.cpp's.
    ///
    /// # Errors
    /// [`ModelError::File`] when it is there and neither; [`ModelError::Config`] for a list of
    /// another length.
    pub fn gguf_pattern(&self, gguf: &str, length: usize, layers: usize) -> Result<Vec<bool>, ModelError> {
        let Source::Gguf { metadata, .. } = &self.source else { return Ok(vec![]) };
        let key = self.gguf_key(gguf);
        if let Ok(Some(flags)) = metadata.find::<&[bool]>(&key) {
            return match flags.len() == layers {
                true => Ok(flags.to_vec()),
                false => {
                    let want = format!("there are {layers} layers");
                    Err(self.refuse(&key, &format!("a list of {}", flags.len()), &want))
                }
            };
        }
        let length = metadata.find::<usize>(&key)?.unwrap_or(length);
        Ok((1..=layers).map(|n| length > 0 && !n.is_multiple_of(length)).collect())
    }

    /// A GGUF array of whole numbers.
    ///
    /// # Errors
    /// [`ModelError::File`] when it is present but not such an array.
    pub fn gguf_sizes(&self, gguf: &str) -> Result<Option<Vec<usize>>, ModelError> {
        match &self.source {
            Source::Json { .. } => Ok(None),
            Source::Gguf { metadata, .. } => Ok(metadata.find::<Vec<usize>>(&self.gguf_key(gguf))?),
        }
    }

    /// A GGUF number of each layer, where the file lists them; `None` where it has one for all, or
    /// none.
    ///
    /// # Errors
    /// As [`Self::gguf_sizes`].
    pub fn gguf_layers(&self, gguf: &str) -> Result<Option<Vec<usize>>, ModelError> {
        match self.optional_size("", gguf) {
            Err(_) => self.gguf_sizes(gguf),
            Ok(_) => Ok(None),
        }
    }

    /// Key heads of layers with attention. GGUF may list them by layer, those without having none.
    ///
    /// # Errors
    /// As [`Self::optional_size`]; [`ModelError::Config`] for layers with different numbers.
    pub fn key_heads(&self) -> Result<Option<usize>, ModelError> {
        let key = "attention.head_count_kv";
        let listed = if self.is_gguf() { self.gguf_layers(key)? } else { None };
        let Some(listed) = listed else { return self.optional_size("num_key_value_heads", key) };
        let mut heads = listed.iter().copied().filter(|&heads| heads > 0);
        let first = heads.next();
        match heads.find(|&other| Some(other) != first) {
            None => Ok(first),
            Some(_) => {
                let want = "all layers with attention have one number here";
                Err(self.refuse(key, &format!("{listed:?}"), want))
            }
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

    /// `rope_parameters` or `rope_scaling` as a configuration of its own; `None` when it is absent
    /// or empty.
    ///
    /// # Errors
    /// [`ModelError::Config`] when it is not an object.
    pub fn section(&self, json: &str) -> Result<Option<Config<'a>>, ModelError> {
        let Source::Json { text, model_type, layout, .. } = self.source else { return Ok(None) };
        let Some(value) = text.get(json).filter(|value| !value.is_null()) else { return Ok(None) };
        let section =
            value.as_object().ok_or_else(|| self.refuse(json, &value.to_string(), "an object is wanted"))?;
        let source = Source::Json { text: section, tables: &[ROPE], wrapper: None, model_type, layout };
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

    /// Refuses values that the peers compute with and lowbit does not.
    ///
    /// # Errors
    /// [`ModelError::Config`], which names the key, its value and the supported values.
    pub fn check(&self) -> Result<(), ModelError> {
        self.each(&mut |key, role, value| {
            let Some(Role::Only(values)) = role else { return Ok(()) };
            let accepted = match value {
                Found::Json(value) => value.is_null() || values.iter().any(|fixed| fixed.is(value)),
                Found::Gguf(metadata) => {
                    let matches = values.iter().map(|fixed| fixed.is_in(metadata, key));
                    matches.collect::<Result<Vec<_>, _>>()?.contains(&true)
                }
            };
            let got = || match value {
                Found::Json(value) => value.to_string(),
                Found::Gguf(metadata) => {
                    metadata.value(key).map_or(String::new(), |value| format!("{value:?}"))
                }
            };
            let want = || format!("only {} is supported", keys::listed(values));
            if accepted { Ok(()) } else { Err(self.refuse(key, &got(), &want())) }
        })?;
        self.check_text_type()
    }

    /// Refuses the text part of one architecture inside another one's wrapper.
    fn check_text_type(&self) -> Result<(), ModelError> {
        let Source::Json { text, wrapper: Some(_), model_type: Some(outer), .. } = &self.source else {
            return Ok(());
        };
        let Some(inner) = text.get("model_type").filter(|inner| !inner.is_null()) else { return Ok(()) };
        let architecture =
            |name: &str| arch::model_type(name, None).map(|(found, _)| std::ptr::from_ref(found));
        let inner_name = inner.as_str();
        if inner_name.and_then(architecture) == architecture(outer)
            || self.found.is_some_and(|found| found.has_text_type(inner_name))
        {
            return Ok(());
        }
        let want = format!("model_type is {outer}");
        Err(self.refuse("text_config.model_type", &inner.to_string(), &want))
    }

    /// The keys that are in no table, in the spelling of errors: lowbit does not know what they
    /// change. None for an unknown architecture.
    pub fn unknown_keys(&self) -> Vec<String> {
        let mut unknown = vec![];
        let collected = self.each(&mut |key, role, value| {
            if role.is_none() && !matches!(value, Found::Json(Value::Null)) {
                unknown.push(shown(key).to_string());
            }
            Ok(())
        });
        debug_assert!(collected.is_ok());
        unknown
    }

    /// Calls `visit` for each key at the top, in `text_config` and in the objects for the rotary
    /// embedding.
    fn each(&self, visit: &mut Visit<'_>) -> Result<(), ModelError> {
        match &self.source {
            Source::Gguf { tables: [], .. } | Source::Json { tables: [], .. } => Ok(()),
            Source::Gguf { metadata, architecture, tables } => {
                let below = format!("{architecture}.");
                for (key, _) in metadata.iter() {
                    if let Some(name) = key.strip_prefix(&below) {
                        visit(key, keys::role(tables, name), Found::Gguf(metadata))?;
                    }
                }
                Ok(())
            }
            Source::Json { text, tables, wrapper, .. } => {
                for (key, value) in wrapper.iter().copied().flatten() {
                    visit(key, keys::role(&[keys::WRAPPER, keys::BASE], key), Found::Json(value))?;
                }
                let below = if wrapper.is_some() { "text_config." } else { "" };
                for (key, value) in *text {
                    visit(&format!("{below}{key}"), keys::role(tables, key), Found::Json(value))?;
                    if !["rope_parameters", "rope_scaling"].contains(&key.as_str()) {
                        continue;
                    }
                    // Some architectures have one for each kind of layer.
                    let kinds = matches!(keys::role(tables, "rope_local_base_freq"), Some(Role::Computed(_)));
                    for (inner, value) in value.as_object().into_iter().flatten() {
                        let name = format!("{below}{key}.{inner}");
                        match value.as_object().filter(|_| kinds) {
                            None => visit(&name, keys::role(&[ROPE], inner), Found::Json(value))?,
                            Some(nested) => {
                                for (inner, value) in nested {
                                    let name = format!("{name}.{inner}");
                                    visit(&name, keys::role(&[ROPE], inner), Found::Json(value))?;
                                }
                            }
                        }
                    }
                }
                Ok(())
            }
        }
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

/// Takes a key, its role and its value.
type Visit<'v> = dyn FnMut(&str, Option<Role>, Found<'_>) -> Result<(), ModelError> + 'v;

/// A value that [`Config::each`] came to.
enum Found<'a> {
    Json(&'a Value),
    Gguf(&'a gguf::Metadata),
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
