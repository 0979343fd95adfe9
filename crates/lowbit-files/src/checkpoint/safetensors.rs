//! The tensors of a directory: `model.safetensors`, or `model.safetensors.index.json` and the
//! shards that it names, or all parts of `model-00001-of-0000N.safetensors`.

use std::path::{Path, PathBuf};

use super::foreign;
use super::index::read_index;
use crate::names::{INDEX, Part, SINGLE, file_names};
use crate::safetensors::{self, Safetensors};
use crate::{FileError, Tensors};

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
