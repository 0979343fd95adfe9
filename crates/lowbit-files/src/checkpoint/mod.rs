//! A model on disk: a directory in Hugging Face's or MLX's layout, or GGUF.

mod companion;
mod embedding;
pub(crate) mod foreign;
#[cfg(test)]
mod foreign_tests;
mod generation;
mod gguf;
mod global_scale;
#[cfg(test)]
mod global_scale_tests;
mod gpt_oss;
mod index;
mod makers;
mod quantization;
mod safetensors;
mod scoring;
#[cfg(test)]
mod tests;
mod unwritten;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

pub use embedding::{DenseModule, EmbeddingConfig, Pooling};
pub use generation::GenerationConfig;
pub use index::shard_names;
pub use quantization::Quantization;
pub use scoring::ScoringConfig;
pub use unwritten::{Unwritten, UnwrittenTensor};

use crate::gguf::Metadata;
use crate::names::{CONFIG, file_names};
use crate::read::{json, limit, read};
use crate::{FileError, Tensors, shown};

/// A checkpoint's layout: the names of its tensors and the conventions that they follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// As transformers saves it: plain floats.
    HuggingFace,
    /// As mlx-lm saves it: perhaps quantised, norms and convolutions in MLX's own form.
    Mlx,
    /// GGUF.
    Gguf,
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::HuggingFace => "Hugging Face",
            Self::Mlx => "MLX",
            Self::Gguf => "GGUF",
        })
    }
}

/// A model on disk: its mapped tensors, and its configuration.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    tensors: Tensors,
    description: Description,
    /// tokenizer_config.json, once it was asked for: tokens and templates are both in it.
    tokenizer_config: OnceLock<Option<(PathBuf, Value)>>,
}

#[derive(Debug)]
enum Description {
    /// The weights of MLX that have a float per matrix are `multiplied` by it.
    Directory { layout: Layout, config: Value, maker: Option<makers::Maker>, multiplied: HashSet<String> },
    /// The kinds of tensors `without_effect` are left out.
    Gguf { metadata: Metadata, without_effect: Vec<String> },
}

impl Checkpoint {
    fn new(path: &Path, tensors: Tensors, description: Description) -> Self {
        Self { path: path.into(), tensors, description, tokenizer_config: OnceLock::new() }
    }

