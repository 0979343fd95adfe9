//! The bytes that tokens stand for, also those that are parts of characters.

use serde_json::Value as Json;
use tokenizers::{Decoder, DecoderWrapper};

use super::engine::Engine;
use super::guard::guarded;
use crate::FileError;

/// The way in which a decoder reads tokens.
enum Alphabet {
    /// GPT-2's: a character stands for each byte.
    ByteLevel(Vec<(char, u8)>),
    /// As text behind another token's; `true` if `<0x0A>` stands for a byte.
    Text(bool),
}

impl Engine {
    /// The bytes of each token below `count`; none for ids without a token.
    pub(super) fn token_bytes(&self, count: usize) -> Result<Vec<Vec<u8>>, FileError> {
        guarded(self.file(), || {
            let alphabet = self.alphabet()?;
            let context = match alphabet {
                Alphabet::ByteLevel(_) => None,
                Alphabet::Text(_) => self.context(count)?,
            };
            let bytes = |id: u32| match (self.token(id), &alphabet) {
                (None, _) => Ok(vec![]),
                (Some(token), Alphabet::ByteLevel(alphabet)) => Ok(byte_level(&token, alphabet)),
                (Some(token), Alphabet::Text(has_bytes)) => match byte(&token).filter(|_| *has_bytes) {
                    Some(byte) => Ok(vec![byte]),
                    None => self.text_behind(context.as_ref(), token),
                },
            };
            (0..count as u32).map(bytes).collect()
        })
    }

    fn alphabet(&self) -> Result<Alphabet, FileError> {
        let decoder = self.decoder().map(serde_json::to_value).transpose();
        let decoder = decoder.map_err(|error| FileError::tokenizer(self.file(), error))?.unwrap_or_default();
        Ok(match has_step(&decoder, "ByteLevel") {
            true => Alphabet::ByteLevel(characters()),
            false => Alphabet::Text(has_step(&decoder, "ByteFallback")),
        })
    }

    /// A token behind which others are read, and its text: decoders change what a text starts with.
    fn context(&self, count: usize) -> Result<Option<(String, String)>, FileError> {
        for token in (0..count as u32).filter(|&id| !self.is_added(id)).filter_map(|id| self.token(id)) {
            if token.chars().all(|c| c.is_ascii_alphanumeric()) {
                let text = self.decode_tokens(vec![token.clone()])?;
                return Ok(Some((token, text)));
            }
        }
        Ok(None)
    }

    fn text_behind(&self, context: Option<&(String, String)>, token: String) -> Result<Vec<u8>, FileError> {
        let Some((before, known)) = context else { return Ok(self.decode_tokens(vec![token])?.into()) };
        let text = self.decode_tokens(vec![before.clone(), token])?;
        Ok(text.strip_prefix(known.as_str()).unwrap_or(&text).into())
    }

    fn decode_tokens(&self, tokens: Vec<String>) -> Result<String, FileError> {
        match self.decoder() {
            Some(decoder) => decoder.decode(tokens).map_err(|error| FileError::tokenizer(self.file(), error)),
            None => Ok(tokens.join(" ")),
        }
    }

    fn decoder(&self) -> Option<&DecoderWrapper> {
        self.inner().get_decoder()
    }
}

/// True if a decoder, as tokenizer.json has it, is or contains a step of this type.
fn has_step(decoder: &Json, name: &str) -> bool {
    let steps = decoder["decoders"].as_array().into_iter().flatten();
    decoder["type"] == name || steps.into_iter().any(|step| has_step(step, name))
}

/// The characters that stand for bytes: printable ones for themselves, the others from U+0100 on.
fn characters() -> Vec<(char, u8)> {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let own = (0..=u8::MAX).filter(is_printable).map(|byte| (char::from(byte), byte));
    let others = (0..=u8::MAX).filter(|byte| !is_printable(byte));
    let mut all: Vec<_> = own.chain(('\u{100}'..).zip(others)).collect();
    all.sort_unstable();
    all
}

/// A token with a character that stands for no byte is text, as in the tokenizers crate.
fn byte_level(token: &str, alphabet: &[(char, u8)]) -> Vec<u8> {
    let byte = |c: char| Some(alphabet[alphabet.binary_search_by_key(&c, |&(c, _)| c).ok()?].1);
    token.chars().map(byte).collect::<Option<_>>().unwrap_or_else(|| token.into())
}

/// The byte of a token such as `<0x0A>`.
fn byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}
