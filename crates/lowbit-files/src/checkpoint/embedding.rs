//! A checkpoint's settings for embeddings of texts: the files that sentence-transformers writes
//! beside a model, and llama.cpp's `pooling_type`.
//!
//! Source: sentence-transformers 6.2, `BaseModel._load_modules`, `Transformer`, `Pooling`, `Dense`
//! and `Normalize`; llama.cpp (llama-cpp-python 0.3.36) `llama_pooling_type` and
//! `TextModel._try_set_pooling_type`.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Checkpoint, mismatch, read_json};
use crate::names::CONFIG;
use crate::{Companion, FileError, shown};

/// The pooling, which makes one vector of the states of a text's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first token's.
    Cls,
    /// The last token's.
    Last,
}

impl Pooling {
    const ALL: [(Self, &'static str, &'static str, u64); 3] = [
        (Self::Mean, "mean", "pooling_mode_mean_tokens", 1),
        (Self::Cls, "cls", "pooling_mode_cls_token", 2),
        (Self::Last, "lasttoken", "pooling_mode_lasttoken", 3),
    ];

    fn entry(self) -> (Self, &'static str, &'static str, u64) {
        Self::ALL[self as usize]
    }

    /// sentence-transformers' name: `mean`, `cls` or `lasttoken`.
    pub fn name(self) -> &'static str {
        self.entry().1
    }

    /// llama.cpp's number in `pooling_type`.
    pub fn ggml(self) -> u32 {
        self.entry().3 as u32
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|entry| entry.1 == name).map(|entry| entry.0)
    }
}

/// A linear layer behind pooling.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DenseModule {
    /// The folder of its `linear.weight`, and `linear.bias` if it has one; in GGUF the name of its
    /// tensors.
    pub name: String,
    /// The values that it takes.
    pub in_features: usize,
    /// The values that it gives.
    pub out_features: usize,
    /// True if the hyperbolic tangent is taken of these.
    pub tanh: bool,
}

impl DenseModule {
    /// The names of a GGUF file's, in their order.
    pub const GGUF: [&str; 2] = ["dense_2", "dense_3"];
}

/// llama.cpp's number for no pooling, and for a reranker.
const NONE: u64 = 0;
const RANK: u64 = 4;

/// A checkpoint's settings for embeddings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbeddingConfig {
    /// The pooling; `None` where nothing says it.
    pub pooling: Option<Pooling>,
    /// The linear layers behind it.
    pub dense: Vec<DenseModule>,
    /// True if embeddings are divided by their length. As in llama.cpp, this is the default.
    pub normalize: bool,
    /// True if the prompt's tokens are pooled, too.
    pub include_prompt: bool,
    /// The texts that can be put before a text, by name.
    pub prompts: Vec<(String, String)>,
    /// The name of the prompt that is used where none is named.
    pub default_prompt: Option<String>,
    /// The most tokens of a text, with those that the tokenizer adds; the rest is cut off.
    pub max_tokens: Option<usize>,
    /// True if a text that is too long loses its start, not its end.
    pub cut_at_start: bool,
    /// True if the checkpoint ranks texts instead: `pooling_type` rank, or a module that scores.
    pub ranks: bool,
}

impl Default for EmbeddingConfig {
    fn default() -> Self {
        Self {
            pooling: None,
            dense: vec![],
            normalize: true,
            include_prompt: true,
            prompts: vec![],
            default_prompt: None,
            max_tokens: None,
            cut_at_start: false,
            ranks: false,
        }
    }
}

