//! Staging on Unix: a writer locks the very file or directory that it writes.

use std::fs::{File, FileType, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::super::{Kind, regular, remove};
use super::Access;
use crate::FileError;

/// The lock on a staging name before anything has it: none, since [`Held::try_lock`] locks what
/// has the name.
#[derive(Debug)]
pub struct NameLock;

impl NameLock {
    /// # Errors
    /// Never.
    pub fn take(_: &Path) -> Result<Self, TryLockError> {
        Ok(Self)
    }
}

/// A file or directory that is known again by its open handle, and locked by it.
#[derive(Debug)]
pub struct Held(File);

impl Held {
    /// Opens the file or directory at `path` itself, not what it links to.
    pub fn open(path: &Path, kind: Kind) -> io::Result<Self> {
        let flags = match kind {
            Kind::Directory => OFlags::RDONLY | OFlags::DIRECTORY,
            Kind::File => OFlags::RDWR,
        };
        open(path, flags).map(Self)
    }

    pub fn metadata(&self) -> io::Result<Metadata> {
        self.0.metadata()
    }

    pub fn file(&self) -> &File {
        &self.0
    }

    pub fn file_mut(&mut self) -> &mut File {
        &mut self.0
    }

    pub fn try_lock(&self) -> Result<(), TryLockError> {
        self.0.try_lock()
    }

    /// True if this is what now has this path.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let open = self.0.metadata()?;
        match std::fs::symlink_metadata(path) {
            Ok(there) => Ok(identity(&there) == identity(&open)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes it from `path`. Its lock is held until it is gone, so that no other writer takes
    /// over its name.
    pub fn remove(&mut self, path: &Path) -> io::Result<()> {
        remove(path)
    }
}

/// The numbers of the file system and of the file in it.
fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// True if both paths exist and are one file, perhaps under two names.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    // Not by opening them, which would wait for a FIFO's other end.
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|file| identity(&file));
    identity(a).is_some_and(|a| Some(a) == identity(b))
}

/// Opens what is at `path` itself, not what it links to, and does not wait if it is a FIFO.
pub fn open_itself(path: &Path, access: Access) -> io::Result<File> {
    open(path, if access == Access::Write { OFlags::RDWR } else { OFlags::RDONLY })
}

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// The name of a kind of file that is no regular one, no directory and no link.
pub fn special(kind: FileType) -> &'static str {
    match () {
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () => "a device",
    }
}

/// Waits until the file's content is on the disk.
///
/// # Errors
/// Those of the system.
pub fn sync(file: &File) -> io::Result<()> {
    match file.sync_all() {
        // On macOS this asks the disk to empty its cache (F_FULLFSYNC), which network shares and
        // foreign file systems refuse; they have what fsync does.
        Err(error) if is_unsupported(&error) => Ok(rustix::fs::fsync(file)?),
        result => result,
    }
}

/// [`sync`] of the regular file at `path`.
pub fn sync_path(path: &Path) -> Result<(), FileError> {
    sync(&regular(path, Access::Read)?).map_err(FileError::io(path))
}

/// Syncs a folder's entries to the disk, where the system supports that.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder).and_then(|folder| sync(&folder)) {
        Err(error) if is_unsupported(&error) || error.kind() == ErrorKind::PermissionDenied => Ok(()),
        result => result,
    }
}

/// True if the system or the file system lacks what was asked for. Linux' file systems say INVAL or
/// OPNOTSUPP, an old kernel NOSYS; macOS says NOTSUP, which is another number there, or NOTTY.
pub fn is_unsupported(error: &io::Error) -> bool {
    let lacking = [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOTTY, Errno::NOSYS];
    let is_lacking = Errno::from_io_error(error).is_some_and(|errno| lacking.contains(&errno));
    is_lacking || error.kind() == ErrorKind::Unsupported
}

/// Exchanges two names at once.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
pub fn exchange(staged: &Path, output: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, staged, CWD, output, RenameFlags::EXCHANGE)?)
}

/// The BSDs cannot.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
pub fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Renames unless `output` is there, as one step.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
pub fn no_replace(staged: &Path, output: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, staged, CWD, output, RenameFlags::NOREPLACE)?)
}

/// The BSDs cannot.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
pub fn no_replace(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_system_lacks_is_told_from_what_failed() {
        let is = |errno: Errno| is_unsupported(&errno.into());
        assert!(
            [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOTTY, Errno::NOSYS].map(is) == [true; 5]
        );
        assert!([Errno::NOSPC, Errno::IO, Errno::ACCESS, Errno::EXIST].map(is) == [false; 4]);
        assert!(is_unsupported(&ErrorKind::Unsupported.into()));
    }

    #[test]
    fn what_cannot_be_synced_is_an_error() {
        let (read, _write) = std::io::pipe().unwrap();
        let pipe = File::from(std::os::fd::OwnedFd::from(read));
        assert_eq!(sync(&pipe).unwrap_err().raw_os_error(), Some(Errno::INVAL.raw_os_error()));
    }
}
