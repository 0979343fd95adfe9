//! Output that has its final name only when it is whole.
//!
//! A [`Staged`] file or directory is written beside its final name, synced, and renamed. So a
//! reader finds all of it or nothing (or all of what it replaces), whatever ends the writer: an
//! error, a full disk, a signal, a loss of power.
//!
//! While it is written it is called `NAME.lowbit-partial`, and its writer holds a lock on it
//! (`flock`; on Windows, a file `NAME.lowbit-partial.lock`), which the system releases when the
//! process ends, however that happens. So a second writer of the same output is refused, and what a
//! killed one has left is recognised and removed by the next.

mod regular;
mod rename;
mod system;
#[cfg(test)]
mod tests;
mod unfinished;

use std::fs::{File, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::FileError;
use crate::names::CONFIG;
use regular::{check_regular, regular};
use system::{Held, NameLock, sync_folder, sync_path};
use unfinished::Unfinished;

pub use regular::{Content, beside, open_to_write, resolved};
pub use system::{is_same_file, sync};
pub use unfinished::remove_unfinished;

/// The rule for a final name that is already taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Nothing may.
    Refuse,
    /// A directory that holds config.json and no folders, or a regular file that is empty or is
    /// what the [`Content`] says, is replaced at once: at every moment the old or the new one is
    /// whole under the name, where the file system can exchange two names.
    Replace(Content),
}

/// Output that is being written. Dropped before [`Self::commit`], it is removed, unless it is to be
/// [continued](Self::continued).
#[derive(Debug)]
pub struct Staged {
    kind: Kind,
    existing: Existing,
    output: PathBuf,
    path: PathBuf,
    held: Held,
    /// `None` in `drop` alone.
    lock: Option<NameLock>,
    /// Folders that were made for it, the outermost first.
    made: Vec<PathBuf>,
    /// True if unfinished output stays for the next writer.
    stays: bool,
    /// For [`remove_unfinished`]; none where it stays.
    unfinished: Option<Unfinished>,
    done: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    File,
    Directory,
}

/// The end of the output's name while it is written.
pub const SUFFIX: &str = ".lowbit-partial";

impl Staged {
    /// A directory, empty for now, that will be called `output`. Folders that its path lacks are
    /// made.
    ///
    /// # Errors
    /// [`FileError::Exists`]; [`FileError::Output`] for a path that names nothing of its own, what
    /// may not be replaced, and an output that another process is writing; [`FileError::Io`].
    pub fn directory(output: &Path, existing: Existing) -> Result<Self, FileError> {
        Self::new(output, existing, Kind::Directory, false)
    }

    /// A file, empty for now, that will be called `output`; [`Self::file_handle`] writes it.
    ///
    /// # Errors
    /// As [`Self::directory`].
    pub fn file(output: &Path, existing: Existing) -> Result<Self, FileError> {
        Self::new(output, existing, Kind::File, false)
    }

    /// As [`Self::file`], but with what an earlier writer, which is gone, has written of it, for
    /// the caller to check and to go on from. Dropped before [`Self::commit`], it stays.
    ///
    /// # Errors
    /// As [`Self::directory`].
    pub fn continued(output: &Path, existing: Existing) -> Result<Self, FileError> {
        Self::new(output, existing, Kind::File, true)
    }

    /// Checks that a file of this name may be written, as [`Self::file`] does, and makes nothing.
    ///
    /// # Errors
    /// As [`Self::directory`].
    pub fn check_file(output: &Path, existing: Existing) -> Result<(), FileError> {
        check_existing(&named(output)?.0, existing, Kind::File)
    }

    /// The same for a directory.
    ///
    /// # Errors
    /// As [`Self::directory`].
    pub fn check_directory(output: &Path, existing: Existing) -> Result<(), FileError> {
        check_existing(&named(output)?.0, existing, Kind::Directory)
    }

