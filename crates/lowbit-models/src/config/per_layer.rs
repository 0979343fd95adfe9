//! The keys of a configuration that speak of each layer.

use super::{Config, Source};
use crate::{ModelError, keys};

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
