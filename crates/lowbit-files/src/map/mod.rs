//! Memory maps of model files.

#[cfg(unix)]
mod fault;

use std::path::Path;

use bytes::Bytes;

#[cfg(unix)]
pub use fault::report_cut_files;

use crate::FileError;
use crate::read::{is_pointer, open_regular};

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
    // SAFETY: the map is private and read-only. What Rust cannot rule out is another process that
    // writes to the file or truncates it while it is mapped (a fault on access then, see
    // `report_cut_files`); like every reader of mapped weights, this one requires that model files
    // are left alone while a model is loaded.
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

/// So many zeros, which take up addresses and no memory.
///
/// # Errors
/// Those of the system.
pub(crate) fn zeros(len: usize) -> std::io::Result<Bytes> {
    if len == 0 {
        return Ok(Bytes::new());
    }
    let map = memmap2::MmapOptions::new().len(len).no_reserve_swap().map_anon()?;
    Ok(Bytes::from_owner(map))
}

/// Gives the memory of whole pages of a mapped file back to the system; they are read from the file
/// again when they are needed. Does nothing to bytes that are not of a map.
#[allow(unsafe_code)]
pub(crate) fn release(bytes: &[u8]) {
    #[cfg(unix)]
    if fault::contains(bytes) {
        // SAFETY: sysconf(3) reads a constant.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(1 << 16);
        let range = bytes.as_ptr_range();
        let (start, end) = (range.start.addr().next_multiple_of(page), range.end.addr() / page * page);
        if start < end {
            let start = bytes.as_ptr().wrapping_add(start - range.start.addr());
            // SAFETY: whole pages of a private, read-only map of a file, which holds the same bytes
            // when they are read again. That it failed, changes nothing.
            unsafe { libc::madvise(start.cast_mut().cast(), end - start.addr(), libc::MADV_DONTNEED) };
        }
    }
    #[cfg(not(unix))]
    let _ = bytes;
}