    fn new(output: &Path, existing: Existing, kind: Kind, stays: bool) -> Result<Self, FileError> {
        let (output, [parent, name]) = named(output)?;
        check_existing(&output, existing, kind)?;
        let made = make_folders(parent)?;
        let path = parent.join([name.as_os_str(), SUFFIX.as_ref()].join("".as_ref()));
        match claim(&path, &output, kind, stays) {
            Ok((lock, held)) => {
                let unfinished = (!stays).then(|| Unfinished::add(&path, &made));
                let (lock, done) = (Some(lock), false);
                Ok(Self { kind, existing, output, path, held, lock, made, stays, unfinished, done })
            }
            Err(error) => {
                remove_folders(&made);
                Err(error)
            }
        }
    }

    /// The path under which it is written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file of [`Self::file`].
    pub fn file_handle(&mut self) -> &mut File {
        self.held.file_mut()
    }

    /// Waits until everything is on the disk, which takes longest; [`Self::commit`] is quick after
    /// it.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn sync(&self) -> Result<(), FileError> {
        match self.kind {
            Kind::File => sync(self.held.file()).map_err(FileError::io(&self.path)),
            Kind::Directory => sync_files(&self.path),
        }
    }

    /// Syncs everything and gives it its name.
    ///
    /// # Errors
    /// As [`Self::directory`]: the name may have been taken in the meantime.
    pub fn commit(mut self) -> Result<(), FileError> {
        self.sync()?;
        check_existing(&self.output, self.existing, self.kind)?;
        if !self.held.is_at(&self.path).map_err(FileError::io(&self.path))? {
            return Err(refuse(&self.path, "was moved or replaced while it was written"));
        }
        // A program that ends meanwhile either finds it unfinished or whole under its name.
        let listed = self.unfinished.take().map(Unfinished::lock);
        let old = rename::into_place(&self.path, &self.output, self.existing, self.kind)?;
        self.done = true;
        drop(listed);
        let parent = self.output.parent().unwrap_or(Path::new("."));
        sync_folder(parent).map_err(FileError::io(parent))?;
        match old {
            // Its lock is held until it is removed, so that no other writer takes over its name.
            Some(mut old) => old.held.remove(&old.path).map_err(FileError::io(&old.path)),
            None => Ok(()),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.done && !self.stays {
            // An error cannot be reported here; the next writer tries again. A file that others
            // have put in its place is not ours.
            if self.held.is_at(&self.path).unwrap_or(false) {
                let _ = self.held.remove(&self.path);
            }
            // It may be a file in those folders.
            self.lock = None;
            remove_folders(&self.made);
        }
    }
}

/// An output's path without the slashes that it may end with, its folder, and its name in there.
fn named(output: &Path) -> Result<(PathBuf, [&Path; 2]), FileError> {
    let name = output.file_name().ok_or_else(|| refuse(output, "is no name for something new"))?;
    let parent = match output.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    Ok((parent.join(name), [parent, Path::new(name)]))
}

fn refuse(path: &Path, problem: impl Into<String>) -> FileError {
    FileError::Output { path: path.into(), problem: problem.into() }
}

/// Checks that what has the final name, if anything, may be replaced.
fn check_existing(output: &Path, existing: Existing, kind: Kind) -> Result<(), FileError> {
    let metadata = match std::fs::symlink_metadata(output) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(FileError::io(output)(error)),
    };
    if metadata.is_symlink() || kind == Kind::File {
        check_regular(output, &metadata)?;
    }
    match (existing, kind) {
        (Existing::Refuse, _) => Err(FileError::Exists { path: output.into() }),
        (Existing::Replace(content), Kind::File) => content.check(output),
        (Existing::Replace(_), Kind::Directory) => check_replaceable(output, &metadata),
    }
}

