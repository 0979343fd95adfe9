//! A directory's tokenizer as `tokenizer.ggml.*`, the inverse of what this module reads: for
//! byte-level BPE whose cuts have a name in `tokenizer.ggml.pre`, for SentencePiece's BPE and Gemma
//! 4's.
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `conversion/base.py`, `get_vocab_base` and
//! `_create_vocab_sentencepiece`, and `gguf-py/gguf/vocab.py`, `SpecialVocab`. The converter knows
//! cuts by a hash of what they do to a text; here they are known by their patterns. It takes scores
//! from tokenizer.model; here they follow from tokenizer.json's merges.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use ahash::AHashMap;
use serde_json::Value as Json;
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedToken, Model};

use super::sentencepiece::SPACE;
use super::sentencepiece::write::{Spaces, is_byte, scores};
use super::{GEMMA_4, GPT_2, Kind, Merge, Vocabulary, byte_level, gemma4};
use crate::chat::named::{self, Named};
use crate::gguf::{Array, Metadata, Value};
use crate::tokenizer::GgufTokenizer;
use crate::tokenizer::huggingface::Directory;
use crate::tokenizer::limit::TOKENS as MOST_TOKENS;
use crate::{ChatTemplate, Checkpoint, FileError, shown};

/// Special tokens, as tokenizer_config.json and config.json call them, and as GGUF does (with its
/// spelling).
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
) -> Result<GgufTokenizer, FileError> {
    // Checks all of the file.
    let directory = Directory::read(checkpoint)?;
    let file = directory.engine.file().to_path_buf();
    let json = serde_json::from_slice(&directory.bytes).map_err(FileError::json(&file))?;
    let settings = checkpoint.tokenizer_config()?.map_or(&Json::Null, |(_, settings)| settings);
    let mut source = Source { checkpoint, directory, file, json, settings, made: GgufTokenizer::default() };
    let adds_bos = source.vocabulary(vocab_size)?;
    source.special_tokens(vocab_size, adds_bos)?;
    source.chat_templates()?;
    source.ends(vocab_size)?;
    source.bos_of_chats()?;
    Ok(source.made)
}

struct Source<'a> {
    checkpoint: &'a Checkpoint,
    /// The tokenizer as it runs.
    directory: Directory,
    file: PathBuf,
    /// tokenizer.json.
    json: Json,
    /// tokenizer_config.json.
    settings: &'a Json,
    made: GgufTokenizer,
}

