//! Text to token ids and back.

mod gguf;
mod huggingface;
mod stream;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use crate::gguf::Metadata;
use crate::{Checkpoint, FileError};

pub(crate) use huggingface::special_token;
pub use stream::TokenStream;

/// A checkpoint's tokenizer. Clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    /// Where it came from, for errors.
    file: Arc<Path>,
    special: SpecialTokens,
}

/// The ids of tokens with a meaning of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecialTokens {
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// All that end a text or a turn, [`Self::eos`] among them; sorted.
    pub eos_ids: Vec<u32>,
    /// What [`Tokenizer::encode`] puts around a text, where the tokenizer itself does not.
    before: Option<u32>,
    after: Option<u32>,
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

    fn new(
        mut inner: tokenizers::Tokenizer,
        file: Arc<Path>,
        mut special: SpecialTokens,
    ) -> Result<Self, FileError> {
        // A file may carry the settings of a training run; a prompt is never cut or padded.
        inner.with_truncation(None).map_err(|error| FileError::tokenizer(&file, error))?;
        inner.with_padding(None);
        special.eos_ids.extend(special.eos);
        special.eos_ids.sort_unstable();
        special.eos_ids.dedup();
        Ok(Self { inner: Arc::new(inner), file, special })
    }

    /// The ids of `text`. Special tokens are recognised in the text; `add_special` also puts those around it that the
    /// model expects (usually bos before).
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] when the tokenizer has no token for a part of the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, FileError> {
        let encoding = self.inner.encode_fast(text, add_special);
        let encoding = encoding.map_err(|error| FileError::tokenizer(&self.file, error))?;
        let SpecialTokens { before, after, .. } = self.special;
        let before = before.filter(|_| add_special);
        let after = after.filter(|_| add_special);
        Ok(before.into_iter().chain(encoding.get_ids().iter().copied()).chain(after).collect())
    }

    /// The text of `ids`, without special tokens. Bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`FileError::TokenId`] when an id has no token.
    pub fn decode(&self, ids: &[u32]) -> Result<String, FileError> {
        for &id in ids {
            self.check(id)?;
        }
        self.inner.decode(ids, true).map_err(|error| FileError::tokenizer(&self.file, error))
    }

    /// Decodes a text token by token, as if it went on after the tokens `context` (the prompt).
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn stream(&self, context: &[u32]) -> Result<TokenStream<'_>, FileError> {
        TokenStream::new(self, context)
    }

    fn check(&self, id: u32) -> Result<(), FileError> {
        match self.inner.id_to_token(id) {
            Some(_) => Ok(()),
            None => {
                Err(FileError::TokenId { file: self.file.to_path_buf(), id, vocab_size: self.vocab_size() })
            }
        }
    }

    /// Tokens, special ones included. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of the token spelled `token`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The spelling of token `id`, in the tokenizer's own alphabet.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether `id` is a special token, which [`Self::decode`] leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        let token = self.inner.id_to_token(id);
        token.is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    /// Whether [`Self::encode`] with `add_special` begins with bos.
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
        write!(f, "Tokenizer({}, {} tokens, {:?})", self.file.display(), self.vocab_size(), self.special)
    }
}
