use std::path::{Path, PathBuf};

use crate::gguf::GgufError;
use crate::safetensors::SafetensorsError;
use crate::shown_message;

/// What can be wrong with a model's files. Every variant names the file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FileError {
    #[error("{}: {source}", file.display())]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{}: has {bytes} bytes; at most {limit} are read", file.display())]
    TooLarge { file: PathBuf, bytes: u64, limit: u64 },
    #[error("{}: is a git-lfs pointer, not the file itself: `git lfs pull` in its directory fetches that", file.display())]
    Pointer { file: PathBuf },
    #[error("{}: {source}", file.display())]
    Safetensors { file: PathBuf, source: Box<SafetensorsError> },
    #[error("{}: {source}", file.display())]
    Gguf { file: PathBuf, source: Box<GgufError> },
    #[error("{}: not the JSON that it should be: {source}", file.display())]
    Json { file: PathBuf, source: serde_json::Error },
    #[error("{}: {key} should be {want}, but is {got}", file.display())]
    Value { file: PathBuf, key: String, want: &'static str, got: String },
    #[error("{}: {key} is missing", file.display())]
    Missing { file: PathBuf, key: String },
    #[error("{}: {problem}", path.display())]
    NotACheckpoint { path: PathBuf, problem: String },
    #[error("{}: tensor {tensor} is said to be in {shard:?}, which is no file name ending in .safetensors", index.display())]
    ShardName { index: PathBuf, tensor: String, shard: String },
    #[error("{}: shard {shard} is missing; tensor {tensor} is in it", index.display())]
    MissingShard { index: PathBuf, tensor: String, shard: String },
    #[error("{}: tensor {tensor} is not in {shard}, where the index says that it is", index.display())]
    NotInShard { index: PathBuf, tensor: String, shard: String },
    #[error("{}: tensor {tensor} is in {shard}, but not in the index", index.display())]
    NotInIndex { index: PathBuf, tensor: String, shard: String },
    #[error("tensor {tensor} is both in {} and in {}", first.display(), second.display())]
    DuplicateTensor { tensor: String, first: PathBuf, second: PathBuf },
    #[error("{}: part {number} of {count} is missing: {}", first.display(), part.display())]
    MissingPart { first: PathBuf, part: PathBuf, number: u64, count: u64 },
    #[error("{}: the file says it is part {got} of {got_count}, but its name says part {want} of {want_count}", file.display())]
    Part { file: PathBuf, got: u64, got_count: u64, want: u64, want_count: u64 },
    #[error("{}: {got} tensors in all parts, but split.tensors.count is {want}", file.display())]
    PartTensors { file: PathBuf, got: u64, want: u64 },
    #[error("{}: {method} quantization is not supported; supported are {supported}. Take the model in one of these, or quantize the unquantized original with `lowbit quantize`", file.display())]
    Quantization { file: PathBuf, method: String, supported: &'static str },
    #[error("{model}: {problem}")]
    NoSuchModel { model: String, problem: String },
    #[error("{model}: there is no such path, and the hub's model cannot be downloaded: {what}: {problem}")]
    Download { model: String, what: String, problem: String },
    #[error("{}: chat template: {problem}", file.display())]
    Template { file: PathBuf, problem: String },
    #[error("{}: tokenizer: {problem}", file.display())]
    Tokenizer { file: PathBuf, problem: String },
    #[error("{} exists already; name a new path, or replace it (--force)", path.display())]
    Exists { path: PathBuf },
    #[error("{}: {problem}", path.display())]
    Output { path: PathBuf, problem: String },
    #[error("{}: leads to {}, outside of the checkpoint; what is copied has to lie in it", file.display(), target.display())]
    Outside { file: PathBuf, target: PathBuf },
    #[error("{}: token id {id} has no token; the vocabulary has {vocab_size}", file.display())]
    TokenId { file: PathBuf, id: u32, vocab_size: usize },
}

impl FileError {
    pub(crate) fn io(file: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { file: file.into(), source }
    }

    pub(crate) fn json(file: &Path) -> impl FnOnce(serde_json::Error) -> Self + '_ {
        move |source| Self::Json { file: file.into(), source }
    }

    pub(crate) fn safetensors(file: &Path) -> impl FnOnce(SafetensorsError) -> Self + '_ {
        move |source| Self::Safetensors { file: file.into(), source: Box::new(source) }
    }

    pub(crate) fn gguf(file: &Path) -> impl FnOnce(GgufError) -> Self + '_ {
        move |source| Self::Gguf { file: file.into(), source: Box::new(source) }
    }

    pub(crate) fn tokenizer(file: &Path, problem: impl std::fmt::Display) -> Self {
        Self::Tokenizer { file: file.into(), problem: shown_message(problem, 1000).to_string() }
    }

    pub(crate) fn not_a_checkpoint(path: &Path, problem: impl Into<String>) -> Self {
        Self::NotACheckpoint { path: path.into(), problem: problem.into() }
    }
}
