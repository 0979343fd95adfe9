use std::path::{Path, PathBuf};

use lowbit_formats::FormatError;

use crate::gguf::GgufError;
use crate::safetensors::SafetensorsError;
use crate::show::{LONG, shown_path};
use crate::{shown, shown_message};

/// An error in a model's files. Every variant names the file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum FileError {
    #[error("{}: {source}", shown_path(.file), source = shown_message(.source, LONG))]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{}: has {bytes} bytes; at most {limit} are read", shown_path(.file))]
    TooLarge { file: PathBuf, bytes: u64, limit: u64 },
    #[error("{}: is a git-lfs pointer, not the file itself: `git lfs pull` in its directory fetches that", shown_path(.file))]
    Pointer { file: PathBuf },
    #[error("{}: {source}", shown_path(.file))]
    Safetensors { file: PathBuf, source: Box<SafetensorsError> },
    #[error("{}: {source}", shown_path(.file))]
    Gguf { file: PathBuf, source: Box<GgufError> },
    #[error("{}: not the JSON that it should be: {source}", shown_path(.file), source = shown_message(.source, LONG))]
    Json { file: PathBuf, source: serde_json::Error },
    #[error("{}: {key} should be {want}, but is {got}", shown_path(.file), key = shown(.key), got = shown(.got))]
    Value { file: PathBuf, key: String, want: &'static str, got: String },
    #[error("{}: {key} is missing", shown_path(.file), key = shown(.key))]
    Missing { file: PathBuf, key: String },
    #[error("{}: {problem}", shown_path(.path), problem = shown_message(.problem, LONG))]
    NotACheckpoint { path: PathBuf, problem: String },
    #[error("{}: tensor {tensor} is said to be in \"{shard}\", which is no file name ending in .safetensors", shown_path(.index), tensor = shown(.tensor), shard = shown(.shard))]
    ShardName { index: PathBuf, tensor: String, shard: String },
    #[error("{}: shard {shard} is missing; tensor {tensor} is in it", shown_path(.index), tensor = shown(.tensor), shard = shown(.shard))]
    MissingShard { index: PathBuf, tensor: String, shard: String },
    #[error("{}: tensor {tensor} is not in {shard}, where the index says that it is", shown_path(.index), tensor = shown(.tensor), shard = shown(.shard))]
    NotInShard { index: PathBuf, tensor: String, shard: String },
    #[error("{}: tensor {tensor} is in {shard}, but not in the index", shown_path(.index), tensor = shown(.tensor), shard = shown(.shard))]
    NotInIndex { index: PathBuf, tensor: String, shard: String },
    #[error("tensor {tensor} is both in {} and in {}", shown_path(.first), shown_path(.second), tensor = shown(.tensor))]
    DuplicateTensor { tensor: String, first: PathBuf, second: PathBuf },
    #[error("{}: part {number} of {count} is missing: {}", shown_path(.first), shown_path(.part))]
    MissingPart { first: PathBuf, part: PathBuf, number: u64, count: u64 },
    #[error("{}: the file says it is part {got} of {got_count}, but its name says part {want} of {want_count}", shown_path(.file))]
    Part { file: PathBuf, got: u64, got_count: u64, want: u64, want_count: u64 },
    #[error("{}: {got} tensors in all parts, but split.tensors.count is {want}", shown_path(.file))]
    PartTensors { file: PathBuf, got: u64, want: u64 },
    #[error("{}: {key}: {error}", shown_path(.file), key = shown(.key))]
    Format { file: PathBuf, key: String, error: FormatError },
    #[error("{}: {method} quantization is not supported; supported are {supported}. Take the model in one of these, or quantize the unquantized original with `lowbit quantize`", shown_path(.file), method = shown(.method))]
    Quantization { file: PathBuf, method: String, supported: &'static str },
    #[error("{}: tensor {tensor} is {got}, but {want}", shown_path(.file), tensor = shown(.tensor), got = shown(.got), want = shown_message(.want, LONG))]
    Quantized { file: PathBuf, tensor: String, got: String, want: String },
    #[error("{}: chat template: {problem}", shown_path(.file), problem = shown_message(.problem, LONG))]
    Template { file: PathBuf, problem: String },
    #[error("{}: tokenizer: {problem}", shown_path(.file), problem = shown_message(.problem, LONG))]
    Tokenizer { file: PathBuf, problem: String },
    #[error("{} exists already; name a new path, or replace it (--force)", shown_path(.path))]
    Exists { path: PathBuf },
    #[error("{}: {problem}", shown_path(.path), problem = shown_message(.problem, LONG))]
    Output { path: PathBuf, problem: String },
    #[error("{}: leads to {}, outside of the checkpoint; what is copied has to lie in it", shown_path(.file), shown_path(.target))]
    Outside { file: PathBuf, target: PathBuf },
    #[error("{}: token id {id} has no token; the vocabulary has {vocab_size}", shown_path(.file))]
    TokenId { file: PathBuf, id: u32, vocab_size: usize },
}

/// The quantization that is read.
const SUPPORTED: &str = "MLX's affine, mxfp4, mxfp8 and nvfp4, compressed-tensors, GPTQ, AWQ, AutoRound, FP8, \
                         ModelOpt's FP8 and NVFP4, gpt-oss' MXFP4, and GGUF's block types";

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

    /// Weights that are quantised by `method` are not read.
    pub(crate) fn quantization(file: &Path, method: String) -> Self {
        Self::Quantization { file: file.into(), method, supported: SUPPORTED }
    }

    pub(crate) fn not_a_checkpoint(path: &Path, problem: impl Into<String>) -> Self {
        Self::NotACheckpoint { path: path.into(), problem: problem.into() }
    }
}
