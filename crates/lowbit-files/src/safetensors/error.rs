use lowbit_formats::DType;

use crate::shown;

/// An error in a safetensors file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum SafetensorsError {
    #[error("no safetensors file: it has {got} bytes, and the header's length alone takes 8")]
    Short { got: usize },
    #[error(
        "the header is said to take {length} bytes, but only {left} are left (truncated, or not safetensors)"
    )]
    Truncated { length: u64, left: usize },
    #[error("the header takes {length} bytes, more than the {limit} that are accepted")]
    LongHeader { length: usize, limit: usize },
    #[error("the header is not as it should be: {}", shown(.0))]
    Header(String),
    #[error("tensor {tensor} is of dtype \"{dtype}\", which is not supported; supported are {}", dtypes(), tensor = shown(.tensor), dtype = shown(.dtype))]
    DType { tensor: String, dtype: String },
    #[error("tensor name {tensor} is taken", tensor = shown(.tensor))]
    Name { tensor: String },
    #[error("tensor {tensor}, {dtype} {shape:?}, takes more bytes than can be addressed", tensor = shown(.tensor))]
    Overflow { tensor: String, dtype: DType, shape: Vec<usize> },
    #[error("tensor {tensor}, {dtype} {shape:?}, takes {want} bytes, but its data_offsets span {got}", tensor = shown(.tensor))]
    Size { tensor: String, dtype: DType, shape: Vec<usize>, want: usize, got: usize },
    #[error("tensor {tensor} ends at offset {to}, before it begins, at {from}", tensor = shown(.tensor))]
    Reversed { tensor: String, from: usize, to: usize },
    #[error("tensor {tensor} lies at {from}..{to}, but the file holds {data} bytes of tensors", tensor = shown(.tensor))]
    PastEnd { tensor: String, from: usize, to: usize, data: usize },
    #[error("tensor {tensor} begins at offset {from}, inside tensor {before}, which ends at {end}", tensor = shown(.tensor), before = shown(.before))]
    Overlap { tensor: String, from: usize, before: String, end: usize },
    #[error("tensor {tensor} begins at offset {from}, but the one before it ends at {end}", tensor = shown(.tensor))]
    Hole { tensor: String, from: usize, end: usize },
    #[error("the tensors end at offset {end}, but the file holds {data} bytes of tensors")]
    Surplus { end: usize, data: usize },
}

fn dtypes() -> String {
    super::DTYPES.map(|(name, _)| name).join(", ")
}
