//! A directory's tokenizer as `tokenizer.ggml.*`, the inverse of what this module reads: for byte-level BPE whose cuts have
//! a name in `tokenizer.ggml.pre`.
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `conversion/base.py`, `get_vocab_base`, and `gguf-py/gguf/vocab.py`,
//! `SpecialVocab`. The converter knows cuts by a hash of what they do to a text; here they are known by their patterns.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value as Json;

use super::{GPT_2, Kind, byte_level};
use crate::gguf::{Array, Value};
use crate::read::{limit, read};
use crate::tokenizer::limit::TOKENS as MOST_TOKENS;
use crate::tokenizer::{Tokenizer, special_token};
use crate::{Checkpoint, FileError, shown};

/// Special tokens, as tokenizer_config.json and config.json call them, and as GGUF does (with its spelling).
const SPECIAL: [(&str, &str); 7] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("pad", "padding"),
    ("cls", "cls"),
    ("mask", "mask"),
];

pub(in crate::tokenizer) fn entries(
    checkpoint: &Checkpoint,
    vocab_size: usize,
) -> Result<Vec<(String, Value)>, FileError> {
    // Checks all of the file.
    Tokenizer::from_checkpoint(checkpoint)?;
    let file = checkpoint.path().join("tokenizer.json");
    let json = serde_json::from_slice(&read(&file, limit::TOKENIZER)?).map_err(FileError::json(&file))?;
    let settings = checkpoint.json("tokenizer_config.json")?.map_or(Json::Null, |(_, settings)| settings);
    let mut source = Source { checkpoint, file, json, settings, entries: vec![] };
    source.vocabulary(vocab_size)?;
    source.special_tokens(vocab_size)?;
    source.chat_template()?;
    Ok(source.entries)
}

struct Source<'a> {
    checkpoint: &'a Checkpoint,
    file: PathBuf,
    /// tokenizer.json.
    json: Json,
    /// tokenizer_config.json.
    settings: Json,
    entries: Vec<(String, Value)>,
}

