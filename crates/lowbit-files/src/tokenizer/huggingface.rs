//! tokenizer.json, and the names of special tokens in tokenizer_config.json.

use std::path::Path;

use serde_json::Value;

use super::engine::Engine;
use super::{SpecialTokens, Tokenizer, json};
use crate::checkpoint::mismatch;
use crate::{Checkpoint, FileError, shown};

const TOKENIZER: &str = "tokenizer.json";

pub(super) fn load(checkpoint: &Checkpoint) -> Result<Tokenizer, FileError> {
    let path = checkpoint.path().join(TOKENIZER);
    if !path.exists() {
        return Err(FileError::tokenizer(&path, missing(checkpoint.path())));
    }
    let bytes = crate::read::read(&path, crate::read::limit::TOKENIZER)?;
    let engine = Engine::load(&path, || json::load(&path, &bytes))?;
    let mut special =
        SpecialTokens { eos_ids: checkpoint.generation_config()?.eos_token_ids, ..Default::default() };
    if let Some((file, config)) = checkpoint.json("tokenizer_config.json")? {
        let id = |key| Ok(special_token(&file, &config, key)?.and_then(|token| engine.id(&token)));
        special.bos = id("bos_token")?;
        special.eos = id("eos_token")?;
    }
    Ok(Tokenizer::new(engine, special))
}

/// What a folder without tokenizer.json has instead, and what to do about it.
fn missing(folder: &Path) -> String {
    let has = |name: &str| folder.join(name).exists();
    let convert = "load it with transformers' AutoTokenizer and write tokenizer.json with save_pretrained";
    let tiktoken = || {
        let entries = folder.read_dir().ok()?;
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.into_iter().find(|name| name.ends_with(".tiktoken"))
    };
    if has("tokenizer.model") {
        format!("it is missing; tokenizer.model (SentencePiece or tiktoken) is not read: {convert}")
    } else if has("tekken.json") {
        "it is missing; tekken.json (Mistral's own format) is not read: take tokenizer.json from the model's repository in \
         transformers' format"
            .into()
    } else if has("vocab.json") && has("merges.txt") {
        format!("it is missing; vocab.json and merges.txt do not say how text is cut into words: {convert}")
    } else if has("vocab.txt") {
        format!("it is missing; vocab.txt (WordPiece) is not read: {convert}")
    } else if let Some(name) = tiktoken() {
        format!("it is missing; {} (tiktoken) is not read: {convert}", shown(name))
    } else {
        "it is missing: copy it from the model's repository".into()
    }
}

/// The spelling of the special token `key`: a string, or an object with `content`.
pub(crate) fn special_token(file: &Path, config: &Value, key: &str) -> Result<Option<String>, FileError> {
    let Some(value) = config.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    let content = value.get("content").unwrap_or(value);
    match content.as_str() {
        Some(token) => Ok(Some(token.into())),
        None => Err(mismatch(file, key, "a token", value)),
    }
}
