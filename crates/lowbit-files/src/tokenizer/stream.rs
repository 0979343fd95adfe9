use super::Tokenizer;
use crate::FileError;

/// The most tokens that a character can span: one per byte.
const CHARACTER: usize = 4;

/// Decodes token by token. What [`Self::push`] and [`Self::flush`] return, joined, is the text that
/// the tokens add to the context's; a character that spans tokens comes out whole, with its last
/// token.
#[derive(Debug)]
pub struct TokenStream<'t> {
    tokenizer: &'t Tokenizer,
    /// A token whose text was returned already (text depends on what is before it: SentencePiece
    /// drops the space at the start), then those whose text was not.
    window: Vec<u32>,
    /// The start of the window's text that was returned already.
    emitted: String,
}

impl<'t> TokenStream<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, context: &[u32]) -> Result<Self, FileError> {
        let has_text = |id: &u32| tokenizer.engine.token(*id).is_some();
        let mut window: Vec<u32> = Vec::new();
        for id in context.iter().copied().rev().filter(has_text) {
            window.push(id);
            if window.len() > CHARACTER && is_anchor(tokenizer, id) {
                break;
            }
        }
        window.reverse();
        let emitted = complete(&tokenizer.decode(&window)?).to_string();
        Ok(Self { tokenizer, window, emitted })
    }

    /// The text that `id` completes, if any; a special token's is its spelling. Ids without a token
    /// have none.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<Option<String>, FileError> {
        if self.tokenizer.engine.token(id).is_none() {
            return Ok(None);
        }
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        let stable = complete(&text);
        let whole = stable.len() == text.len();
        // Until a byte-fallback run is whole, the text of all its bytes is U+FFFD, even of
        // characters that are out.
        if !whole && !stable.starts_with(&self.emitted) {
            return Ok(None);
        }
        let new = stable[common_prefix(stable, &self.emitted)..].to_string();
        if new.is_empty() {
            return Ok(None);
        }
        self.emitted = stable.to_string();
        let anchor = self.window.iter().rfind(|&&id| is_anchor(self.tokenizer, id));
        if let Some(&anchor) = anchor.filter(|_| whole) {
            self.window = vec![anchor];
            self.emitted = self.tokenizer.decode(&self.window)?;
        }
        Ok(Some(new))
    }

    /// The text of the tokens that complete no character, at the end of the stream; usually empty.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn flush(&mut self) -> Result<String, FileError> {
        let text = self.tokenizer.decode(&self.window)?;
        let new = text[common_prefix(&text, &self.emitted)..].to_string();
        self.emitted = text;
        Ok(new)
    }
}

/// True if `id` can stand for all the text before: it has a text, and is none of a byte-fallback
/// run, whose tokens are decoded together.
fn is_anchor(tokenizer: &Tokenizer, id: u32) -> bool {
    let is_byte = |token: &str| token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
    tokenizer.engine.token(id).is_some_and(|token| !is_byte(&token))
}

/// `text` without the end that later tokens may change: bytes that stop inside a character decode
/// as U+FFFD.
fn complete(text: &str) -> &str {
    text.trim_end_matches(char::REPLACEMENT_CHARACTER)
}

/// The length in bytes of the common prefix of `a` and `b`, in whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}
