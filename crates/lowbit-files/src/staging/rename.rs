//! The moment in which staged output gets its name.

use std::fs::TryLockError;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::system::{self, Held, exchange, is_unsupported};
use super::{Existing, Kind, refuse};
use crate::FileError;

/// The file or folder that had the final name before, and has the staging name now.
pub(super) struct Old {
    pub path: PathBuf,
    /// Locked as long as it lives.
    pub held: Held,
}

impl Old {
    /// The file or directory that is `held`, now at `path`: nothing else is removed.
    fn new(path: PathBuf, held: Held) -> Result<Self, FileError> {
        match held.is_at(&path).map_err(FileError::io(&path))? {
            true => Ok(Self { path, held }),
            false => Err(refuse(&path, "is not what was replaced, and stays")),
        }
    }
}

/// Renames `staged` to `output`. A directory that was there is returned, to be removed.
pub(super) fn into_place(
    staged: &Path,
    output: &Path,
    existing: Existing,
    kind: Kind,
) -> Result<Option<Old>, FileError> {
    if matches!(existing, Existing::Replace(_)) && kind == Kind::File {
        // This is what rename does anyway.
        return std::fs::rename(staged, output).map_err(FileError::io(output)).map(|()| None);
    }
    if existing == Existing::Refuse || std::fs::symlink_metadata(output).is_err() {
        return match no_replace(staged, output) {
            Ok(()) => Ok(None),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                Err(FileError::Exists { path: output.into() })
            }
            Err(error) => Err(FileError::io(output)(error)),
        };
    }
    let held = Held::open(output, kind).map_err(FileError::io(output))?;
    lock(output, &held)?;
    if !held.is_at(output).map_err(FileError::io(output))? {
        return Err(refuse(output, "was replaced by another process"));
    }
    match exchange(staged, output) {
        Ok(()) => Old::new(staged.into(), held).map(Some),
        Err(error) if is_unsupported(&error) => {
            aside_then_in(staged, output)?;
            Old::new(aside(staged), held).map(Some)
        }
        Err(error) => Err(FileError::io(output)(error)),
    }
}

/// Locks what is about to get the staging name: without the lock another writer would take it for a
/// leftover.
fn lock(output: &Path, held: &Held) -> Result<(), FileError> {
    for _ in 0..100 {
        match held.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
            // On file systems without locks, leftovers are not removed.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(()),
        }
    }
    Err(refuse(output, "is locked by another process"))
}

/// The name of replaced output when names cannot be exchanged.
fn aside(staged: &Path) -> PathBuf {
    [staged.as_os_str(), ".old".as_ref()].join("".as_ref()).into()
}

/// For file systems that cannot exchange: for a moment nothing has the name.
fn aside_then_in(staged: &Path, output: &Path) -> Result<(), FileError> {
    let aside = aside(staged);
    std::fs::rename(output, &aside).map_err(FileError::io(output))?;
    std::fs::rename(staged, output).map_err(|error| {
        // Back to where it was.
        let _ = std::fs::rename(&aside, output);
        FileError::io(output)(error)
    })
}

/// Renames unless `output` is there.
fn no_replace(staged: &Path, output: &Path) -> io::Result<()> {
    match system::no_replace(staged, output) {
        Err(error) if is_unsupported(&error) => look_and_rename(staged, output),
        result => result,
    }
}

/// The writers of one output exclude each other by the lock on its staging name, so only others can
/// come in between.
fn look_and_rename(staged: &Path, output: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(output) {
        Ok(_) => Err(ErrorKind::AlreadyExists.into()),
        Err(error) if error.kind() == ErrorKind::NotFound => std::fs::rename(staged, output),
        Err(error) => Err(error),
    }
}
