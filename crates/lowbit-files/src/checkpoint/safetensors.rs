//! The tensors of a directory: `model.safetensors`, or `model.safetensors.index.json` and the
//! shards that it names, or all parts of `model-00001-of-0000N.safetensors`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::foreign;
use crate::names::{INDEX, Part, SINGLE, file_names};
use crate::safetensors::{self, Safetensors};
use crate::{FileError, Tensors, shown};

/// Maps all tensors. Also returns `format` of the first file's metadata.
pub(super) fn open(directory: &Path) -> Result<(Tensors, Option<String>), FileError> {
    let index = directory.join(INDEX);
    // As in transformers, an index beside the single file is not looked at: it may describe another
    // state of the model.
    let files = if index.exists() && !directory.join(SINGLE).exists() {
        open_index(directory, &index)?
    } else {
        unindexed(directory)?.iter().map(|path| safetensors::read(path)).collect::<Result<_, _>>()?
    };
    let format = files.first().and_then(|file| file.metadata("format")).map(str::to_string);
    let tensors = Tensors::new(files.into_iter().flat_map(|file| file.tensors).collect())?;
    Ok((tensors, format))
}

/// Opens the shards that the index names, and checks that it and they agree on every tensor.
fn open_index(directory: &Path, index: &Path) -> Result<Vec<Safetensors>, FileError> {
    let mut files = Vec::new();
    for (shard, mut tensors) in read_index(index)? {
        tensors.sort_unstable();
        let path = directory.join(&shard);
        if !path.exists() {
            let tensor = tensors.swap_remove(0);
            return Err(FileError::MissingShard { index: index.into(), tensor, shard });
        }
        let file = safetensors::read(&path)?;
        let mut held: Vec<_> = file.tensors.iter().map(|view| &view.name).collect();
        held.sort_unstable();
        if let Some(tensor) = tensors.iter().find(|name| held.binary_search(name).is_err()) {
            return Err(FileError::NotInShard { index: index.into(), tensor: tensor.clone(), shard });
        }
        if let Some(tensor) = held.into_iter().find(|name| tensors.binary_search(name).is_err()) {
            return Err(FileError::NotInIndex { index: index.into(), tensor: tensor.clone(), shard });
        }
        files.push(file);
    }
    Ok(files)
}

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
fn read_index(index: &Path) -> Result<BTreeMap<String, Vec<String>>, FileError> {
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

fn unindexed(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let single = directory.join(SINGLE);
    if single.exists() {
        return Ok(vec![single]);
    }
    let names = file_names(directory, ".safetensors")?;
    match names.iter().find_map(|name| Part::parse(name).filter(|part| part.prefix == "model")) {
        Some(part) => part.paths(directory),
        None => {
            let problem = foreign::directory(directory)?;
            let problem = problem.unwrap_or_else(|| format!("holds neither {SINGLE} nor {INDEX}"));
            Err(FileError::not_a_checkpoint(directory, problem))
        }
    }
}
