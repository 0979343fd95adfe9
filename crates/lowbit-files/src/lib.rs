//! Model files as named tensor views: safetensors (single and sharded), GGUF, and Hugging Face's
//! and MLX's directories, with their configuration, tokenizer and chat template.
//!
//! [`Checkpoint::open`] is the entry point. Files are memory-mapped once and nothing is copied: a
//! [`TensorView`] holds a reference-counted range of the map. Every length and offset in a file is
//! checked before it is used, so that no file makes this crate panic or allocate more than a small
//! multiple of the file's own size.

mod chat;
mod checkpoint;
mod companion;
mod contents;
mod error;
pub mod gguf;
mod map;
pub mod names;
pub mod read;
pub mod safetensors;
mod show;
pub mod staging;
mod tensor;
mod tokenizer;

pub use chat::{ChatTemplate, Message, ToolCall};
pub use checkpoint::{
    Checkpoint, DenseModule, EmbeddingConfig, GenerationConfig, Layout, Pooling, Quantization, ScoringConfig,
    Unwritten, UnwrittenTensor, shard_names,
};
pub use companion::Companion;
pub use contents::Contents;
pub use error::FileError;
pub use map::report_cut_files;
pub use show::{Shown, shown, shown_message, shown_path};
pub use tensor::{Stored, TensorView, Tensors};
pub use tokenizer::{GgufTokenizer, SpecialTokens, TokenStream, Tokenizer};

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
