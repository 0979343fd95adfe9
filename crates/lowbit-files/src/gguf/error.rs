use lowbit_formats::FormatError;

use crate::shown;

/// An error in a GGUF file or in a key of its metadata.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum GgufError {
    #[error("no GGUF file: it begins with {0:02x?}, not with \"GGUF\"")]
    Magic(Vec<u8>),
    #[error("GGUF version {0} is not supported; supported are 2 and 3")]
    Version(u32),
    #[error("the file is big-endian (version {0:#x}); only little-endian GGUF is supported")]
    BigEndian(u32),
    #[error("{what} takes {want} bytes at offset {offset}, but only {left} are left (truncated or corrupt)", what = shown(.what))]
    Truncated { what: String, offset: usize, want: u64, left: usize },
    #[error("the file is said to have {count} {what}, of at least {each} bytes each, but only {left} bytes are left", what = shown(.what))]
    Count { what: String, count: u64, each: usize, left: usize },
    #[error("there are {count} metadata entries; at most {limit} are supported")]
    Entries { count: usize, limit: usize },
    #[error("{what} at offset {offset} is not UTF-8", what = shown(.what))]
    Utf8 { what: String, offset: usize },
    #[error("{key} is of value type {got}; the known types are 0 to 12", key = shown(.key))]
    ValueType { key: String, got: u32 },
    #[error("{key} is an array of arrays, which is not supported", key = shown(.key))]
    NestedArray { key: String },
    #[error("{key} is a bool of value {got}; it should be 0 or 1", key = shown(.key))]
    Bool { key: String, got: u8 },
    #[error("metadata key \"{}\" occurs twice", shown(.0))]
    DuplicateKey(String),
    #[error("{key} should be {want}, but is {got}", key = shown(.key), got = shown(.got))]
    Type { key: String, want: &'static str, got: String },
    #[error("metadata key {} is missing", shown(.0))]
    MissingKey(String),
    #[error("general.alignment is {0}; it should be a power of two of at most {max}", max = super::MAX_ALIGNMENT)]
    Alignment(u32),
    #[error("tensor {} occurs twice", shown(.0))]
    DuplicateTensor(String),
    #[error("tensor {tensor} has {rank} dimensions; at most {limit} are supported", tensor = shown(.tensor))]
    Rank { tensor: String, rank: u32, limit: u32 },
    #[error("tensor {tensor} is of type {got}, which is not supported; supported are {supported}", tensor = shown(.tensor), got = shown(.got))]
    TensorType { tensor: String, got: String, supported: String },
    #[error("tensor {tensor} is {stored}, for which GGUF has no type", tensor = shown(.tensor), stored = shown(.stored))]
    NoType { tensor: String, stored: String },
    #[error("tensor {tensor}: {source}", tensor = shown(.tensor))]
    Blocks { tensor: String, source: FormatError },
    #[error("tensor {tensor}, {stored} {dims:?}, takes more bytes than can be addressed", tensor = shown(.tensor), stored = shown(.stored))]
    Overflow { tensor: String, stored: String, dims: Vec<u64> },
    #[error("tensor {tensor} is at offset {offset}, which is no multiple of the alignment, {alignment}", tensor = shown(.tensor))]
    Misaligned { tensor: String, offset: u64, alignment: u32 },
    #[error("tensor {tensor}, {stored} {shape:?}, takes {want} bytes at offset {offset}, but the file holds {data} bytes of tensors", tensor = shown(.tensor), stored = shown(.stored))]
    PastEnd { tensor: String, stored: String, shape: Vec<usize>, want: usize, offset: u64, data: usize },
    #[error("tensor {tensor} begins at offset {offset}, inside tensor {before}, which ends at {end}", tensor = shown(.tensor), before = shown(.before))]
    Overlap { tensor: String, offset: usize, before: String, end: usize },
}
