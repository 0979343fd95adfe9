//! Staging on Windows. A directory cannot be locked there, a locked file cannot be read by others,
//! and what is removed keeps its name until its last handle is closed. So a file beside the staging
//! name is the lock, and a directory is known again by its number, not by a handle.

use std::fs::{File, FileType, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::os::windows::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use winapi_util::HandleRef;

use super::super::{Kind, regular, remove};
use super::Access;
use crate::FileError;

/// Directories are opened with it alone.
const BACKUP_SEMANTICS: u32 = 0x0200_0000;
const OPEN_REPARSE_POINT: u32 = 0x0020_0000;
const DELETE_ON_CLOSE: u32 = 0x0400_0000;
const SHARING_VIOLATION: i32 = 32;

/// A file that nobody else can open, and that the system removes when it is closed, however its
/// process ends.
#[derive(Debug)]
pub struct NameLock(#[expect(dead_code, reason = "closed when it is dropped")] File);

impl NameLock {
    /// Locks the staging name `path`.
    ///
    /// # Errors
    /// [`TryLockError::WouldBlock`] if another process has the lock; those of the system.
    pub fn take(path: &Path) -> Result<Self, TryLockError> {
        let lock = PathBuf::from([path.as_os_str(), ".lock".as_ref()].join("".as_ref()));
        let mut options = File::options();
        options.read(true).write(true).create(true).share_mode(0).custom_flags(DELETE_ON_CLOSE);
        let mut turns = 0..20;
        loop {
            match options.open(&lock) {
                Ok(file) => return Ok(Self(file)),
                Err(error) if error.raw_os_error() == Some(SHARING_VIOLATION) => {
                    return Err(TryLockError::WouldBlock);
                }
                // A lock that is just being removed says so, too.
                Err(error) if error.kind() == ErrorKind::PermissionDenied && turns.next().is_some() => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(TryLockError::Error(error)),
            }
        }
    }
}

/// A file or directory that is known again.
#[derive(Debug)]
pub struct Held {
    /// `None` for a directory, and for a file that was removed.
    file: Option<File>,
    metadata: Metadata,
    identity: Identity,
}

/// The numbers of the volume and of the file in it.
type Identity = (u64, u64);

impl Held {
    /// Opens the file or directory at `path` itself, not what it links to.
    pub fn open(path: &Path, kind: Kind) -> io::Result<Self> {
        let access = if kind == Kind::File { Access::Write } else { Access::Read };
        let file = open_itself(path, access)?;
        let (metadata, identity) = (file.metadata()?, identity(&file)?);
        match kind {
            Kind::File => Ok(Self { file: Some(file), metadata, identity }),
            Kind::Directory if metadata.is_dir() => Ok(Self { file: None, metadata, identity }),
            Kind::Directory => Err(ErrorKind::NotADirectory.into()),
        }
    }

    pub fn metadata(&self) -> io::Result<Metadata> {
        Ok(self.metadata.clone())
    }

    pub fn file(&self) -> &File {
        self.file.as_ref().expect("a file is open until it is removed")
    }

    pub fn file_mut(&mut self) -> &mut File {
        self.file.as_mut().expect("a file is open until it is removed")
    }

    /// The lock is the [`NameLock`].
    pub fn try_lock(&self) -> Result<(), TryLockError> {
        Ok(())
    }

    /// True if this is what now has this path.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        match known(path, OPEN_REPARSE_POINT) {
            Ok(there) => Ok(there == self.identity),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes it from `path`.
    pub fn remove(&mut self, path: &Path) -> io::Result<()> {
        // An open file would keep its name.
        self.file = None;
        remove(path)
    }
}

fn identity(file: &File) -> io::Result<Identity> {
    let information = winapi_util::file::information(HandleRef::from_file(file))?;
    Ok((information.volume_serial_number(), information.file_index()))
}

/// The identity of what is at `path`, opened for no more than that.
fn known(path: &Path, flags: u32) -> io::Result<Identity> {
    identity(&File::options().access_mode(0).custom_flags(BACKUP_SEMANTICS | flags).open(path)?)
}

/// True if both paths exist and are one file, perhaps under two names.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    known(a, 0).is_ok_and(|a| known(b, 0).is_ok_and(|b| a == b))
}

/// Opens what is at `path` itself, not what it links to.
pub fn open_itself(path: &Path, access: Access) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(access == Access::Write);
    options.custom_flags(BACKUP_SEMANTICS | OPEN_REPARSE_POINT).open(path)
}

/// The name of a kind of file that is no regular one, no directory and no link.
pub fn special(_: FileType) -> &'static str {
    "a device"
}

/// Waits until the file's content is on the disk.
///
/// # Errors
/// Those of the system, as for a file that is open for reading alone.
pub fn sync(file: &File) -> io::Result<()> {
    file.sync_all()
}

/// [`sync`] of the regular file at `path`.
pub fn sync_path(path: &Path) -> Result<(), FileError> {
    // Syncing takes the right to write.
    match regular(path, Access::Write) {
        Ok(file) => sync(&file).map_err(FileError::io(path)),
        // The copy of a read-only file is one, and nothing syncs it.
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(error),
    }
}

/// The system has nothing that syncs a folder's entries.
pub fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// True if the system or the file system lacks what was asked for.
pub fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported
}

/// The system cannot exchange two names.
pub fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// The standard library has no renaming that replaces nothing.
pub fn no_replace(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}
