//! A tokenizer from GGUF's `tokenizer.ggml.*`, for the models `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE).
//!
//! Source: llama.cpp's `llama-vocab.cpp`, autumn 2026.

mod byte_level;
mod sentencepiece;

use std::collections::HashMap;

use tokenizers::AddedToken;

use super::{SpecialTokens, Tokenizer};
use crate::FileError;
use crate::gguf::Metadata;

pub(super) fn load(metadata: &Metadata) -> Result<Tokenizer, FileError> {
    let vocabulary = Vocabulary::new(metadata)?;
    let (mut inner, defaults) = match metadata.get::<&str>("tokenizer.ggml.model")? {
        "gpt2" => byte_level::build(&vocabulary)?,
        "llama" => sentencepiece::build(&vocabulary)?,
        other => {
            let problem =
                format!("tokenizer.ggml.model {other:?} is not supported; supported are gpt2 and llama");
            return Err(vocabulary.error(problem));
        }
    };
    let control = vocabulary.added_tokens(|kind| matches!(kind, Kind::Control | Kind::Unknown), true);
    let user_defined = vocabulary.added_tokens(|kind| kind == Kind::UserDefined, false);
    inner.add_special_tokens(&control);
    inner.add_tokens(&user_defined);

    let bos = vocabulary.special_id("bos")?.or(defaults.bos);
    let eos = vocabulary.special_id("eos")?.or(defaults.eos);
    let mut special = SpecialTokens { bos, eos, eos_ids: vocabulary.end_ids()?, ..Default::default() };
    if metadata.find("tokenizer.ggml.add_bos_token")?.unwrap_or(defaults.add_bos) {
        special.before =
            Some(bos.ok_or_else(|| vocabulary.error("add_bos_token is set, but there is no bos"))?);
    }
    if metadata.find("tokenizer.ggml.add_eos_token")?.unwrap_or(false) {
        special.after =
            Some(eos.ok_or_else(|| vocabulary.error("add_eos_token is set, but there is no eos"))?);
    }
    Tokenizer::new(inner, metadata.file().into(), special)
}

/// What holds where the metadata does not say.
struct Defaults {
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
}

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
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

/// Tokens that end a turn, whatever the metadata calls them: converters often leave out eot.
const ENDS: [&str; 8] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<EOT>",
];

/// The tokens, checked against each other.
struct Vocabulary<'a> {
    metadata: &'a Metadata,
    tokens: Vec<String>,
    kinds: Vec<Kind>,
    ids: HashMap<String, u32>,
}

impl<'a> Vocabulary<'a> {
    fn new(metadata: &'a Metadata) -> Result<Self, FileError> {
        let key = "tokenizer.ggml.tokens";
        let error = |problem: String| FileError::tokenizer(metadata.file(), problem);
        let mut tokens = metadata.get::<&[String]>(key)?.to_vec();
        for (id, token) in tokens.iter_mut().enumerate().filter(|(_, token)| token.is_empty()) {
            *token = format!("[EMPTY_{id}]");
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in (0..).zip(&tokens) {
            if let Some(first) = ids.insert(token.clone(), id) {
                return Err(error(format!("{key}: {token:?} is both token {first} and token {id}")));
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
        let mut vocabulary = Self { metadata, tokens, kinds, ids };
        for end in ENDS {
            if let Some(&id) = vocabulary.ids.get(end) {
                vocabulary.kinds[id as usize] = Kind::Control;
            }
        }
        Ok(vocabulary)
    }

    fn error(&self, problem: impl ToString) -> FileError {
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

    fn end_ids(&self) -> Result<Vec<u32>, FileError> {
        let mut ids: Vec<u32> = ENDS.iter().filter_map(|end| self.id(end)).collect();
        for name in ["eot", "eom"] {
            ids.extend(self.special_id(name)?);
        }
        Ok(ids)
    }

    fn added_tokens(&self, choose: impl Fn(Kind) -> bool, special: bool) -> Vec<AddedToken> {
        let chosen = self.tokens.iter().zip(&self.kinds).filter(|(_, kind)| choose(**kind));
        chosen.map(|(token, _)| AddedToken::from(token.clone(), special).normalized(false)).collect()
    }
}
