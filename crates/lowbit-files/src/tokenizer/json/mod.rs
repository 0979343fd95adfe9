//! tokenizer.json, checked before the tokenizers crate sees it.
//!
//! The crate trusts such files: it panics on many broken ones, and takes as much time and memory as
//! they ask for. So the file is read here, in one pass, every count and length against its limit,
//! and the crate gets parts that hold together. `truncation` and `padding` are not read: a prompt
//! is never cut or padded.

mod charsmap;
mod model;
mod steps;
#[cfg(test)]
mod tests;
mod value;

use std::path::Path;

use serde::Deserialize;
use tokenizers::AddedToken;

use self::model::{List, Model};
use self::steps::Steps;
use self::value::Small;
use super::limit;
use super::steps::{Inner, TimedModel};
use crate::{FileError, shown};

pub(super) use self::model::check_merges;

#[derive(Deserialize)]
struct File {
    version: Option<String>,
    added_tokens: Option<List<Added, { limit::ADDED }>>,
    normalizer: Option<Small>,
    pre_tokenizer: Option<Small>,
    post_processor: Option<Small>,
    decoder: Option<Small>,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

/// The tokenizer that `bytes`, the content of `path`, describe.
pub(super) fn load(path: &Path, bytes: &[u8]) -> Result<Inner, FileError> {
    let file: File = serde_json::from_slice(bytes).map_err(|error| FileError::tokenizer(path, error))?;
    build(file).map_err(|error| FileError::tokenizer(path, error))
}

fn build(file: File) -> tokenizers::Result<Inner> {
    if let Some(version) = file.version.filter(|version| version != "1.0") {
        return Err(format!("version is {}; supported is 1.0", shown(version)).into());
    }
    let mut inner = Inner::new(TimedModel(file.model.build()?));
    let value = |step: Option<Small>| step.map(|step| step.0).filter(|value| !value.is_null());
    let mut steps = Steps::default();
    if let Some(value) = value(file.normalizer) {
        inner.with_normalizer(Some(steps.normalizer(value)?))?;
    }
    if let Some(value) = value(file.pre_tokenizer) {
        inner.with_pre_tokenizer(Some(steps.pre_tokenizer(value)?));
    }
    if let Some(value) = value(file.decoder) {
        inner.with_decoder(Some(Steps::default().decoder(value)?));
    }
    add_tokens(&mut inner, file.added_tokens.map(|tokens| tokens.0).unwrap_or_default())?;
    if let Some(value) = value(file.post_processor) {
        let processor = Steps::default().post_processor(value, |id| inner.id_to_token(id).is_some())?;
        inner.with_post_processor(Some(processor));
    }
    Ok(inner)
}

fn add_tokens(inner: &mut Inner, tokens: Vec<Added>) -> tokenizers::Result<()> {
    let bytes: usize = tokens.iter().map(|token| token.content.len()).sum();
    if bytes > limit::ADDED_BYTES {
        let most = limit::ADDED_BYTES;
        return Err(format!("the added tokens have {bytes} bytes; at most {most} are supported").into());
    }
    for token in &tokens {
        let (content, id) = (shown(&token.content), token.id);
        if token.content.is_empty() {
            return Err(format!("added token {id} is empty").into());
        }
        if token.content.len() > limit::TOKEN {
            let (bytes, most) = (token.content.len(), limit::TOKEN);
            return Err(
                format!("added token {content} has {bytes} bytes; at most {most} are supported").into()
            );
        }
        if id >= limit::ID {
            return Err(format!("added token {content} has id {id}; ids are below {}", limit::ID).into());
        }
    }
    inner.add_tokens(tokens.iter().map(|token| AddedToken {
        content: token.content.clone(),
        single_word: token.single_word,
        lstrip: token.lstrip,
        rstrip: token.rstrip,
        normalized: token.normalized,
        special: token.special,
    }))?;
    // The crate numbers them itself: with the vocabulary's id for the same text, else with the next
    // after the last.
    for token in &tokens {
        let (content, id) = (shown(&token.content), token.id);
        match inner.token_to_id(&token.content) {
            Some(got) if got == id => {}
            Some(got) => {
                return Err(format!("added token {content} has id {id}, but would get {got}: ids go on after the vocabulary's, and a text has one id").into());
            }
            None => return Err(format!("added token {content} with id {id} could not be added").into()),
        }
        let kept = inner.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        if kept.is_none_or(|kept| kept.content != token.content) {
            return Err(format!("two added tokens have id {id}, one of them {content}").into());
        }
    }
    Ok(())
}