impl Source<'_> {
    fn error(&self, problem: impl std::fmt::Display) -> FileError {
        FileError::tokenizer(&self.file, problem)
    }

    fn put(&mut self, key: &str, value: Value) {
        self.made.entries.push((format!("tokenizer.{key}"), value));
    }

    fn warn(&mut self, problem: impl std::fmt::Display) {
        self.made.warnings.push(format!("{}: {problem}", shown(self.file.display())));
    }

    /// Returns whether a text starts with bos where the metadata does not say.
    fn vocabulary(&mut self, vocab_size: usize) -> Result<bool, FileError> {
        if vocab_size > MOST_TOKENS {
            return Err(
                self.error(format!("{vocab_size} tokens are wanted; at most {MOST_TOKENS} are supported"))
            );
        }
        let model = &self.json["model"];
        let kind = model["type"].as_str().unwrap_or("BPE");
        if kind != "BPE" {
            return Err(self.error(format!(
                "only tokenizers of kind BPE are written to GGUF, and this is {}",
                shown(kind)
            )));
        }
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if let Some(text) = model[key].as_str().filter(|text| !text.is_empty()) {
                return Err(self.error(format!("model.{key} {} has no counterpart in GGUF", shown(text))));
            }
        }
        match self.is_sentencepiece() {
            true if self.is_gemma4() => self.gemma4(vocab_size),
            true => self.sentencepiece(vocab_size),
            false => self.byte_level(vocab_size),
        }
    }

    fn is_sentencepiece(&self) -> bool {
        self.json["model"]["byte_fallback"] == Json::Bool(true)
    }

    /// True if it is a model's whose tokenizer llama.cpp reads by its merges.
    fn is_gemma4(&self) -> bool {
        let model_type = self.checkpoint.config().ok().and_then(|config| config["model_type"].as_str());
        model_type.is_some_and(|name| name.starts_with("gemma4"))
    }

    fn gemma4(&mut self, vocab_size: usize) -> Result<bool, FileError> {
        /// llama.cpp's converter's, which nobody reads.
        const SCORE: f32 = -1000.0;
        gemma4::check(&self.json).map_err(|error| self.error(error))?;
        let (tokens, mut kinds) = self.tokens(vocab_size)?;
        for (token, kind) in tokens.iter().zip(&mut kinds) {
            if gemma4::VISIBLE.contains(&token.as_str()) {
                *kind = Kind::UserDefined as i32;
            }
        }
        let crossing = self.merges().find(|merge| gemma4::crosses_lines(*merge));
        if let Some(merge) = crossing.map(|(left, right)| shown(format!("{left}{right}")).to_string()) {
            self.warn(format!(
                "llama.cpp joins nothing across line breaks, as {merge} is: some texts get other tokens"
            ));
        }
        let merges: Vec<String> = self.merges().map(|(left, right)| format!("{left} {right}")).collect();
        let scores = vec![SCORE; tokens.len()];
        self.put("ggml.add_space_prefix", Value::Bool(false));
        self.put("ggml.model", Value::String(GEMMA_4.into()));
        self.put("ggml.tokens", Value::Array(Array::String(tokens)));
        self.put("ggml.scores", Value::Array(Array::F32(scores)));
        self.put("ggml.token_type", Value::Array(Array::I32(kinds)));
        self.put("ggml.merges", Value::Array(Array::String(merges)));
        Ok(true)
    }

    fn byte_level(&mut self, vocab_size: usize) -> Result<bool, FileError> {
        let pre = self.pre()?;
        let (tokens, kinds) = self.tokens(vocab_size)?;
        // Spaces between the parts separate them.
        let spelled = |token: &str| token.replace(' ', "\u{120}");
        let merge = |(left, right): Merge<'_>| format!("{} {}", spelled(left), spelled(right));
        let merges: Vec<String> = self.merges().map(merge).collect();
        if let Some(prefix) = self.stated_prefix() {
            self.put("ggml.add_space_prefix", Value::Bool(prefix));
        }
        self.put("ggml.model", Value::String("gpt2".into()));
        self.put("ggml.pre", Value::String(pre.into()));
        self.put("ggml.tokens", Value::Array(Array::String(tokens)));
        self.put("ggml.token_type", Value::Array(Array::I32(kinds)));
        if !merges.is_empty() {
            self.put("ggml.merges", Value::Array(Array::String(merges)));
        }
        Ok(byte_level::adds_bos(pre))
    }

    fn sentencepiece(&mut self, vocab_size: usize) -> Result<bool, FileError> {
        if self.json["model"]["ignore_merges"] == Json::Bool(true) {
            return Err(self.error("model.ignore_merges has no counterpart in GGUF's llama tokenizers"));
        }
        let Spaces { prefix, differences } = Spaces::read(&self.json).map_err(|error| self.error(error))?;
        let (tokens, kinds) = self.tokens(vocab_size)?;
        let added = self.added();
        let vocab = self.json["model"]["vocab"].as_object().into_iter().flatten();
        let vocab: HashMap<&str, u32> = vocab
            .filter_map(|(token, id)| Some((token.as_str(), u32::try_from(id.as_u64()?).ok()?)))
            .collect();
        let merges: Vec<Merge<'_>> = self.merges().collect();
        let scores = scores(&vocab, &merges, |token| added.contains(token), vocab_size)
            .map_err(|error| self.error(error))?;
        for difference in differences {
            self.warn(format!("in GGUF {difference}, which this tokenizer does not do"));
        }
        // A space is put before texts where the metadata does not say.
        if !prefix || self.stated_prefix().is_some() {
            self.put("ggml.add_space_prefix", Value::Bool(prefix));
        }
        self.put("ggml.model", Value::String("llama".into()));
        self.put("ggml.pre", Value::String("default".into()));
        self.put("ggml.tokens", Value::Array(Array::String(tokens)));
        self.put("ggml.scores", Value::Array(Array::F32(scores)));
        self.put("ggml.token_type", Value::Array(Array::I32(kinds)));
        Ok(true)
    }

    /// `add_prefix_space` of tokenizer_config.json where the converter writes it: for Llama alone.
    fn stated_prefix(&self) -> Option<bool> {
        let model_type = self.checkpoint.config().ok()?["model_type"].as_str();
        let prefix = self.settings["add_prefix_space"].as_bool();
        prefix.filter(|_| matches!(model_type, Some("llama" | "mistral")))
    }

    /// The name of the patterns by which text is cut.
    fn pre(&mut self) -> Result<&'static str, FileError> {
        let normalizer = &self.json["normalizer"];
        let is_nothing = normalizer["normalizers"].as_array().is_some_and(Vec::is_empty);
        if normalizer["type"] == "NFC" {
            // llama.cpp's converter leaves it out, too: most text is in this form already.
            self.warn(
                "normalizer NFC has no counterpart in GGUF: left out, so text that is not in Unicode's NFC gets other tokens",
            );
        } else if !(normalizer.is_null() || is_nothing) {
            let kind = shown(&normalizer["type"]).to_string();
            return Err(self.error(format!("normalizer {kind} has no counterpart in GGUF")));
        }
        let mut patterns = vec![];
        let whole_words = self.json["model"]["ignore_merges"] == Json::Bool(true);
        let nameless = || {
            self.error("tokenizer.ggml.pre has no name for how its pre_tokenizer cuts text, so it cannot be written to GGUF")
        };
        cuts(&self.json["pre_tokenizer"], &mut patterns).ok_or_else(nameless)?;
        if let Some(name) = byte_level::pre_name(&patterns, whole_words) {
            return Ok(name);
        }
        // A name with the other rule for words that are tokens says the same where merges lead to
        // each token.
        let name = byte_level::pre_name(&patterns, !whole_words).ok_or_else(nameless)?;
        match self.unmerged()? {
            None => Ok(name),
            Some(token) => Err(self.error(format!(
                "tokenizer.ggml.pre {name} cuts text as its pre_tokenizer does, but with model.ignore_merges {}, which \
                 matters for {}: no merges lead to it",
                !whole_words,
                shown(token)
            ))),
        }
    }

    /// The tokens that are found in a text before it is cut.
    fn added(&self) -> HashSet<&str> {
        self.directory.engine.added_tokens().map(|(_, token)| token.content.as_str()).collect()
    }

    /// A token that merges do not make of its bytes, though they should.
    fn unmerged(&self) -> Result<Option<&str>, FileError> {
        let vocab = self.json["model"]["vocab"].as_object().into_iter().flatten();
        let vocab: AHashMap<String, u32> = vocab
            .filter_map(|(token, id)| Some((token.clone(), u32::try_from(id.as_u64()?).ok()?)))
            .collect();
        let merges = self.merges().map(|(left, right)| (left.to_string(), right.to_string())).collect();
        let model = BPE::builder().vocab_and_merges(vocab, merges).cache_capacity(0).build();
        let model = model.map_err(|error| self.error(error))?;
        let added = self.added();
        let vocab = self.json["model"]["vocab"].as_object().into_iter().flatten();
        for (token, id) in vocab.filter(|(token, _)| !added.contains(token.as_str())) {
            let made = model.tokenize(token).map_err(|error| self.error(error))?;
            if !matches!(&made[..], [only] if u64::from(only.id) == id.as_u64().unwrap_or(u64::MAX)) {
                return Ok(Some(token));
            }
        }
        Ok(None)
    }

    /// The tokens and their types, by id. Ids without a token, which a model may have, are made up.
    fn tokens(&mut self, vocab_size: usize) -> Result<(Vec<String>, Vec<i32>), FileError> {
        let mut tokens: Vec<_> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
        let mut kinds = vec![Kind::Unused as i32; vocab_size];
        let mut set = |token: &str, id: Option<u64>, kind: Kind| {
            let slot = id.and_then(|id| usize::try_from(id).ok()).filter(|&id| id < vocab_size);
            let slot = slot.ok_or_else(|| {
                let token = shown(token);
                let id = id.unwrap_or_default();
                self.error(format!("token {token} has id {id}, but the model has {vocab_size} embeddings"))
            })?;
            (tokens[slot], kinds[slot]) = (token.to_string(), kind as i32);
            Ok::<_, FileError>(())
        };
        let is_sentencepiece = self.is_sentencepiece();
        let is_unknown = |token: &str| is_sentencepiece && self.json["model"]["unk_token"] == *token;
        let added = self.added();
        let vocab = self.json["model"]["vocab"].as_object().into_iter().flatten();
        for (token, id) in vocab.filter(|(token, _)| !added.contains(token.as_str())) {
            let kind = match is_sentencepiece {
                true if is_byte(token) => Kind::Byte,
                true if is_unknown(token) => Kind::Unknown,
                _ => Kind::Normal,
            };
            set(token, id.as_u64(), kind)?;
        }
        let in_file = |id: u32| {
            self.json["added_tokens"]
                .as_array()
                .is_some_and(|added| added.iter().any(|added| added["id"] == id))
        };
        let (mut without_embedding, mut respelled, mut taking) = (vec![], vec![], vec![]);
        for (id, token) in self.directory.engine.added_tokens() {
            let AddedToken { content, special, lstrip, rstrip, single_word, .. } = token;
            // A name for a token that the model does not have, such as pad_token, does no harm
            // until it is written in a text.
            if id as usize >= vocab_size && !in_file(id) {
                without_embedding.push((id, shown(content).to_string()));
                continue;
            }
            if is_unknown(content) && self.settings["added_tokens_decoder"].get(id.to_string()).is_none() {
                set(content, Some(id.into()), Kind::Unknown)?;
            } else if *special || looks_special(content) {
                set(content, Some(id.into()), Kind::Control)?;
            } else {
                set(&content.replace(SPACE, " "), Some(id.into()), Kind::UserDefined)?;
                if content.contains(SPACE) {
                    respelled.push((id, content.clone()));
                }
            }
            if *lstrip || *rstrip || *single_word {
                taking.push((id, content.clone()));
            }
        }
        self.warn_of(
            respelled,
            &format!("spelled with spaces for {SPACE}, so a text that has {SPACE} itself gets other tokens"),
        );
        self.warn_of(taking, "GGUF has no place for lstrip, rstrip and single_word: left out, so spaces beside such a token become tokens, or it is found inside a word");
        without_embedding.sort();
        for (id, token) in without_embedding {
            self.warn(format!(
                "token {token} has id {id}, but the model has {vocab_size} embeddings: left out"
            ));
        }
        Ok((tokens, kinds))
    }

    /// Says what holds of `tokens`, if any, with the first of them.
    fn warn_of(&mut self, mut tokens: Vec<(u32, String)>, problem: &str) {
        tokens.sort();
        if let [(_, first), more @ ..] = &tokens[..] {
            let first = shown(first).to_string();
            let tokens = match more.len() {
                0 => format!("added token {first}"),
                more => format!("added token {first} and {more} more"),
            };
            self.warn(format!("{tokens}: {problem}"));
        }
    }

    /// Pairs of tokens, the first to be joined first.
    fn merges(&self) -> impl Iterator<Item = Merge<'_>> {
        fn pair(merge: &Json) -> Option<Merge<'_>> {
            match merge {
                // The first line of merges.txt, which early files have here.
                Json::String(line) => line.split_once(' ').filter(|_| !line.starts_with("#version")),
                pair => Some((pair[0].as_str()?, pair[1].as_str()?)),
            }
        }
        self.json["model"]["merges"].as_array().into_iter().flatten().filter_map(pair)
    }

    /// The ids of special tokens, and which of them are put around a text.
    fn special_tokens(&mut self, vocab_size: usize, adds_bos: bool) -> Result<(), FileError> {
        let spelling = |name: &str| self.directory.declared.special(&format!("{name}_token"));
        let mut named: BTreeMap<&'static str, String> =
            SPECIAL.into_iter().filter_map(|(name, _)| Some((name, spelling(name)?.to_string()))).collect();
        let mut around = self.around(&mut named)?;
        let config = self.checkpoint.config()?;
        let has_embedding = |id: &u32| (*id as usize) < vocab_size;
        let id_of = |token: &String| self.directory.engine.id(token).filter(has_embedding).map(u64::from);
        let in_config = |name: &str| {
            let key = format!("{name}_token_id");
            let id = config.get(&key).filter(|id| !id.is_null());
            id.or_else(|| config.get("text_config")?.get(&key)).and_then(Json::as_u64)
        };
        // Those that the tokenizer's own files name come first.
        let mut ids = vec![];
        for (name, key) in SPECIAL {
            ids.extend(named.get(name).and_then(id_of).map(|id| (key, id)));
        }
        ids.extend(named.get("eot").and_then(id_of).map(|id| ("eot", id)));
        for (name, key) in SPECIAL {
            let known = ids.iter().any(|(other, _)| *other == key);
            ids.extend(in_config(name).filter(|_| !known).map(|id| (key, id)));
        }
        // Tokens that tokenizer.json does not put around a text are not added at run time either,
        // whatever tokenizer_config.json says.
        for name in ["bos", "eos"] {
            let is_said = self.settings[format!("add_{name}_token")].is_boolean();
            let by_default = name == "bos" && adds_bos;
            if (is_said || by_default) && !around.iter().any(|(other, _)| *other == name) {
                around.push((name, false));
            }
        }
        if let Some(flag) = self.settings["add_sep_token"].as_bool()
            && !around.iter().any(|(name, _)| *name == "sep")
        {
            around.push(("sep", flag));
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

    /// The flags for bos, eos and sep around texts, as the post-processor has it. A token that the
    /// settings do not name, but that stands where bos or eos does, is added to `named`.
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
            if known != token && name == "eos" {
                // As the converter has it: the token that ends texts is eos, and the one with that
                // name ends turns.
                let turn = std::mem::replace(known, token.clone());
                named.insert("eot", turn);
            } else if known != token {
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

    /// Gives the tokens that end a text, but are not known by their spelling, the names that are
    /// left: `eot` and `eom`.
    fn ends(&mut self, vocab_size: usize) -> Result<(), FileError> {
        let mut metadata = Metadata::new(self.file.as_path().into());
        for (key, value) in &self.made.entries {
            metadata.insert(key.clone(), value.clone()).map_err(|error| self.error(error))?;
        }
        let known = Vocabulary::new(&metadata)?.ends;
        let mut ends = self.checkpoint.generation_config()?.eos_token_ids;
        ends.extend(self.directory.special_id("eos_token"));
        ends.sort_unstable();
        ends.dedup();
        let is_free = |name: &&str| metadata.value(&format!("tokenizer.ggml.{name}_token_id")).is_none();
        let mut names = ["eot", "eom"].into_iter().filter(is_free);
        for id in ends.into_iter().filter(|id| (*id as usize) < vocab_size && !known.contains(id)) {
            match names.next() {
                Some(name) => self.put(&format!("ggml.{name}_token_id"), Value::U32(id)),
                None => {
                    self.warn(format!("token {id} ends a text, but GGUF has no name left for it: left out"))
                }
            }
        }
        Ok(())
    }

    /// llama.cpp puts bos before chats, too, where it stands before texts; here only templates do.
    fn bos_of_chats(&mut self) -> Result<(), FileError> {
        let Directory { engine, declared, .. } = &self.directory;
        let first = engine.encode("", true)?.first().copied();
        if let (Some(bos), Some(template)) =
            (declared.special("bos_token"), ChatTemplate::from_checkpoint(self.checkpoint)?)
            && engine.id(bos) == first
            && template.begins_with(bos) == Some(false)
        {
            let bos = shown(bos).to_string();
            self.warn(format!(
                "GGUF chats begin with {bos}, as texts do, which the chat template does not write"
            ));
        }
        Ok(())
    }

    /// The templates that run, under names that are letters, digits and `_`, as those of the
    /// converter are.
    fn chat_templates(&mut self) -> Result<(), FileError> {
        let mut names: Vec<String> = vec![];
        for Named { name, source, file } in named::all(self.checkpoint)? {
            if name == named::DEFAULT {
                self.put("chat_template", Value::String(source));
                continue;
            }
            let key: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
            if names.contains(&key) || key == named::TOOL_USE && key != name {
                let problem = format!("template {name} would be called {key} in GGUF, as another one is");
                return Err(FileError::Template { file, problem });
            }
            self.put(&format!("chat_template.{key}"), Value::String(source));
            names.push(key);
        }
        if !names.is_empty() {
            self.put("chat_templates", Value::Array(Array::String(names)));
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

/// True if an added token looks like a control token, although its file does not say so.
fn looks_special(token: &str) -> bool {
    let brackets = [("<|", "|>"), ("<｜", "｜>"), ("<unused", ">")];
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&token)
        || brackets.iter().any(|(start, end)| token.starts_with(start) && token.ends_with(end))
}
