use std::path::Path;

use bytes::Bytes;

use crate::FileError;
use crate::checkpoint::foreign::is_pointer;
use crate::read::open_regular;

/// Maps a file. Every clone and slice of the result keeps the map alive.
///
/// # Errors
/// [`FileError::Io`].
#[allow(unsafe_code)]
pub(crate) fn map(path: &Path) -> Result<Bytes, FileError> {
    let file = open_regular(path)?;
    // SAFETY: the map is private and read-only. What Rust cannot rule out is another process that writes to the file
    // or truncates it while it is mapped (a fault on access then); like every reader of mapped weights, this one
    // requires that model files are left alone while a model is loaded.
    let map = unsafe { memmap2::MmapOptions::new().map(&file) }.map_err(FileError::io(path))?;
    if is_pointer(&map) {
        return Err(FileError::Pointer { file: path.into() });
    }
    Ok(Bytes::from_owner(map))
}