impl Source<'_> {
    fn error(&self, problem: impl std::fmt::Display) -> FileError {
        FileError::tokenizer(&self.file, problem)
    }

    fn put(&mut self, key: &str, value: Value) {
        self.entries.push((format!("tokenizer.{key}"), value));
    }

    fn vocabulary(&mut self, vocab_size: usize) -> Result<(), FileError> {
        if vocab_size > MOST_TOKENS {
            return Err(
                self.error(format!("{vocab_size} tokens are wanted; at most {MOST_TOKENS} are supported"))
            );
        }
        let model = &self.json["model"];
        let kind = model["type"].as_str().unwrap_or("BPE");
        if kind != "BPE" || model["byte_fallback"] == Json::Bool(true) {
            let kind = if kind == "BPE" { "SentencePiece's BPE" } else { kind };
            return Err(
                self.error(format!("only byte-level BPE is written to GGUF, and this is {}", shown(kind)))
            );
        }
        let pre = self.pre()?;
        let (tokens, kinds) = self.tokens(vocab_size)?;
        let merges = self.merges();
        // The converter writes this for Llama alone.
        let model_type = self.checkpoint.config()?["model_type"].as_str();
        let prefix = self.settings["add_prefix_space"].as_bool();
        if let Some(prefix) = prefix.filter(|_| matches!(model_type, Some("llama" | "mistral"))) {
            self.put("ggml.add_space_prefix", Value::Bool(prefix));
        }
        self.put("ggml.model", Value::String("gpt2".into()));
        self.put("ggml.pre", Value::String(pre.into()));
        self.put("ggml.tokens", Value::Array(Array::String(tokens)));
        self.put("ggml.token_type", Value::Array(Array::I32(kinds)));
        if !merges.is_empty() {
            self.put("ggml.merges", Value::Array(Array::String(merges)));
        }
        Ok(())
    }

    /// The name of the patterns by which text is cut.
    fn pre(&self) -> Result<&'static str, FileError> {
        let normalizer = &self.json["normalizer"];
        let is_nothing = normalizer["normalizers"].as_array().is_some_and(Vec::is_empty);
        // llama.cpp leaves out NFC, which changes little text.
        if !(normalizer.is_null() || normalizer["type"] == "NFC" || is_nothing) {
            let kind = shown(&normalizer["type"]).to_string();
            return Err(self.error(format!("normalizer {kind} has no counterpart in GGUF")));
        }
        let mut patterns = vec![];
        let whole_words = self.json["model"]["ignore_merges"] == Json::Bool(true);
        cuts(&self.json["pre_tokenizer"], &mut patterns)
            .and_then(|()| byte_level::pre_name(&patterns, whole_words))
            .ok_or_else(|| {
                self.error("tokenizer.ggml.pre has no name for how its pre_tokenizer cuts text, so it cannot be written to GGUF")
            })
    }

    /// The tokens and their types, by id. Ids without a token, which a model may have, are made up.
    fn tokens(&self, vocab_size: usize) -> Result<(Vec<String>, Vec<i32>), FileError> {
        let mut tokens: Vec<_> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
        let mut kinds = vec![Kind::Unused as i32; vocab_size];
        let mut set = |token: &str, id: &Json, kind: Kind| {
            let slot = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|&id| id < vocab_size);
            let slot = slot.ok_or_else(|| {
                let token = shown(token);
                self.error(format!("token {token} has id {id}, but the model has {vocab_size} embeddings"))
            })?;
            (tokens[slot], kinds[slot]) = (token.to_string(), kind as i32);
            Ok::<_, FileError>(())
        };
        for (token, id) in self.json["model"]["vocab"].as_object().into_iter().flatten() {
            set(token, id, Kind::Normal)?;
        }
        for added in self.json["added_tokens"].as_array().into_iter().flatten() {
            let content = added["content"].as_str().unwrap_or_default();
            match added["special"] == Json::Bool(true) || looks_special(content) {
                true => set(content, &added["id"], Kind::Control)?,
                false => set(&content.replace('\u{2581}', " "), &added["id"], Kind::UserDefined)?,
            }
        }
        Ok((tokens, kinds))
    }

    fn merges(&self) -> Vec<String> {
        let merge = |merge: &Json| match merge {
            // The first line of merges.txt, which early files have here.
            Json::String(line) => (!line.starts_with("#version")).then(|| line.clone()),
            // Spaces between the parts separate them.
            pair => Some(format!("{} {}", spelled(&pair[0])?, spelled(&pair[1])?)),
        };
        let spelled = self.json["model"]["merges"].as_array().into_iter().flatten();
        spelled.filter_map(merge).collect()
    }

    /// The ids of special tokens, and which of them are put around a text.
    fn special_tokens(&mut self, vocab_size: usize) -> Result<(), FileError> {
        let file = self.checkpoint.path().join("tokenizer_config.json");
        let mut named = BTreeMap::new();
        for (name, _) in SPECIAL {
            if let Some(token) = special_token(&file, &self.settings, &format!("{name}_token"))? {
                named.insert(name, token);
            }
        }
        let mut around = self.around(&mut named)?;
        let config = self.checkpoint.config()?;
        let id_of = |token: &String| {
            let added =
                self.json["added_tokens"].as_array()?.iter().find(|added| added["content"] == **token)?;
            added["id"].as_u64()
        };
        let in_config = |name: &str| {
            let key = format!("{name}_token_id");
            let id = config.get(&key).filter(|id| !id.is_null());
            id.or_else(|| config.get("text_config")?.get(&key)).and_then(Json::as_u64)
        };
        // Those of tokenizer_config.json come first.
        let mut ids = vec![];
        for (name, key) in SPECIAL {
            ids.extend(named.get(name).and_then(id_of).map(|id| (key, id)));
        }
        for (name, key) in SPECIAL {
            let known = ids.iter().any(|(other, _)| *other == key);
            ids.extend(in_config(name).filter(|_| !known).map(|id| (key, id)));
        }
        for (name, _) in SPECIAL {
            let flag = self.settings[format!("add_{name}_token")].as_bool();
            if let Some(flag) = flag.filter(|_| !around.iter().any(|(other, _)| *other == name)) {
                around.push((name, flag));
            }
        }
        for (key, id) in ids {
            match u32::try_from(id) {
                Ok(small) if (small as usize) < vocab_size => {
                    self.put(&format!("ggml.{key}_token_id"), Value::U32(small))
                }
                _ => {
                    return Err(
                        self.error(format!("{key} is token {id}, but the model has {vocab_size} embeddings"))
                    );
                }
            }
        }
        // GGUF has a key for these alone.
        for (name, flag) in around.into_iter().filter(|(name, _)| ["bos", "eos", "sep"].contains(name)) {
            self.put(&format!("ggml.add_{name}_token"), Value::Bool(flag));
        }
        Ok(())
    }

    /// Whether bos, eos and sep are put around texts, as the post-processor has it. A token that the settings do not
    /// name, but that stands where bos or eos does, is added to `named`.
    fn around(
        &self,
        named: &mut BTreeMap<&'static str, String>,
    ) -> Result<Vec<(&'static str, bool)>, FileError> {
        let processor = &self.json["post_processor"];
        let alone = std::slice::from_ref(processor);
        let mut around = BTreeMap::new();
        for step in processor["processors"].as_array().map_or(alone, Vec::as_slice) {
            match step["type"].as_str() {
                None => {}
                Some("ByteLevel") => {
                    for name in ["bos", "eos"] {
                        around.entry(name).or_insert(false);
                    }
                }
                Some("TemplateProcessing") => self.template(step, named, &mut around)?,
                Some(other) => {
                    let problem = format!("post_processor {} has no counterpart in GGUF", shown(other));
                    return Err(self.error(problem));
                }
            }
        }
        Ok(["bos", "eos", "sep"].into_iter().filter_map(|name| Some((name, *around.get(name)?))).collect())
    }

    fn template(
        &self,
        step: &Json,
        named: &mut BTreeMap<&'static str, String>,
        around: &mut BTreeMap<&'static str, bool>,
    ) -> Result<(), FileError> {
        let special = |piece: Option<&Json>| piece?["SpecialToken"]["id"].as_str().map(str::to_string);
        let single = step["single"].as_array().map_or(&[][..], Vec::as_slice);
        let ends =
            if single.len() > 1 { [special(single.first()), special(single.last())] } else { [None, None] };
        for (name, token) in ["bos", "eos"].into_iter().zip(&ends) {
            let Some(token) = token else { continue };
            let known = named.entry(name).or_insert_with(|| token.clone());
            if known != token {
                let (token, known) = (shown(token), shown(known));
                let problem = format!(
                    "its post_processor puts {token} around texts, but {name} is {known}: GGUF cannot say that"
                );
                return Err(FileError::tokenizer(&self.file, problem));
            }
            around.insert(name, true);
        }
        let pair = step["pair"].as_array().map_or(&[][..], Vec::as_slice);
        let start = usize::from(ends[0].is_some() && special(pair.first()) == ends[0]);
        let end = pair.len() - usize::from(ends[1].is_some() && special(pair.last()) == ends[1]);
        if let Some([first, between @ .., last]) = pair.get(start..end)
            && first["Sequence"]["id"] == "A"
            && last["Sequence"]["id"] == "B"
            && !between.is_empty()
        {
            let is_separator = |piece: &Json| {
                let token = special(Some(piece));
                token.is_some() && [named.get("sep"), named.get("eos")].contains(&token.as_ref())
            };
            let separates = is_separator(&between[0]) && ends[1].is_none()
                || between.len() == 2 && is_separator(&between[1]);
            around.insert("sep", separates);
        }
        Ok(())
    }

    fn chat_template(&mut self) -> Result<(), FileError> {
        if self.settings.is_null() {
            return Ok(());
        }
        let beside = self.checkpoint.path().join("chat_template.jinja");
        let own = self.settings.get("chat_template").filter(|template| !template.is_null()).cloned();
        let template = match own {
            Some(template) => template,
            None if beside.exists() => {
                let text = String::from_utf8(read(&beside, limit::TEMPLATE)?);
                text.map_err(|_| self.error("chat_template.jinja is not UTF-8"))?.into()
            }
            None => match self.checkpoint.json("chat_template.json")? {
                Some((_, json)) => json["chat_template"].clone(),
                None => return Ok(()),
            },
        };
        let default = template.as_array().into_iter().flatten().find(|named| named["name"] == "default");
        let text = template.as_str().or_else(|| default?["template"].as_str()).map(str::to_string);
        if let Some(text) = text {
            self.put("chat_template", Value::String(text));
        }
        Ok(())
    }
}

