//! Reads small files whole: regular files only, up to a size limit per kind.

use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::path::Path;

use crate::FileError;

/// The most bytes that a file of each kind may have: several times the largest published one, and
/// little enough that parsing it cannot take a machine's memory.
pub mod limit {
    /// config.json and the other settings; the largest list how each module is quantised.
    pub const CONFIG: u64 = 16 << 20;
    /// model.safetensors.index.json: a line for each tensor.
    pub const INDEX: u64 = 64 << 20;
    /// tokenizer.json.
    pub const TOKENIZER: u64 = 128 << 20;
    /// A chat template.
    pub const TEMPLATE: u64 = lowbit_jinja::MAX_SOURCE as u64;
    /// The weights of a linear layer behind pooling.
    pub const MODULE: u64 = 256 << 20;
    /// A text that the user names, to be read whole.
    pub const TEXT: u64 = 256 << 20;
}

/// Opens a regular file, or a link to one: opening a FIFO waits for a writer, and reading a device
/// may never end.
///
/// # Errors
/// [`FileError::Io`].
pub fn open_regular(path: &Path) -> Result<File, FileError> {
    let refuse = || {
        let source = Error::new(ErrorKind::InvalidInput, "not a regular file");
        FileError::Io { file: path.into(), source }
    };
    if !std::fs::metadata(path).map_err(FileError::io(path))?.is_file() {
        return Err(refuse());
    }
    let file = File::open(path).map_err(FileError::io(path))?;
    // It may have been replaced in between.
    match file.metadata().map_err(FileError::io(path))?.is_file() {
        true => Ok(file),
        false => Err(refuse()),
    }
}

/// All bytes of a regular file of at most `limit` bytes.
///
/// # Errors
/// [`FileError::Io`] and [`FileError::TooLarge`].
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let file = open_regular(path)?;
    let length = file.metadata().map_err(FileError::io(path))?.len();
    let too_large = |bytes| FileError::TooLarge { file: path.into(), bytes, limit };
    if length > limit {
        return Err(too_large(length));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // The file may have grown since, and those of /proc have no length.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(FileError::io(path))?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    if is_pointer(&bytes) {
        return Err(FileError::Pointer { file: path.into() });
    }
    Ok(bytes)
}

/// True if these are the bytes of a git-lfs pointer, which stands for a file in a clone that has
/// not fetched it.
pub(crate) fn is_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs.github.com/spec/") && bytes.len() < 1024
}

/// The most values in a JSON file: a value takes up to a hundred times its bytes in memory, so that
/// their number counts, not the file's size. The largest published configuration (of 6,000 added
/// tokens) has a quarter.
const VALUES: usize = 1 << 19;

/// The JSON value of `bytes`, which are in `file`.
///
/// # Errors
/// [`FileError::Json`], also for more values than any configuration has.
pub fn json(bytes: &[u8], file: &Path) -> Result<serde_json::Value, FileError> {
    // Those in strings are counted, too: no configuration has as many. An object takes as much as
    // several numbers.
    let weight = |&byte: &u8| match byte {
        b',' | b'[' | b':' => 1,
        b'{' => 4,
        _ => 0,
    };
    if bytes.iter().map(weight).sum::<usize>() > VALUES {
        let error = serde::de::Error::custom(format_args!("it has more than {VALUES} values and brackets"));
        return Err(FileError::json(file)(error));
    }
    serde_json::from_slice(bytes).map_err(FileError::json(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_up_to_their_limit_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        let error = read(&path, 4).unwrap_err().to_string();
        assert!(error.ends_with("config.json: has 5 bytes; at most 4 are read"), "{error}");
        assert!(read(folder.path(), 5).unwrap_err().to_string().contains("not a regular file"));
    }

    #[cfg(unix)]
    #[test]
    fn devices_and_pipes_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("zero");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert!(read(&link, 100).unwrap_err().to_string().contains("not a regular file"));
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(read(&pipe, 100).unwrap_err().to_string().contains("not a regular file"));
    }
}