    /// Opens a directory that holds config.json and safetensors (one file or shards, with or
    /// without an index), a .gguf file, any part of a split one, or a directory that holds one GGUF
    /// model. The path of a directory's config.json, tokenizer.json, index or safetensors file
    /// opens the directory.
    ///
    /// # Errors
    /// [`FileError`] for files that are missing, malformed or disagree, and for quantization by
    /// methods that are not read.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let metadata = std::fs::metadata(path).map_err(FileError::io(path))?;
        if !metadata.is_dir() {
            if let Some(directory) = foreign::directory_of(path)? {
                return Self::open(&directory);
            }
            return match foreign::file(path)? {
                Some(problem) => Err(FileError::not_a_checkpoint(path, problem)),
                None => Self::open_gguf(path, path),
            };
        }
        // Repositories of GGUF files may have the original's config.json beside them.
        let has_safetensors = !file_names(path, ".safetensors")?.is_empty();
        if !has_safetensors && let Some(file) = gguf::only_model(path)? {
            return Self::open_gguf(path, &file);
        }
        if path.join(CONFIG).exists() {
            return Self::open_directory(path);
        }
        let problem = foreign::directory(path)?;
        let problem = problem.unwrap_or_else(|| "holds neither config.json nor a .gguf file".into());
        Err(FileError::not_a_checkpoint(path, problem))
    }

    fn open_directory(path: &Path) -> Result<Self, FileError> {
        let config_path = path.join(CONFIG);
        let config = read_json(&config_path)?;
        if !config.is_object() {
            return Err(mismatch(&config_path, "the whole", "an object", &config));
        }
        if let Some(problem) = foreign::kind(&config) {
            return Err(FileError::not_a_checkpoint(path, problem));
        }
        let quantized = quantization::by(&config_path, &config)?;
        let (mut tensors, format) = safetensors::open(path)?;
        let (mut maker, mut mlx) = (None, format.as_deref() == Some("mlx"));
        match quantized {
            None => {}
            Some(quantization::By::Mlx) => mlx = true,
            Some(quantization::By::Maker(method, settings)) => {
                let adapted = makers::adapt(&config_path, &config, (&method, &settings), tensors)?;
                (tensors, maker) = (adapted.0, Some(adapted.1));
            }
        }
        if !mlx && config.get("model_type").and_then(Value::as_str) == Some(gpt_oss::MODEL_TYPE) {
            tensors = gpt_oss::adapt(&config_path, &tensors, maker.as_mut())?;
        }
        let layout = if mlx { Layout::Mlx } else { Layout::HuggingFace };
        Self::new(path, tensors, Description::Directory { layout, config, maker, multiplied: HashSet::new() })
            .with_products()
    }

    fn open_gguf(path: &Path, file: &Path) -> Result<Self, FileError> {
        let (metadata, tensors) = gguf::open(file)?;
        if let Some(problem) = foreign::gguf_kind(&metadata) {
            return Err(FileError::not_a_checkpoint(file, problem));
        }
        Self::new(path, tensors, Description::Gguf { metadata, without_effect: vec![] }).with_products()
    }

    /// The scales of NVFP4's weights times the floats of whole matrices, where these are tensors of
    /// their own.
    fn with_products(mut self) -> Result<Self, FileError> {
        match &mut self.description {
            Description::Gguf { metadata, without_effect } => {
                (self.tensors, *without_effect) = global_scale::of_gguf(metadata, self.tensors)?;
            }
            Description::Directory { layout: Layout::Mlx, maker: None, .. } => {
                let (tensors, modules) = global_scale::of_mlx(&self)?;
                self.tensors = tensors;
                if let Description::Directory { multiplied, .. } = &mut self.description {
                    *multiplied = modules;
                }
            }
            Description::Directory { .. } => {}
        }
        Ok(self)
    }

    /// The layout.
    pub fn layout(&self) -> Layout {
        match self.description {
            Description::Directory { layout, .. } => layout,
            Description::Gguf { .. } => Layout::Gguf,
        }
    }

    /// All tensors, of all shards.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// config.json, an object.
    ///
    /// # Errors
    /// [`FileError::NotACheckpoint`] when this is GGUF.
    pub fn config(&self) -> Result<&Value, FileError> {
        match &self.description {
            Description::Directory { config, .. } => Ok(config),
            Description::Gguf { .. } => {
                Err(FileError::not_a_checkpoint(&self.path, "is GGUF and has no config.json"))
            }
        }
    }

    /// The tool that quantised it, if its tensors were not MLX's.
    fn maker(&self) -> Option<&makers::Maker> {
        match &self.description {
            Description::Directory { maker, .. } => maker.as_ref(),
            Description::Gguf { .. } => None,
        }
    }

    /// The method by which another tool quantised it (`GPTQ`). Its tensors are then found as MLX
    /// would have them, by MLX's names.
    pub fn method(&self) -> Option<&'static str> {
        self.maker().map(|maker| maker.method)
    }

    /// The kinds of tensors that the tool which quantised it wrote for activations in few bits.
    /// They change nothing here, where activations are floats.
    pub fn without_effect(&self) -> &[String] {
        match &self.description {
            Description::Directory { maker, .. } => maker.as_ref().map_or(&[], |maker| &maker.without_effect),
            Description::Gguf { without_effect, .. } => without_effect,
        }
    }

    /// The number of that tool's weights that become f32 when they are read, since no format of
    /// lowbit's holds them: those of FP8 and NVFP4.
    pub fn expanded(&self) -> usize {
        self.maker().map_or(0, |maker| maker.expanded)
    }

    /// GGUF's metadata (the first part's, when it is split).
    pub fn metadata(&self) -> Option<&Metadata> {
        match &self.description {
            Description::Directory { .. } => None,
            Description::Gguf { metadata, .. } => Some(metadata),
        }
    }

    /// Bytes of all tensors.
    pub fn size_bytes(&self) -> u64 {
        self.tensors.iter().map(|view| view.bytes.len() as u64).sum()
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Files of an adapter (LoRA) beside the weights, as mlx-lm and PEFT name them.
    pub fn adapters(&self) -> Vec<&'static str> {
        let names =
            ["adapter_config.json", "adapters.safetensors", "adapter_model.safetensors", "adapter_model.bin"];
        let is_there = |name: &&str| self.layout() != Layout::Gguf && self.path.join(name).exists();
        names.into_iter().filter(is_there).collect()
    }

    /// The JSON file `name` of the directory, or `None` when there is none (or this is GGUF).
    pub(crate) fn json(&self, name: &str) -> Result<Option<(PathBuf, Value)>, FileError> {
        let path = self.path.join(name);
        if self.layout() == Layout::Gguf || !path.exists() {
            return Ok(None);
        }
        let value = read_json(&path)?;
        Ok(Some((path, value)))
    }

    /// tokenizer_config.json of a directory, if it has one, with its path; it is read once.
    ///
    /// # Errors
    /// As [`Self::json`].
    pub(crate) fn tokenizer_config(&self) -> Result<Option<&(PathBuf, Value)>, FileError> {
        if self.tokenizer_config.get().is_none() {
            let config = self.json("tokenizer_config.json")?;
            // Another thread's is the same.
            let _ = self.tokenizer_config.set(config);
        }
        Ok(self.tokenizer_config.get().and_then(Option::as_ref))
    }
}

pub(crate) fn read_json(path: &Path) -> Result<Value, FileError> {
    json(&read(path, limit::CONFIG)?, path)
}

/// An error that says what `key` of a JSON file holds instead of `want`.
pub(crate) fn mismatch(file: &Path, key: &str, want: &'static str, value: &Value) -> FileError {
    let got = match value {
        Value::Object(_) => "an object".into(),
        Value::Array(_) => "an array".into(),
        other => shown(other).to_string(),
    };
    FileError::Value { file: file.into(), key: key.into(), want, got }
}
