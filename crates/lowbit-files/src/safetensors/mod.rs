//! safetensors: a u64 length, a JSON header of that length
//! (`{"name": {"dtype", "shape", "data_offsets"}, ...}` and an optional `__metadata__` of strings),
//! then the tensors' bytes, without holes. Little-endian.
//!
//! Source: the format's description in the `safetensors` package, 0.8. The header is parsed here
//! rather than with that crate, whose errors name neither the tensor nor the sizes.

mod error;
mod header;
#[cfg(test)]
mod tests;
mod write;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use lowbit_formats::DType;

pub use error::SafetensorsError;
pub use write::{Body, Writer};

use crate::tensor::elements_and_bytes;
use crate::{FileError, Stored, TensorView, map::map};
use header::{Entry, Header};

/// The header's entry that is no tensor.
const METADATA: &str = "__metadata__";

/// The longest header that is read, as in the `safetensors` package.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// A parsed file.
#[derive(Debug)]
pub struct Safetensors {
    /// `__metadata__`, in the file's order: `format` is `pt` or `mlx`.
    pub metadata: Vec<(String, String)>,
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<TensorView>,
}

impl Safetensors {
    /// The value of `key` in `__metadata__`.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }
}

/// Maps and parses the file at `path`.
///
/// # Errors
/// [`FileError::Io`] or [`FileError::Safetensors`].
pub fn read(path: &Path) -> Result<Safetensors, FileError> {
    parse(&map(path)?, &path.into()).map_err(FileError::safetensors(path))
}

/// Parses `bytes`, the content of `file` in errors and views.
///
/// # Errors
/// [`SafetensorsError`] for a header that is not JSON of the right form, and for tensors whose
/// bytes are past the end, overlap, leave a hole, or do not match dtype and shape.
pub fn parse(bytes: &Bytes, file: &Arc<Path>) -> Result<Safetensors, SafetensorsError> {
    let (header, data) = split(bytes)?;
    if header.first() != Some(&b'{') {
        return Err(SafetensorsError::Header(format!(
            "it begins with {:02x?}, not with '{{'",
            header.first()
        )));
    }
    let Header { metadata, mut entries } =
        serde_json::from_slice(header).map_err(|error| SafetensorsError::Header(error.to_string()))?;
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut end = 0;
    let mut tensors: Vec<TensorView> = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let [from, to] = entry.data_offsets;
        if to > data.len() {
            return Err(SafetensorsError::PastEnd { tensor: name, from, to, data: data.len() });
        }
        let stored = check(&name, &entry)?;
        if from < end {
            let before = tensors.last().map(|view| view.name.clone()).unwrap_or_default();
            return Err(SafetensorsError::Overlap { tensor: name, from, before, end });
        }
        if from > end {
            return Err(SafetensorsError::Hole { tensor: name, from, end });
        }
        end = to;
        let bytes = data.slice(from..to);
        tensors.push(TensorView {
            name,
            stored,
            shape: entry.shape,
            bytes: bytes.into(),
            file: file.clone(),
        });
    }
    if end != data.len() {
        return Err(SafetensorsError::Surplus { end, data: data.len() });
    }
    Ok(Safetensors { metadata, tensors })
}

fn split(bytes: &Bytes) -> Result<(&[u8], Bytes), SafetensorsError> {
    let Some(length) = bytes.first_chunk::<8>() else {
        return Err(SafetensorsError::Short { got: bytes.len() });
    };
    let length = u64::from_le_bytes(*length);
    let left = bytes.len() - 8;
    match usize::try_from(length) {
        Ok(length) if length <= left && length <= MAX_HEADER_BYTES => {
            Ok((&bytes[8..8 + length], bytes.slice(8 + length..)))
        }
        Ok(length) if length <= left => Err(SafetensorsError::LongHeader { length, limit: MAX_HEADER_BYTES }),
        _ => Err(SafetensorsError::Truncated { length, left }),
    }
}

fn check(name: &str, entry: &Entry) -> Result<Stored, SafetensorsError> {
    let Some(dtype) = dtype(&entry.dtype) else {
        return Err(SafetensorsError::DType { tensor: name.into(), dtype: entry.dtype.clone() });
    };
    let [from, to] = entry.data_offsets;
    let Some(got) = to.checked_sub(from) else {
        return Err(SafetensorsError::Reversed { tensor: name.into(), from, to });
    };
    let Some((_, want)) = elements_and_bytes(&entry.shape, dtype.size()) else {
        return Err(SafetensorsError::Overflow { tensor: name.into(), dtype, shape: entry.shape.clone() });
    };
    if got != want {
        let shape = entry.shape.clone();
        return Err(SafetensorsError::Size { tensor: name.into(), dtype, shape, want, got });
    }
    Ok(Stored::Plain(dtype))
}

/// The names that headers use.
const DTYPES: [(&str, DType); 16] = [
    ("BOOL", DType::Bool),
    ("U8", DType::U8),
    ("I8", DType::I8),
    ("F8_E4M3", DType::F8E4M3),
    ("F8_E5M2", DType::F8E5M2),
    ("F8_E8M0", DType::F8E8M0),
    ("I16", DType::I16),
    ("U16", DType::U16),
    ("F16", DType::F16),
    ("BF16", DType::BF16),
    ("I32", DType::I32),
    ("U32", DType::U32),
    ("F32", DType::F32),
    ("I64", DType::I64),
    ("U64", DType::U64),
    ("F64", DType::F64),
];

fn dtype(name: &str) -> Option<DType> {
    DTYPES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype)
}

fn dtype_name(dtype: DType) -> &'static str {
    let (name, _) = DTYPES.iter().find(|(_, known)| *known == dtype).expect("the list has every dtype");
    name
}
