//! A tokenizer from GGUF's `tokenizer.ggml.*`, for the models `gpt2` (byte-level BPE), `llama`
//! (SentencePiece BPE) and `gemma4` (BPE of characters).
//!
//! Source: llama.cpp's `llama-vocab.cpp`, autumn 2026.

mod byte_level;
mod description;
mod ends;
mod export;
mod gemma4;
mod sentencepiece;
mod write;

use std::collections::HashMap;

use ahash::AHashMap;
use tokenizers::AddedToken;
use tokenizers::models::bpe::BpeBuilder;

use super::engine::Engine;
use super::steps::{Inner, TimedModel};
use super::{SpecialTokens, Tokenizer, json, limit};
use crate::gguf::Metadata;
use crate::{FileError, shown};

pub(super) use byte_level::GPT_2;
#[cfg(test)]
pub(super) use byte_level::pre_names;
pub(super) use export::companions;
pub(super) use write::entries;

pub(super) fn load(metadata: &Metadata) -> Result<Tokenizer, FileError> {
    let vocabulary = Vocabulary::new(metadata)?;
    let mut defaults = Defaults { bos: None, eos: None, add_bos: false };
    let engine = Engine::load(metadata.file(), || {
        let mut inner = match metadata.get::<&str>("tokenizer.ggml.model")? {
            "gpt2" => byte_level::build(&vocabulary, &mut defaults)?,
            "llama" => sentencepiece::build(&vocabulary, &mut defaults)?,
            GEMMA_4 => gemma4::build(&vocabulary, &mut defaults)?,
            other => {
                let other = shown(other);
                let problem = format!(
                    r#"tokenizer.ggml.model "{other}" is not supported; supported are gpt2, llama and gemma4"#
                );
                return Err(vocabulary.error(problem));
            }
        };
        let control = vocabulary.added_tokens(|kind| matches!(kind, Kind::Control | Kind::Unknown), true);
        let user_defined = vocabulary.added_tokens(|kind| kind == Kind::UserDefined, false);
        inner.add_tokens(control.chain(user_defined)).map_err(|error| vocabulary.error(error))?;
        Ok(inner)
    })?;

    let bos = vocabulary.special_id("bos")?.or(defaults.bos);
    let eos = vocabulary.special_id("eos")?.or(defaults.eos);
    let eos_ids = vocabulary.ends.clone();
    let mut special = SpecialTokens { bos, eos, eos_ids, around_chats: true, ..Default::default() };
    // llama.cpp does not obey a file of Gemma 4 that says no.
    let always = metadata.find::<&str>("tokenizer.ggml.model")? == Some(GEMMA_4);
    if metadata.find("tokenizer.ggml.add_bos_token")?.unwrap_or(defaults.add_bos) || always {
        special.before =
            Some(bos.ok_or_else(|| vocabulary.error("add_bos_token is set, but there is no bos"))?);
    }
    if metadata.find("tokenizer.ggml.add_eos_token")?.unwrap_or(false) {
        special.after =
            Some(eos.ok_or_else(|| vocabulary.error("add_eos_token is set, but there is no eos"))?);
    }
    Ok(Tokenizer::new(engine, special))
}

/// `tokenizer.ggml.model` of Gemma 4's.
const GEMMA_4: &str = "gemma4";

/// Two tokens that are joined to one.
type Merge<'a> = (&'a str, &'a str);

/// The values where the metadata does not say.
struct Defaults {
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
}

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal = 1,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    fn from_number(number: i32) -> Option<Self> {
        match number {
            1 => Some(Self::Normal),
            2 => Some(Self::Unknown),
            3 => Some(Self::Control),
            4 => Some(Self::UserDefined),
            5 => Some(Self::Unused),
            6 => Some(Self::Byte),
            _ => None,
        }
    }
}

/// The tokens, checked against each other.
struct Vocabulary<'a> {
    metadata: &'a Metadata,
    tokens: Vec<String>,
    kinds: Vec<Kind>,
    ids: HashMap<String, u32>,
    /// Those that end a text or a turn.
    ends: Vec<u32>,
}

impl<'a> Vocabulary<'a> {
    fn new(metadata: &'a Metadata) -> Result<Self, FileError> {
        let key = "tokenizer.ggml.tokens";
        let error = |problem: String| FileError::tokenizer(metadata.file(), problem);
        let mut tokens = metadata.get::<&[String]>(key)?.to_vec();
        for (id, token) in tokens.iter_mut().enumerate().filter(|(_, token)| token.is_empty()) {
            *token = format!("[EMPTY_{id}]");
        }
        if tokens.len() > limit::TOKENS {
            let (count, most) = (tokens.len(), limit::TOKENS);
            return Err(error(format!("{key} has {count} tokens; at most {most} are supported")));
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in (0..).zip(&tokens) {
            if let Some(first) = ids.insert(token.clone(), id) {
                return Err(error(format!(
                    r#"{key}: "{}" is both token {first} and token {id}"#,
                    shown(token)
                )));
            }
        }
        let key = "tokenizer.ggml.token_type";
        let kinds = match metadata.find::<Vec<i32>>(key)? {
            None => vec![Kind::Normal; tokens.len()],
            Some(numbers) if numbers.len() != tokens.len() => {
                return Err(error(format!(
                    "{key} has {} entries for {} tokens",
                    numbers.len(),
                    tokens.len()
                )));
            }
            Some(numbers) => numbers
                .into_iter()
                .map(|number| {
                    Kind::from_number(number).ok_or_else(|| error(format!("{key}: {number} is not 1 to 6")))
                })
                .collect::<Result<_, _>>()?,
        };
        let mut vocabulary = Self { metadata, tokens, kinds, ids, ends: vec![] };
        let eos = vocabulary.special_id("eos")?.or(sentencepiece::default_eos(&vocabulary)?);
        vocabulary.ends = vocabulary.find_ends(eos)?;
        Ok(vocabulary)
    }

    fn error(&self, problem: impl std::fmt::Display) -> FileError {
        FileError::tokenizer(self.metadata.file(), problem)
    }

    fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    /// `tokenizer.ggml.{name}_token_id`.
    fn special_id(&self, name: &str) -> Result<Option<u32>, FileError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match self.metadata.find::<u32>(&key)? {
            Some(id) if id as usize >= self.tokens.len() => {
                Err(self.error(format!("{key} is {id}, but there are {} tokens", self.tokens.len())))
            }
            id => Ok(id),
        }
    }

    fn added_tokens(&self, choose: impl Fn(Kind) -> bool, special: bool) -> impl Iterator<Item = AddedToken> {
        let chosen = self.tokens.iter().zip(&self.kinds).filter(move |(_, kind)| choose(**kind));
        chosen.map(move |(token, _)| AddedToken::from(token.clone(), special).normalized(false))
    }

    /// The model `builder` of these tokens and `merges`.
    fn model(&self, builder: BpeBuilder, merges: Vec<(String, String)>) -> Result<Inner, FileError> {
        let ids: AHashMap<_, _> = self.ids.iter().map(|(token, id)| (token.clone(), *id)).collect();
        json::check_merges(&ids, &merges, "").map_err(|error| self.error(error))?;
        let cached = ids.len().min(10_000);
        let model = builder.vocab_and_merges(ids, merges).cache_capacity(cached).build();
        Ok(Inner::new(TimedModel(model.map_err(|error| self.error(error))?.into())))
    }
}
