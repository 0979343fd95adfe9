//! tokenizer.json, and the names of special tokens in tokenizer_config.json.

use std::path::Path;

use serde_json::Value;

use super::{SpecialTokens, Tokenizer};
use crate::checkpoint::mismatch;
use crate::{Checkpoint, FileError};

const TOKENIZER: &str = "tokenizer.json";

pub(super) fn load(checkpoint: &Checkpoint) -> Result<Tokenizer, FileError> {
    let path = checkpoint.path().join(TOKENIZER);
    if !path.exists() && checkpoint.path().join("tokenizer.model").exists() {
        let problem = "only tokenizer.model is here; write tokenizer.json with transformers' save_pretrained";
        return Err(FileError::tokenizer(&path, problem));
    }
    let bytes = crate::read::read(&path, crate::read::limit::TOKENIZER)?;
    let inner =
        tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| FileError::tokenizer(&path, error))?;
    let mut special =
        SpecialTokens { eos_ids: checkpoint.generation_config()?.eos_token_ids, ..Default::default() };
    if let Some((file, config)) = checkpoint.json("tokenizer_config.json")? {
        let id = |key| Ok(special_token(&file, &config, key)?.and_then(|token| inner.token_to_id(&token)));
        special.bos = id("bos_token")?;
        special.eos = id("eos_token")?;
    }
    Tokenizer::new(inner, path.into(), special)
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