pub(super) const MODULES: &str = "modules.json";
pub(super) const PROMPTS: &str = "config_sentence_transformers.json";
const TRANSFORMER: &str = "sentence_bert_config.json";
/// The names of [`TRANSFORMER`], of which the first that is there is read.
pub(super) const TRANSFORMERS: [&str; 7] = [
    TRANSFORMER,
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// A module of `modules.json`.
pub(super) struct Module {
    /// The class, without what it is in.
    pub class: String,
    /// Its folder; empty for that of the checkpoint.
    pub folder: String,
}

impl Checkpoint {
    /// The checkpoint's settings for embeddings.
    ///
    /// # Errors
    /// [`FileError::Value`] for modules and values that lowbit does not compute, and for malformed
    /// ones; [`FileError::Json`] and [`FileError::Io`].
    pub fn embedding_config(&self) -> Result<EmbeddingConfig, FileError> {
        if let Some(metadata) = self.metadata() {
            let architecture = metadata.get::<&str>("general.architecture")?;
            let key = format!("{architecture}.pooling_type");
            let number = metadata.find::<u64>(&key)?.unwrap_or(NONE);
            let pooling = Pooling::ALL.iter().find(|entry| entry.3 == number).map(|entry| entry.0);
            if pooling.is_none() && ![NONE, RANK].contains(&number) {
                let (file, want) = (metadata.file().into(), "0 to 4: none, mean, cls, last or rank");
                return Err(FileError::Value { file, key, want, got: number.to_string() });
            }
            let dense = DenseModule::GGUF.iter().filter_map(|name| self.gguf_dense(name)).collect();
            return Ok(EmbeddingConfig { pooling, dense, ranks: number == RANK, ..Default::default() });
        }
        let mut config = EmbeddingConfig::default();
        self.tokenizer_settings(&mut config)?;
        let modules = self.modules()?;
        if modules.is_empty() {
            return Ok(config);
        }
        config.normalize = false;
        self.transformer(&mut config)?;
        for (index, Module { class, folder }) in modules.iter().enumerate() {
            match (index, class.as_str()) {
                (0, "Transformer") if folder.is_empty() => {}
                (1, "Pooling") => self.pooling(folder, &mut config)?,
                (2.., "Dense") if !config.normalize => config.dense.push(self.dense(folder)?),
                (2.., "Normalize") => {
                    self.normalize(folder)?;
                    config.normalize = true;
                }
                (1, "LogitScore") => config.ranks = true,
                _ => {
                    let want = "Transformer beside it, then Pooling, then perhaps Dense and Normalize: other modules are not computed";
                    let got = format!("{} in \"{}\"", shown(class), shown(folder));
                    let (file, key) = (self.path().join(MODULES), format!("module {index}"));
                    return Err(FileError::Value { file, key, want, got });
                }
            }
        }
        self.prompts(&mut config)?;
        Ok(config)
    }

    /// The modules of `modules.json`, empty where there is none.
    ///
    /// # Errors
    /// [`FileError::Value`] for a malformed one, also for a folder that is no plain name.
    pub(super) fn modules(&self) -> Result<Vec<Module>, FileError> {
        let Some((file, json)) = self.json(MODULES)? else { return Ok(vec![]) };
        let wrong = |key: &str, want, value: &Value| Err(mismatch(&file, key, want, value));
        let Some(list) = json.as_array() else { return wrong("the whole", "an array", &json) };
        let mut modules = vec![];
        for (index, module) in list.iter().enumerate() {
            let key = |name: &str| format!("{name} of module {index}");
            let Some(class) = module["type"].as_str() else {
                return wrong(&key("type"), "a class", &module["type"]);
            };
            let folder = module["path"].as_str().filter(|folder| {
                let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
                folder.len() < 100 && folder.chars().all(is_plain)
            });
            let Some(folder) = folder else {
                return wrong(&key("path"), "the name of a folder beside it", &module["path"]);
            };
            let class = class.rsplit('.').next().unwrap_or_default().to_string();
            modules.push(Module { class, folder: folder.into() });
        }
        Ok(modules)
    }

    /// A module's own config.json, if there is one.
    pub(super) fn module_config(&self, folder: &str) -> Result<Option<(PathBuf, Value)>, FileError> {
        let path = self.path().join(folder).join(CONFIG);
        if folder.is_empty() || !path.exists() {
            return Ok(None);
        }
        let value = read_json(&path)?;
        Ok(Some((path, value)))
    }

    fn tokenizer_settings(&self, config: &mut EmbeddingConfig) -> Result<(), FileError> {
        let Some((file, json)) = self.json("tokenizer_config.json")? else { return Ok(()) };
        // transformers writes 1e30 for no limit.
        config.max_tokens = json["model_max_length"].as_u64().and_then(|tokens| usize::try_from(tokens).ok());
        config.cut_at_start = match &json["truncation_side"] {
            Value::Null => false,
            Value::String(side) if side == "right" => false,
            Value::String(side) if side == "left" => true,
            other => return Err(mismatch(&file, "truncation_side", "left or right", other)),
        };
        Ok(())
    }

    /// The settings of the first module.
    pub(super) fn transformer_config(&self) -> Result<Option<(PathBuf, Value)>, FileError> {
        for name in TRANSFORMERS {
            if let Some(found) = self.json(name)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn transformer(&self, config: &mut EmbeddingConfig) -> Result<(), FileError> {
        if let Some((file, json)) = self.transformer_config()? {
            match &json["max_seq_length"] {
                Value::Null => {}
                value => match value.as_u64().and_then(|tokens| usize::try_from(tokens).ok()) {
                    Some(tokens) => config.max_tokens = Some(tokens),
                    None => return Err(mismatch(&file, "max_seq_length", "a number of tokens", value)),
                },
            }
            if ![Value::Null, Value::Bool(false)].contains(&json["do_lower_case"]) {
                return Err(mismatch(
                    &file,
                    "do_lower_case",
                    "false: texts stay as they are",
                    &json["do_lower_case"],
                ));
            }
            let modalities = &json["modality_config"];
            if modalities.get("message").is_some() && !config.ranks && modalities.get("text").is_none() {
                let want = "one with text: texts that a chat template writes are not embedded";
                return Err(mismatch(&file, "modality_config", want, modalities));
            }
        }
        Ok(())
    }

    fn pooling(&self, folder: &str, config: &mut EmbeddingConfig) -> Result<(), FileError> {
        // A repository that was copied without its folders: the user can still name a pooling.
        let Some((file, json)) = self.module_config(folder)? else { return Ok(()) };
        const WANT: &str = "mean, cls or lasttoken alone";
        if let Some(include) = json["include_prompt"].as_bool() {
            config.include_prompt = include;
        }
        let modes = match &json["pooling_mode"] {
            Value::Null => {
                // The older spelling; mean, if none is said.
                let is_mode = |(key, on): &(&String, &Value)| {
                    key.starts_with("pooling_mode_") && **on == Value::Bool(true)
                };
                let on: Vec<&String> =
                    json.as_object().into_iter().flatten().filter(is_mode).map(|(key, _)| key).collect();
                match on[..] {
                    [] => Some(Pooling::Mean),
                    [key] => Pooling::ALL.iter().find(|entry| entry.2 == key).map(|entry| entry.0),
                    _ => None,
                }
            }
            Value::String(name) => Pooling::named(name),
            Value::Array(names) => match &names[..] {
                [Value::String(name)] => Pooling::named(name),
                _ => None,
            },
            _ => None,
        };
        if modes.is_none() {
            return Err(FileError::Value {
                file,
                key: "pooling_mode".into(),
                want: WANT,
                got: shown(&json).to_string(),
            });
        }
        config.pooling = modes;
        Ok(())
    }

    fn normalize(&self, folder: &str) -> Result<(), FileError> {
        self.module_config(folder)?.map_or(Ok(()), |(file, json)| check_names(&file, &json))
    }

    /// A linear layer of a directory.
    fn dense(&self, folder: &str) -> Result<DenseModule, FileError> {
        let Some((file, json)) = self.module_config(folder)? else {
            let (file, got) = (self.path().join(folder).join(CONFIG), "missing".into());
            let (key, want) = ("the whole".into(), "the sizes of a linear layer");
            return Err(FileError::Value { file, key, want, got });
        };
        check_names(&file, &json)?;
        let size = |key: &str| match json[key].as_u64().and_then(|size| usize::try_from(size).ok()) {
            Some(size) if size > 0 => Ok(size),
            _ => Err(mismatch(&file, key, "a number of values", &json[key])),
        };
        if ![Value::Null, Value::Bool(false)].contains(&json["use_residual"]) {
            return Err(mismatch(
                &file,
                "use_residual",
                "false: no residual is added",
                &json["use_residual"],
            ));
        }
        let function = &json["activation_function"];
        let tanh = match function.as_str().and_then(|name| name.rsplit('.').next()) {
            Some("Identity") => false,
            Some("Tanh") => true,
            None if function.is_null() => true,
            _ => return Err(mismatch(&file, "activation_function", "torch's Identity or Tanh", function)),
        };
        let (in_features, out_features) = (size("in_features")?, size("out_features")?);
        Ok(DenseModule { name: folder.into(), in_features, out_features, tanh })
    }

    /// A linear layer of a GGUF file, if it has the one of this name.
    fn gguf_dense(&self, name: &str) -> Option<DenseModule> {
        let weight = self.tensors().get(&format!("{name}.weight"))?;
        match weight.shape[..] {
            [out_features, in_features] => {
                Some(DenseModule { name: name.into(), in_features, out_features, tanh: false })
            }
            _ => None,
        }
    }

    fn prompts(&self, config: &mut EmbeddingConfig) -> Result<(), FileError> {
        let Some((file, json)) = self.json(PROMPTS)? else { return Ok(()) };
        match &json["prompts"] {
            Value::Null => {}
            Value::Object(prompts) => {
                for (name, text) in prompts {
                    let text = match text {
                        Value::Null => "",
                        Value::String(text) => text,
                        other => return Err(mismatch(&file, &format!("prompts.{name}"), "a text", other)),
                    };
                    config.prompts.push((name.clone(), text.into()));
                }
            }
            other => return Err(mismatch(&file, "prompts", "an object", other)),
        }
        config.default_prompt = match &json["default_prompt_name"] {
            Value::Null => None,
            Value::String(name) => Some(name.clone()),
            other => return Err(mismatch(&file, "default_prompt_name", "a prompt's name", other)),
        };
        let known = |name: &String| config.prompts.iter().any(|(known, _)| known == name);
        if let Some(name) = config.default_prompt.as_ref().filter(|name| !known(name)) {
            let value = Value::String(name.clone());
            return Err(mismatch(&file, "default_prompt_name", "one of the prompts", &value));
        }
        Ok(())
    }
}

/// Checks that a module reads and writes the embedding.
fn check_names(file: &Path, json: &Value) -> Result<(), FileError> {
    for key in ["module_input_name", "module_output_name"] {
        match &json[key] {
            Value::Null => {}
            Value::String(name) if name == "sentence_embedding" => {}
            other => return Err(mismatch(file, key, "sentence_embedding", other)),
        }
    }
    Ok(())
}

/// The files with which sentence-transformers pools as a GGUF file says, and normalises as
/// llama.cpp does.
pub(super) fn companions(pooling: Pooling) -> Vec<Companion> {
    let module = |index: usize, folder: &str, class: &str| json!({ "idx": index, "name": index.to_string(), "path": folder, "type": format!("sentence_transformers.models.{class}") });
    let modules = json!([
        module(0, "", "Transformer"),
        module(1, "1_Pooling", "Pooling"),
        module(2, "2_Normalize", "Normalize")
    ]);
    let file =
        |name: &str, json: Value| Companion { name: name.into(), bytes: format!("{json:#}").into_bytes() };
    let modes =
        Pooling::ALL.into_iter().map(|(mode, _, key, _)| (key.to_string(), Value::Bool(mode == pooling)));
    vec![file(MODULES, modules), file("1_Pooling/config.json", Value::Object(modes.collect()))]
}

#[cfg(test)]
#[path = "embedding_tests.rs"]
mod tests;