/// Checks that a directory is a checkpoint, not a home directory, say.
fn check_replaceable(output: &Path, metadata: &Metadata) -> Result<(), FileError> {
    if !metadata.is_dir() {
        return Err(refuse(output, "is no directory, and is not replaced"));
    }
    let mut has_config = false;
    for entry in std::fs::read_dir(output).map_err(FileError::io(output))? {
        let entry = entry.map_err(FileError::io(output))?;
        if entry.file_type().map_err(FileError::io(output))?.is_dir() {
            let name = entry.file_name();
            if name == crate::chat::named::FOLDER && has_only_templates(&entry.path())? {
                continue;
            }
            let problem = format!(
                "holds a folder, {}, and is not replaced: remove it first",
                crate::shown(name.display())
            );
            return Err(refuse(output, problem));
        }
        has_config |= entry.file_name() == CONFIG;
    }
    match has_config {
        true => Ok(()),
        false => Err(refuse(output, "holds no config.json, so it is no checkpoint, and is not replaced")),
    }
}

/// True if `folder` holds only chat templates, as checkpoints have them.
fn has_only_templates(folder: &Path) -> Result<bool, FileError> {
    for entry in std::fs::read_dir(folder).map_err(FileError::io(folder))? {
        let path = entry.map_err(FileError::io(folder))?.path();
        if path.is_dir() || path.extension().is_none_or(|end| end != "jinja") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes the folders that `folder`'s path lacks, and returns them.
fn make_folders(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let missing =
        |folder: &&Path| !folder.as_os_str().is_empty() && std::fs::symlink_metadata(folder).is_err();
    let mut missing: Vec<&Path> = folder.ancestors().take_while(missing).collect();
    missing.reverse();
    let mut made = vec![];
    for folder in missing {
        match std::fs::create_dir(folder) {
            Ok(()) => made.push(folder.to_path_buf()),
            // Another process was faster.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                remove_folders(&made);
                return Err(FileError::io(folder)(error));
            }
        }
    }
    Ok(made)
}

/// Removes those that are empty.
fn remove_folders(made: &[PathBuf]) {
    for folder in made.iter().rev() {
        let _ = std::fs::remove_dir(folder);
    }
}

/// Makes `path` and locks it; what a writer that is gone has left there is removed first, unless it
/// `stays`.
fn claim(path: &Path, output: &Path, kind: Kind, stays: bool) -> Result<(NameLock, Held), FileError> {
    let taken = || refuse(output, format!("is being written by another process, in {}", path.display()));
    let lock = NameLock::take(path).map_err(|error| match error {
        TryLockError::WouldBlock => taken(),
        TryLockError::Error(error) => FileError::io(path)(error),
    })?;
    // Each turn but the last lost a race against another process.
    for _ in 0..100 {
        let new = match create(path, kind) {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            Err(error) => return Err(FileError::io(path)(error)),
        };
        let mut held = match Held::open(path, kind) {
            Ok(held) => held,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(FileError::io(path)(error)),
        };
        if kind == Kind::File {
            // A writer leaves files and directories behind, and nothing else.
            check_regular(path, &held.metadata().map_err(FileError::io(path))?)?;
        }
        match held.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(taken()),
            // A file system without locks: what is new here is ours, and of the rest nothing is
            // known.
            Err(TryLockError::Error(_)) if new => return Ok((lock, held)),
            Err(TryLockError::Error(_)) => {
                let problem = "was left behind, or is being written by another process: remove it if not";
                return Err(refuse(path, problem));
            }
        }
        if !held.is_at(path).map_err(FileError::io(path))? {
            continue;
        }
        if new || stays {
            return Ok((lock, held));
        }
        held.remove(path).map_err(FileError::io(path))?;
    }
    Err(refuse(output, "is being written by other processes"))
}

fn create(path: &Path, kind: Kind) -> io::Result<()> {
    match kind {
        Kind::Directory => std::fs::create_dir(path),
        Kind::File => File::create_new(path).map(|_| ()),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path)?.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    }
}

/// Syncs a folder and all files and folders below it to the disk.
fn sync_files(folder: &Path) -> Result<(), FileError> {
    for entry in std::fs::read_dir(folder).map_err(FileError::io(folder))? {
        let entry = entry.map_err(FileError::io(folder))?;
        let path = entry.path();
        match entry.file_type().map_err(FileError::io(&path))?.is_dir() {
            true => sync_files(&path)?,
            false => sync_path(&path)?,
        }
    }
    sync_folder(folder).map_err(FileError::io(folder))
}
