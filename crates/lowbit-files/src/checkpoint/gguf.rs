//! The tensors of a GGUF model, in one file or in the parts that llama.cpp's gguf-split makes.

use std::path::{Path, PathBuf};

use crate::gguf::{self, Gguf, Metadata};
use crate::names::{Part, file_names};
use crate::{FileError, Tensors};

/// The one model's (first) file in `directory`, or `None` when it has no GGUF file.
pub(super) fn only_model(directory: &Path) -> Result<Option<PathBuf>, FileError> {
    let mut names = file_names(directory, ".gguf")?;
    // A model's vision part may lie beside it in a file of its own.
    if names.iter().any(|name| !name.starts_with("mmproj")) {
        names.retain(|name| !name.starts_with("mmproj"));
    }
    let first_parts = |name: &&String| Part::parse(name).is_none_or(|part| part.number == 1);
    let models: Vec<_> = names.iter().filter(first_parts).collect();
    match (models.as_slice(), names.first()) {
        ([model], _) => Ok(Some(directory.join(model))),
        // Only later parts: opening one says which is missing.
        ([], first) => Ok(first.map(|name| directory.join(name))),
        (several, _) => {
            let list = several.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
            let problem = format!("holds {} GGUF models ({list}); name one of them", several.len());
            Err(FileError::not_a_checkpoint(directory, problem))
        }
    }
}

/// Maps all tensors of the model in `file`, or of which `file` is one part. The metadata is the
/// first part's.
pub(super) fn open(file: &Path) -> Result<(Metadata, Tensors), FileError> {
    let Some((directory, part)) = named_part(file) else {
        let Gguf { metadata, tensors } = gguf::read(file)?;
        let count = metadata.find::<u64>(SPLIT_COUNT)?.unwrap_or(1);
        if count > 1 {
            let problem = format!(
                "is one of {count} parts, but is not named as such (model-00001-of-{count:05}.gguf), so the \
                 others cannot be found"
            );
            return Err(FileError::not_a_checkpoint(file, problem));
        }
        return Ok((metadata, Tensors::new(tensors)?));
    };
    let mut parts = Vec::new();
    for (number, path) in (1..).zip(part.paths(directory)?) {
        let gguf = gguf::read(&path)?;
        check_part(&gguf.metadata, number, part.count)?;
        parts.push(gguf);
    }
    let metadata = parts[0].metadata.clone();
    let tensors = Tensors::new(parts.into_iter().flat_map(|gguf| gguf.tensors).collect())?;
    let got = tensors.len() as u64;
    match metadata.find::<u64>("split.tensors.count")? {
        Some(want) if want != got => Err(FileError::PartTensors { file: file.into(), got, want }),
        _ => Ok((metadata, tensors)),
    }
}

const SPLIT_COUNT: &str = "split.count";

fn named_part(file: &Path) -> Option<(&Path, Part<'_>)> {
    Some((file.parent()?, Part::parse(file.file_name()?.to_str()?)?))
}

/// A part's metadata numbers it from 0, its name from 1.
fn check_part(metadata: &Metadata, want: u64, want_count: u64) -> Result<(), FileError> {
    let got = metadata.get::<u64>("split.no")?.saturating_add(1);
    let got_count = metadata.get::<u64>(SPLIT_COUNT)?;
    if (got, got_count) == (want, want_count) {
        return Ok(());
    }
    Err(FileError::Part { file: metadata.file().into(), got, got_count, want, want_count })
}
