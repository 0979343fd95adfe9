//! The tokenizers crate, wrapped: its panics become errors, and its work has a time limit.

use std::path::Path;
use std::sync::OnceLock;

use tokenizers::{AddedToken, Decoder, Model};

use super::guard::{guarded, guarded_encoding};
use super::steps::Inner;
use crate::FileError;

/// A tokenizer that was checked, and is not changed any more.
pub(super) struct Engine {
    inner: Inner,
    /// The same without an eye for special tokens, where it was asked for.
    as_text: OnceLock<Inner>,
    /// The tokenizer's source file, for errors.
    file: Box<Path>,
    tokens: usize,
}

impl Engine {
    pub(super) fn load(
        file: &Path,
        build: impl FnOnce() -> Result<Inner, FileError>,
    ) -> Result<Self, FileError> {
        guarded(file, || {
            let inner = build()?;
            let model = inner.get_model();
            let added = inner.get_added_vocabulary().get_vocab().keys();
            let added = added.filter(|token| model.token_to_id(token).is_none()).count();
            let tokens = model.get_vocab_size() + added;
            Ok(Self { tokens, inner, as_text: OnceLock::new(), file: file.into() })
        })
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    pub(super) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, FileError> {
        self.encode_with(&self.inner, text, add_special)
    }

    /// As [`Self::encode`], but special tokens that are spelled in the text are text.
    pub(super) fn encode_as_text(&self, text: &str, add_special: bool) -> Result<Vec<u32>, FileError> {
        let inner = self.as_text.get_or_init(|| {
            let mut inner = self.inner.clone();
            inner.set_encode_special_tokens(true);
            inner
        });
        self.encode_with(inner, text, add_special)
    }

    fn encode_with(&self, inner: &Inner, text: &str, add_special: bool) -> Result<Vec<u32>, FileError> {
        let error = |error| FileError::tokenizer(&self.file, error);
        guarded_encoding(&self.file, text.len(), || {
            let encoding = inner.encode_fast(text, add_special).map_err(error)?;
            Ok(encoding.get_ids().to_vec())
        })
    }

    /// Ids without a token have no text.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, FileError> {
        let tokens: Vec<String> = ids.iter().filter_map(|&id| self.token(id)).collect();
        // Some of the crate's decoders count on a token.
        if tokens.is_empty() {
            return Ok(String::new());
        }
        guarded(&self.file, || match self.inner.get_decoder() {
            Some(decoder) => decoder.decode(tokens).map_err(|error| FileError::tokenizer(&self.file, error)),
            None => Ok(tokens.join(" ")),
        })
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    pub(super) fn is_added(&self, id: u32) -> bool {
        self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id)
    }

    pub(super) fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// The tokens that are found in a text before it is cut, with their ids, in no order.
    pub(super) fn added_tokens(&self) -> impl Iterator<Item = (u32, &AddedToken)> {
        self.inner.get_added_vocabulary().get_added_tokens_decoder().iter().map(|(&id, token)| (id, token))
    }
}
