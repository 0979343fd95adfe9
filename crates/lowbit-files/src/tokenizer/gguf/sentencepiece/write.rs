//! GGUF metadata of tokenizer.json's SentencePiece BPE: the spelling of spaces, and a score per
//! token instead of a rank per merge.

use std::collections::{HashMap, HashSet};

use serde_json::Value as Json;

use super::{LONGEST, SPACE, too_long};
use crate::shown;
use crate::tokenizer::gguf::Merge;

/// Scores that llama.cpp's converter gives to added tokens, and to embeddings without a token.
/// Neither is joined from parts: added tokens are found in a text before it is cut.
const ADDED: f32 = -1000.0;
const UNUSED: f32 = -10000.0;

/// The spelling of spaces.
pub(in crate::tokenizer::gguf) struct Spaces {
    /// True if a space is put before a text.
    pub prefix: bool,
    /// Texts that GGUF spells otherwise.
    pub differences: Vec<&'static str>,
}

impl Spaces {
    /// Reads the steps of the tokenizer.json `json`.
    ///
    /// # Errors
    /// The step that GGUF has no counterpart for.
    pub(in crate::tokenizer::gguf) fn read(json: &Json) -> Result<Self, String> {
        let mut spaces = Self { prefix: false, differences: vec![] };
        let mut replaced = false;
        let none = |part: &str, step: &Json| {
            format!("{part} {} has no counterpart in GGUF's llama tokenizers", shown(&step["type"]))
        };
        for step in steps(&json["normalizer"], "normalizers") {
            let is_space = |key: &str| step[key] == SPACE;
            match step["type"].as_str() {
                Some("Prepend") if is_space("prepend") => spaces.prefix = true,
                Some("Replace") if step["pattern"]["String"] == " " && is_space("content") => replaced = true,
                _ => return Err(none("normalizer", step)),
            }
        }
        for step in steps(&json["pre_tokenizer"], "pretokenizers") {
            match step["type"].as_str() {
                // No space is left to cut at.
                Some("Split") if step["pattern"]["String"] == " " && replaced => {}
                Some("Metaspace") if step["replacement"] == SPACE && step["split"] == Json::Bool(false) => {
                    replaced = true;
                    spaces.take_metaspace(step);
                }
                _ => return Err(none("pre_tokenizer", step)),
            }
        }
        if !replaced {
            return Err(format!("it does not spell spaces as {SPACE}, as GGUF's llama tokenizers do"));
        }
        Ok(spaces)
    }

    fn take_metaspace(&mut self, step: &Json) {
        let scheme = step["prepend_scheme"].as_str().unwrap_or("always");
        if scheme == "never" || step["add_prefix_space"] == Json::Bool(false) {
            return;
        }
        self.prefix = true;
        self.differences.push("a text that begins with a space gets another one before it");
        if scheme == "first" {
            self.differences.push("a text behind a special token gets a space before it");
        }
    }
}

/// A step, or the steps of a sequence.
fn steps<'a>(step: &'a Json, list: &str) -> &'a [Json] {
    match &step[list] {
        Json::Array(steps) => steps,
        _ if step.is_null() => &[],
        _ => std::slice::from_ref(step),
    }
}

/// True if `token` stands for a byte, such as `<0x0A>`.
pub(in crate::tokenizer::gguf) fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|token| token.strip_suffix('>'));
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte);
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(is_digit))
}

/// Scores of `vocab_size` tokens with which the tokens `vocab` are joined in the order of `merges`:
/// as in SentencePiece's own files, a token's score is the number of tokens before it, negated,
/// where they were made in the order of their ids.
///
/// # Errors
/// Merges have an order that no scores have, or GGUF would join two tokens that `merges` does not
/// join.
pub(in crate::tokenizer::gguf) fn scores(
    vocab: &HashMap<&str, u32>,
    merges: &[Merge<'_>],
    is_added: impl Fn(&str) -> bool,
    vocab_size: usize,
) -> Result<Vec<f32>, String> {
    for byte in 0..=u8::MAX {
        let token = format!("<0x{byte:02X}>");
        if !vocab.contains_key(token.as_str()) {
            return Err(format!(
                "it has no token {token}, and GGUF's llama tokenizers have one for each byte"
            ));
        }
    }
    let made = order(vocab, merges, &is_added)?;
    let mut scores = vec![UNUSED; vocab_size];
    let first =
        vocab.iter().filter(|(token, _)| !is_added(token) && !is_byte(token)).map(|(_, id)| *id).min();
    let natural = |id: u32| first.map_or(0.0, |first| -(id.saturating_sub(first) as f32));
    let mut set = |id: u32, score: f32| {
        if let Some(slot) = scores.get_mut(id as usize) {
            *slot = score;
        }
    };
    for (token, &id) in vocab {
        set(id, if is_byte(token) { 0.0 } else { natural(id) });
    }
    let mut last = f32::INFINITY;
    for id in made {
        last = if natural(id) < last { natural(id) } else { last - 1.0 };
        set(id, last);
    }
    for (_, &id) in vocab.iter().filter(|(token, _)| is_added(token)) {
        set(id, ADDED);
    }
    Ok(scores)
}

/// The tokens that merges make, in the order in which they are preferred.
fn order(
    vocab: &HashMap<&str, u32>,
    merges: &[Merge<'_>],
    is_added: impl Fn(&str) -> bool,
) -> Result<Vec<u32>, String> {
    let mut made: Vec<u32> = vec![];
    let mut known = HashSet::new();
    let mut pairs = HashSet::new();
    for (left, right) in merges {
        let token = format!("{left}{right}");
        // An added token is found before, so that nothing is left to join to it.
        let Some(&id) = vocab.get(token.as_str()).filter(|_| !is_added(&token)) else { continue };
        pairs.insert((*left, *right));
        if made.last() == Some(&id) {
            continue;
        }
        if !known.insert(id) {
            return Err(format!(
                "its merges to {} stand in several places, but GGUF's scores give a token one",
                shown(&token)
            ));
        }
        made.push(id);
    }
    let mut tokens: Vec<(&str, u32)> =
        vocab.iter().map(|(token, id)| (*token, *id)).filter(|(token, _)| !is_added(token)).collect();
    tokens.sort_unstable_by_key(|(_, id)| *id);
    for (token, _) in tokens {
        if token.len() > LONGEST {
            return Err(too_long(token));
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if vocab.contains_key(left) && vocab.contains_key(right) && !pairs.contains(&(left, right)) {
                let [left, right, token] = [left, right, token].map(shown);
                return Err(format!(
                    "GGUF would join {left} and {right} to {token}, which model.merges does not"
                ));
            }
        }
    }
    Ok(made)
}
