//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use crate::{FileError, shown};

#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// The tensors of each shard, or the first entry whose shard cannot be one. Shards' names are kept
/// once each: a file may say anything, and its memory is to stay a small multiple of its size.
#[derive(Default)]
struct WeightMap {
    shards: BTreeMap<String, Vec<String>>,
    refused: Option<(String, String)>,
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map from strings to strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<WeightMap, A::Error> {
        let mut map = WeightMap::default();
        while let Some((tensor, shard)) = entries.next_entry::<String, String>()? {
            // A bare name: an index must not reach out of its directory, nor name itself.
            if !shard.ends_with(".safetensors") || shard.contains(['/', '\\', '\0']) {
                map.refused.get_or_insert((tensor, shard));
            } else if map.refused.is_none() {
                map.shards.entry(shard).or_default().push(tensor);
            }
        }
        let mut names: Vec<&str> = map.shards.values().flatten().map(String::as_str).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(A::Error::custom(format_args!("{} occurs twice", shown(pair[0])))),
            None => Ok(map),
        }
    }
}

/// The tensors that each shard should hold.
pub(super) fn read_index(index: &Path) -> Result<BTreeMap<String, Vec<String>>, FileError> {
    let bytes = crate::read::read(index, crate::read::limit::INDEX)?;
    let Index { weight_map } = serde_json::from_slice(&bytes).map_err(FileError::json(index))?;
    match weight_map.refused {
        Some((tensor, shard)) => Err(FileError::ShardName { index: index.into(), tensor, shard }),
        None => Ok(weight_map.shards),
    }
}

/// The names of the shards that the index in this file names: plain names that end in .safetensors.
///
/// # Errors
/// [`FileError::Io`], [`FileError::TooLarge`], [`FileError::Json`] and [`FileError::ShardName`].
pub fn shard_names(index: &Path) -> Result<Vec<String>, FileError> {
    Ok(read_index(index)?.into_keys().collect())
}
