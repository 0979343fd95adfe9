//! The paths that outputs may have. Outputs are regular files: opening a FIFO waits for its other
//! end, and a device may do anything.

use std::fs::{File, Metadata};
use std::io::{Read, Seek};
use std::path::{Component, Path, PathBuf};

use super::refuse;
use super::system::{Access, open_itself, special};
use crate::FileError;

/// The files that an output may replace: those of its own kind, so that a mistyped name costs
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// As messages call it: "a GGUF file".
    pub name: &'static str,
    /// The bytes that it begins with.
    pub begins: &'static [u8],
}

impl Content {
    /// A directory, which holds a checkpoint.
    pub const CHECKPOINT: Self = Self { name: "a checkpoint's directory", begins: b"" };
    /// A GGUF file.
    pub const GGUF: Self = Self { name: "a GGUF file", begins: b"GGUF" };

    /// Checks that the file at `path` is empty or has this content, and is a regular file, not a
    /// link to one.
    ///
    /// # Errors
    /// [`FileError::Output`]; [`FileError::Io`].
    pub fn check(&self, path: &Path) -> Result<(), FileError> {
        let file = regular(path, Access::Read)?;
        self.check_file(&file, path)
    }

    /// [`Self::check`] of an open file, whose position it changes.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn check_file(&self, mut file: &File, path: &Path) -> Result<(), FileError> {
        let mut head = vec![];
        let most = self.begins.len() as u64;
        let read = file.rewind().and_then(|()| file.take(most).read_to_end(&mut head));
        read.map_err(FileError::io(path))?;
        match head.is_empty() || head == self.begins {
            true => Ok(()),
            false => Err(refuse(path, format!("is not {}, and is not replaced", self.name))),
        }
    }
}

/// Opens a regular file without waiting: a FIFO has nobody at its other end, and a device may do
/// anything.
///
/// # Errors
/// [`FileError::Output`] for what is no regular file; [`FileError::Io`].
pub fn open_to_write(path: &Path) -> Result<File, FileError> {
    regular(path, Access::Write)
}

pub(super) fn regular(path: &Path, access: Access) -> Result<File, FileError> {
    check_regular(path, &std::fs::symlink_metadata(path).map_err(FileError::io(path))?)?;
    let file = open_itself(path, access).map_err(FileError::io(path))?;
    // It may have been replaced in between.
    check_regular(path, &file.metadata().map_err(FileError::io(path))?)?;
    Ok(file)
}

/// Checks that an output, if there is one, is a regular file.
pub(super) fn check_regular(path: &Path, metadata: &Metadata) -> Result<(), FileError> {
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_symlink() => {
            let target = std::fs::read_link(path).map_err(FileError::io(path))?;
            return Err(refuse(
                path,
                format!("is a link to {}; name a new path", crate::shown(target.display())),
            ));
        }
        () if kind.is_dir() => "a directory",
        () => special(kind),
    };
    Err(refuse(path, format!("is {what}; an output is a regular file")))
}

/// The path beside an output with `suffix` after its name; slashes that its path may end with are
/// not part of the name.
pub fn beside(output: &Path, suffix: &str) -> PathBuf {
    let name = output.file_name().unwrap_or_default();
    output.with_file_name([name, suffix.as_ref()].join("".as_ref()))
}

/// The path with links resolved. It need not exist yet: the part that exists is resolved, the rest
/// is appended. `None` where there is no working directory.
pub fn resolved(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let (existing, resolved) =
        path.ancestors().find_map(|ancestor| Some((ancestor, ancestor.canonicalize().ok()?)))?;
    let rest = path.strip_prefix(existing).ok()?;
    rest.components().try_fold(resolved, |mut resolved, component| match component {
        Component::Normal(name) => {
            resolved.push(name);
            Some(resolved)
        }
        Component::ParentDir => {
            resolved.pop();
            Some(resolved)
        }
        _ => Some(resolved),
    })
}