/// The patterns of a pre-tokenizer; `None` for steps that are no patterns.
fn cuts(step: &Json, patterns: &mut Vec<String>) -> Option<()> {
    match step["type"].as_str()? {
        "Sequence" => step["pretokenizers"].as_array()?.iter().try_for_each(|step| cuts(step, patterns)),
        "Split" if step["behavior"] == "Isolated" && step["invert"] == Json::Bool(false) => {
            patterns.push(step["pattern"]["Regex"].as_str()?.to_string());
            Some(())
        }
        "Digits" if step["individual_digits"] == Json::Bool(true) => {
            patterns.push(r"\p{N}".into());
            Some(())
        }
        "ByteLevel" if step["add_prefix_space"] == Json::Bool(false) => {
            if step["use_regex"] != Json::Bool(false) {
                patterns.push(GPT_2.into());
            }
            Some(())
        }
        _ => None,
    }
}

/// Half of a merge. A space in it would be taken for what stands between the halves.
fn spelled(token: &Json) -> Option<String> {
    Some(token.as_str()?.replace(' ', "\u{120}"))
}

/// Whether an added token is for control, although its file does not say so.
fn looks_special(token: &str) -> bool {
    let brackets = [("<|", "|>"), ("<｜", "｜>"), ("<unused", ">")];
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&token)
        || brackets.iter().any(|(start, end)| token.starts_with(start) && token.ends_with(end))
}
