//! A directory's tokenizer: tokenizer.json, and what the files beside it say of tokens.

use std::path::Path;

use super::declared::Declared;
use super::engine::Engine;
use super::{SpecialTokens, Tokenizer, json};
use crate::{Checkpoint, FileError, shown};

const TOKENIZER: &str = "tokenizer.json";

/// All of it: what runs, and what is written in other formats.
pub(super) struct Directory {
    pub engine: Engine,
    /// The content of tokenizer.json.
    pub bytes: Vec<u8>,
    pub declared: Declared,
}

impl Directory {
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Self, FileError> {
        let path = checkpoint.path().join(TOKENIZER);
        if !path.exists() {
            return Err(FileError::tokenizer(&path, missing(checkpoint.path())));
        }
        let bytes = crate::read::read(&path, crate::read::limit::TOKENIZER)?;
        let declared = Declared::read(checkpoint)?;
        let engine = Engine::load(&path, || {
            let mut inner = json::load(&path, &bytes)?;
            declared.add_to(&mut inner).map_err(|error| FileError::tokenizer(&path, error))?;
            Ok(inner)
        })?;
        Ok(Self { engine, bytes, declared })
    }

    /// The id of the special token `name`, such as `bos_token`.
    pub(super) fn special_id(&self, name: &str) -> Option<u32> {
        self.declared.special(name).and_then(|token| self.engine.id(token))
    }
}

pub(super) fn load(checkpoint: &Checkpoint) -> Result<Tokenizer, FileError> {
    let directory = Directory::read(checkpoint)?;
    let [bos, eos] = ["bos_token", "eos_token"].map(|name| directory.special_id(name));
    let mut eos_ids = checkpoint.generation_config()?.eos_token_ids;
    eos_ids.extend(eos);
    let special = SpecialTokens { bos, eos, eos_ids, ..Default::default() };
    Ok(Tokenizer::new(directory.engine, special))
}

/// The tokenizer files of a folder without tokenizer.json, and what to do about them.
fn missing(folder: &Path) -> String {
    let has = |name: &str| folder.join(name).exists();
    let convert = "load it with transformers' AutoTokenizer and write tokenizer.json with save_pretrained";
    let tiktoken = || {
        let entries = folder.read_dir().ok()?;
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.into_iter().find(|name| name.ends_with(".tiktoken") || name == "tiktoken.model")
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
