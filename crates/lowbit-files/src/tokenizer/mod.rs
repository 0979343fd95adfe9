//! Text to token ids and back.

mod declared;
#[cfg(test)]
mod directory_tests;
mod engine;
mod gguf;
mod guard;
mod huggingface;
mod json;
mod limit;
mod spelling;
mod steps;
mod stream;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod write_tests;

use std::path::Path;
use std::sync::Arc;

use self::engine::Engine;
use crate::gguf::{self as gguf_format, Metadata};
use crate::{Checkpoint, Companion, FileError};

pub(crate) use declared::Declared;
pub use stream::TokenStream;

/// A checkpoint's tokenizer. Clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    engine: Arc<Engine>,
    special: SpecialTokens,
}

/// A tokenizer and its chat templates as GGUF has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizer {
    /// Metadata, by key.
    pub entries: Vec<(String, gguf_format::Value)>,
    /// Things in the directory that GGUF has no place for, a sentence each.
    pub warnings: Vec<String>,
}

/// The ids of tokens with a meaning of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecialTokens {
    /// The token at the start of a text.
    pub bos: Option<u32>,
    /// The token at the end of a text.
    pub eos: Option<u32>,
    /// All that end a text or a turn, [`Self::eos`] among them; sorted.
    pub eos_ids: Vec<u32>,
    /// The tokens that [`Tokenizer::encode`] puts around a text if the tokenizer itself does not.
    before: Option<u32>,
    after: Option<u32>,
    /// True if it puts them around chats, too.
    around_chats: bool,
}

impl Tokenizer {
    /// The tokenizer of `checkpoint`: tokenizer.json, or GGUF's `tokenizer.ggml.*`.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] when it is missing or malformed.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, FileError> {
        match checkpoint.metadata() {
            Some(metadata) => Self::from_gguf(metadata),
            None => huggingface::load(checkpoint),
        }
    }

    /// The tokenizer that `tokenizer.ggml.*` describes.
    ///
    /// # Errors
    /// [`FileError::Gguf`] and [`FileError::Tokenizer`].
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, FileError> {
        gguf::load(metadata)
    }

    /// The tokenizer and chat template of the directory `checkpoint` as GGUF's `tokenizer.*`, for a
    /// model with `vocab_size` embeddings: the tokens and templates that running the directory has.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] for what GGUF has no name for: a tokenizer that is no byte-level
    /// BPE, or one that cuts text in a way that no value of `tokenizer.ggml.pre` stands for.
    pub fn gguf_entries(checkpoint: &Checkpoint, vocab_size: usize) -> Result<GgufTokenizer, FileError> {
        gguf::entries(checkpoint, vocab_size)
    }

    /// The tokenizer and the chat templates of a GGUF file as transformers' files tokenizer.json
    /// and tokenizer_config.json, for a model whose context has `model_max_length` tokens. The ids
    /// are those that [`Self::from_gguf`] makes.
    ///
    /// # Errors
    /// As [`Self::from_gguf`]; [`FileError::Tokenizer`] for more added tokens than tokenizer.json
    /// may have here.
    pub fn companions(
        metadata: &Metadata,
        model_max_length: Option<usize>,
    ) -> Result<Vec<Companion>, FileError> {
        gguf::companions(metadata, model_max_length)
    }

    /// The tokenizer that `bytes`, the content of the tokenizer.json `file`, describe, without
    /// other files' facts about special tokens.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] when it is malformed, or larger than any published one by far.
    pub fn from_json(file: &Path, bytes: &[u8]) -> Result<Self, FileError> {
        let engine = Engine::load(file, || json::load(file, bytes))?;
        Ok(Self::new(engine, SpecialTokens::default()))
    }

    fn new(engine: Engine, mut special: SpecialTokens) -> Self {
        special.eos_ids.sort_unstable();
        special.eos_ids.dedup();
        Self { engine: Arc::new(engine), special }
    }

    /// The ids of `text`. Special tokens are recognised in the text; `add_special` also puts those
    /// around it that the model expects (usually bos before).
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] when the tokenizer has no token for a part of the text, or would
    /// not terminate.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, FileError> {
        Ok(self.around(self.engine.encode(text, add_special)?, add_special))
    }

    fn around(&self, ids: Vec<u32>, add_special: bool) -> Vec<u32> {
        let SpecialTokens { before, after, .. } = self.special;
        let before = before.filter(|_| add_special);
        let after = after.filter(|_| add_special);
        before.into_iter().chain(ids).chain(after).collect()
    }

    /// The ids of `text`, which a chat template made: as transformers has it for a directory,
    /// without tokens around it; as llama.cpp's server has it for GGUF, with those that the file
    /// wants around every text, once, even if the template wrote them.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>, FileError> {
        if !self.special.around_chats {
            return self.encode(text, false);
        }
        let spelling = |id: Option<u32>| id.and_then(|id| self.token(id)).unwrap_or_default();
        let text = text.strip_prefix(&spelling(self.special.before)).unwrap_or(text);
        let text = text.strip_suffix(&spelling(self.special.after)).unwrap_or(text);
        self.encode(text, true)
    }

    /// The ids of `text` where special tokens that are spelled in it are text like any other;
    /// `add_special` is as in [`Self::encode`]. Added tokens that are not special are recognised.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_as_text(&self, text: &str, add_special: bool) -> Result<Vec<u32>, FileError> {
        Ok(self.around(self.engine.encode_as_text(text, add_special)?, add_special))
    }

    /// The text of `ids`, special tokens as they are spelled. An id without a token has no text: a
    /// model may have more rows than its tokenizer has tokens. Bytes that are no UTF-8 become
    /// U+FFFD.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] when the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, FileError> {
        self.engine.decode(ids)
    }

    /// Decodes a text token by token, as if it went on after the tokens `context` (the prompt).
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn stream(&self, context: &[u32]) -> Result<TokenStream<'_>, FileError> {
        TokenStream::new(self, context)
    }

    /// Tokens, special ones included. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.engine.tokens()
    }

    /// The id of the token spelled `token`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.engine.id(token)
    }

    /// The spelling of token `id`, in the tokenizer's own alphabet.
    pub fn token(&self, id: u32) -> Option<String> {
        self.engine.token(id)
    }

    /// The bytes that each token below `count` adds to a text: a part of a character has some, too.
    /// Special tokens have those of their spelling, ids without a token none.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn token_bytes(&self, count: usize) -> Result<Vec<Vec<u8>>, FileError> {
        self.engine.token_bytes(count)
    }

    /// True if `id` is a special token: one that stands for no text of a user's or a model's.
    pub fn is_special(&self, id: u32) -> bool {
        self.engine.is_special(id)
    }

    /// True if `id` is an added token, special or not: [`Self::encode`] gives it wherever a text
    /// spells it.
    pub fn is_added(&self, id: u32) -> bool {
        self.engine.is_added(id)
    }

    /// The token at the start of a text.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    /// True if [`Self::encode`] with `add_special` starts with bos.
    pub fn adds_bos(&self) -> bool {
        let empty = self.encode("", true).unwrap_or_default();
        self.bos().is_some() && empty.first().copied() == self.bos()
    }

    /// The ids with a meaning of their own.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// The tokens that end a text or a turn, sorted.
    pub fn eos_ids(&self) -> &[u32] {
        &self.special.eos_ids
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Tokenizer({}, {} tokens, {:?})",
            self.engine.file().display(),
            self.vocab_size(),
            self.special
        )
    }
}
