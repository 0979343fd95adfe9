//! The keys of a configuration that speak of each layer.

use super::{Config, Source};
use crate::{ModelError, keys};
use serde_json::Value;

impl Config<'_> {
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

    /// The kinds of all `layers` layers that a list of `config.json` says: one of `kinds` each.
    /// `None` where it is absent.
    ///
    /// # Errors
    /// [`ModelError::Config`] for no list, one of another length, and other kinds.
    pub fn kinds(
        &self,
        json: &str,
        layers: usize,
        kinds: &[&'static str],
    ) -> Result<Option<Vec<&'static str>>, ModelError> {
        let Some(value) = self.json(json)? else { return Ok(None) };
        let list =
            value.as_array().ok_or_else(|| self.refuse(json, &value.to_string(), "a list is wanted"))?;
        if list.len() != layers {
            let want = format!("num_hidden_layers is {layers}");
            return Err(self.refuse(json, &format!("a list of {}", list.len()), &want));
        }
        let kind = |(layer, kind): (usize, &serde_json::Value)| {
            let known = kinds.iter().copied().find(|&known| kind.as_str() == Some(known));
            known.ok_or_else(|| {
                let want = format!("this architecture has {}", kinds.join(" and "));
                self.refuse(&format!("{json}[{layer}]"), &kind.to_string(), &want)
            })
        };
        list.iter().enumerate().map(kind).collect::<Result<_, _>>().map(Some)
    }

    /// The size `key` of layer `layer` where `per_layer_config` has one, which may list these
    /// `keys` alone.
    ///
    /// # Errors
    /// [`ModelError::Config`] for other keys and values.
    pub fn of_layer(&self, layer: usize, key: &str, keys: &[&str]) -> Result<Option<usize>, ModelError> {
        let name = format!("per_layer_config.{layer}");
        let Some(all) = self.json("per_layer_config")? else { return Ok(None) };
        let Some(own) = all.get(layer.to_string()).filter(|own| !own.is_null()) else { return Ok(None) };
        let own =
            own.as_object().ok_or_else(|| self.refuse(&name, &own.to_string(), "an object is wanted"))?;
        if let Some(other) = own.keys().find(|other| !keys.contains(&other.as_str())) {
            return Err(self.refuse(&name, other, &format!("only {} are supported", keys.join(" and "))));
        }
        own.get(key).map(|size| self.to_size(&format!("{name}.{key}"), size)).transpose()
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

    /// The kind of each layer of models whose layers are one part: `M` for Mamba-2, `*` for
    /// attention, `-` for an MLP, `E` for experts. `None` where an architecture has no such list.
    ///
    /// # Errors
    /// As [`Self::json`] and [`Self::gguf_layers`]; [`ModelError::Config`] for other kinds, and for
    /// two lists that differ.
    pub fn layer_letters(&self) -> Result<Option<Vec<char>>, ModelError> {
        if self.is_gguf() {
            return self.gguf_letters().map(Some);
        }
        let (pattern, types) = ("hybrid_override_pattern", "layers_block_type");
        if !self.computes(pattern) {
            return Ok(None);
        }
        let letters = match self.text(pattern, "")? {
            None => None,
            Some(letters) => match letters.chars().find(|letter| !['M', '*', '-', 'E'].contains(letter)) {
                None => Some(letters.chars().collect::<Vec<_>>()),
                Some(other) => {
                    return Err(self.refuse(pattern, &other.to_string(), "layers are M, *, - and E"));
                }
            },
        };
        let listed = match self.json(types)?.as_deref() {
            None => None,
            Some(Value::Array(kinds)) => {
                let letter = |kind: &Value| match kind.as_str() {
                    Some("mamba" | "linear_attention") => Ok('M'),
                    Some("attention" | "full_attention") => Ok('*'),
                    Some("mlp") => Ok('-'),
                    Some("moe") => Ok('E'),
                    _ => {
                        let want = "this architecture has linear_attention, full_attention, mlp and moe";
                        Err(self.refuse(types, &kind.to_string(), want))
                    }
                };
                Some(kinds.iter().map(letter).collect::<Result<Vec<_>, _>>()?)
            }
            Some(other) => return Err(self.refuse(types, &other.to_string(), "a list is wanted")),
        };
        match (letters, listed) {
            (Some(letters), Some(listed)) if letters != listed => {
                let got: String = letters.into_iter().collect();
                Err(self.refuse(pattern, &got, "layers_block_type says otherwise"))
            }
            (letters, listed) => Ok(letters.or(listed)),
        }
    }

    /// The same of a GGUF file: layers with key heads attend, and those with rows of an MLP are
    /// one.
    fn gguf_letters(&self) -> Result<Vec<char>, ModelError> {
        let layers = self.size("", "block_count")?;
        let each = |key: &str| match self.gguf_layers(key)? {
            None => Ok(vec![self.optional_size("", key)?.unwrap_or(0); layers]),
            Some(list) if list.len() == layers => Ok(list),
            Some(list) => {
                let want = format!("there are {layers} layers");
                Err(self.refuse(key, &format!("a list of {}", list.len()), &want))
            }
        };
        let (heads, rows) = (each("attention.head_count_kv")?, each("feed_forward_length")?);
        let mlp = if self.computes("expert_count") { 'E' } else { '-' };
        let letter = |(heads, rows): (usize, usize)| match (heads, rows) {
            (_, 1..) => mlp,
            (1.., _) => '*',
            _ => 'M',
        };
        Ok(heads.into_iter().zip(rows).map(letter).collect())
    }

    /// The number of layers, which a list of their kinds may say alone.
    ///
    /// # Errors
    /// As [`Self::size`] and [`Self::layer_letters`]; [`ModelError::Config`] where the two differ.
    pub fn layer_count(&self) -> Result<usize, ModelError> {
        let key = "num_hidden_layers";
        let listed = if self.is_gguf() { None } else { self.layer_letters()? };
        let Some(listed) = listed.map(|letters| letters.len()) else { return self.size(key, "block_count") };
        match self.optional_size(key, "")? {
            Some(count) if count != listed => {
                let want = format!("there are {listed} kinds of layers");
                Err(self.refuse(key, &count.to_string(), &want))
            }
            _ if listed == 0 => Err(self.refuse("layers_block_type", "empty", "a layer is wanted")),
            _ => Ok(listed),
        }
    }

    /// The largest of a GGUF file's numbers of each layer, or its one number for all.
    ///
    /// # Errors
    /// As [`Self::gguf_layers`] and [`Self::size`].
    pub fn gguf_largest(&self, gguf: &str) -> Result<usize, ModelError> {
        match self.gguf_layers(gguf)? {
            None => self.size("", gguf),
            Some(list) => Ok(list.into_iter().max().unwrap_or(0)),
        }
    }

    /// For each layer of a GGUF file, true if it attends: others have no key heads.
    ///
    /// # Errors
    /// As [`Self::gguf_layers`]; [`ModelError::Config`] for a list of another length.
    pub fn gguf_attends(&self, layers: usize) -> Result<Vec<bool>, ModelError> {
        let key = "attention.head_count_kv";
        let Some(heads) = self.gguf_layers(key)? else { return Ok(vec![true; layers]) };
        match heads.len() == layers {
            true => Ok(heads.iter().map(|&heads| heads > 0).collect()),
            false => {
                let want = format!("there are {layers} layers");
                Err(self.refuse(key, &format!("a list of {}", heads.len()), &want))
            }
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
}
