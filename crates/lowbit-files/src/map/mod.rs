//! Memory maps of model files.

#[cfg(unix)]
mod fault;

use std::path::Path;

use bytes::Bytes;

#[cfg(unix)]
pub use fault::report_cut_files;

use crate::FileError;
use crate::checkpoint::foreign::is_pointer;
use crate::read::open_regular;

/// Does nothing where a cut file is no signal.
///
/// # Errors
/// Never.
#[cfg(not(unix))]
pub fn report_cut_files() -> std::io::Result<()> {
    Ok(())
}

/// A map, and its entry in the table of maps.
struct Map {
    /// Dropped first.
    #[cfg(unix)]
    _entry: Option<fault::Entry>,
    map: memmap2::Mmap,
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// Maps a file. Every clone and slice of the result keeps the map alive.
///
/// # Errors
/// [`FileError::Io`].
#[allow(unsafe_code)]
pub(crate) fn map(path: &Path) -> Result<Bytes, FileError> {
    let file = open_regular(path)?;
    // SAFETY: the map is private and read-only. What Rust cannot rule out is another process that writes to the file
    // or truncates it while it is mapped (a fault on access then, see `report_cut_files`); like every reader of mapped
    // weights, this one requires that model files are left alone while a model is loaded.
    let map = unsafe { memmap2::MmapOptions::new().map(&file) }.map_err(FileError::io(path))?;
    if is_pointer(&map) {
        return Err(FileError::Pointer { file: path.into() });
    }
    Ok(Bytes::from_owner(Map {
        #[cfg(unix)]
        _entry: fault::Entry::new(&map, path),
        map,
    }))
}
