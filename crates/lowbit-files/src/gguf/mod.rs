//! GGUF: typed metadata, then tensor descriptions, then the tensors' bytes at aligned offsets.
//! Little-endian.
//!
//! ```text
//! "GGUF" | version u32 | tensors u64 | entries u64
//! entry:  key string | type u32 | value        string: length u64 | UTF-8; array: type u32 | count u64 | values
//! tensor: name string | rank u32 | dims u64, innermost first | ggml type u32 | offset u64 from the data's start
//! padding to general.alignment (32 when absent), then the data
//! ```
//! Source: ggml's `docs/gguf.md` and `gguf.cpp`. Versions 2 and 3 are read (they differ in nothing
//! on a little-endian machine), version 3 is written.

mod error;
mod metadata;
mod read;
#[cfg(test)]
mod tests;
mod types;
mod value;
mod write;

pub use error::GgufError;
pub use metadata::Metadata;
pub use read::{Gguf, parse, read};
pub use value::{Array, FromValue, Value, ValueType};
pub use write::{Body, Writer};

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u32 = 32;
/// ggml's tensors have no more dimensions.
const MAX_RANK: u32 = 4;
const ALIGNMENT_KEY: &str = "general.alignment";
/// A page of the largest kind is far more than any file asks for.
const MAX_ALIGNMENT: u32 = 1 << 20;

/// The alignment that the value of [`ALIGNMENT_KEY`] sets.
fn alignment(value: &Value) -> Result<u32, GgufError> {
    match *value {
        Value::U32(alignment) if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT => Ok(alignment),
        Value::U32(alignment) => Err(GgufError::Alignment(alignment)),
        ref other => Err(GgufError::Type { key: ALIGNMENT_KEY.into(), want: "a u32", got: other.describe() }),
    }
}
