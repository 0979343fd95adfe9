use super::Tokenizer;
use crate::FileError;

/// Tokens that a character can span: one a byte.
const CHARACTER: usize = 4;

/// Decodes token by token. What [`Self::push`] and [`Self::flush`] return, joined, is the text that the tokens add to
/// the context's; a character that spans tokens comes out whole, with its last token.
#[derive(Debug)]
pub struct TokenStream<'t> {
    tokenizer: &'t Tokenizer,
    /// A token whose text is out already (text depends on what is before it: SentencePiece drops the space at the
    /// start), then those whose text is not.
    window: Vec<u32>,
    /// How the text of the window begins: what is out already.
    emitted: String,
}

impl<'t> TokenStream<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, context: &[u32]) -> Result<Self, FileError> {
        let last = context.len().saturating_sub(CHARACTER);
        let start = context[..last].iter().rposition(|&id| is_anchor(tokenizer, id)).unwrap_or(0);
        let window = context[start..].to_vec();
        let emitted = complete(&tokenizer.decode(&window)?).to_string();
        Ok(Self { tokenizer, window, emitted })
    }

    /// The text that `id` completes, if any.
    ///
    /// # Errors
    /// [`FileError::TokenId`] when the id has no token.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, FileError> {
        self.tokenizer.check(id)?;
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        let stable = complete(&text);
        let whole = stable.len() == text.len();
        // Until a byte-fallback run is whole, the text of all its bytes is U+FFFD, even of characters that are out.
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

/// Whether `id` can stand for all the text before: not a special token, which has no text, nor one of a byte-fallback
/// run, whose tokens are decoded together.
fn is_anchor(tokenizer: &Tokenizer, id: u32) -> bool {
    let is_byte = |token: &str| token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
    tokenizer.token(id).is_some_and(|token| !is_byte(&token)) && !tokenizer.is_special(id)
}

/// `text` without the end that later tokens may change: bytes that stop inside a character decode as U+FFFD.
fn complete(text: &str) -> &str {
    text.trim_end_matches(char::REPLACEMENT_CHARACTER)
}

/// Bytes of the characters that `a` and `b` begin with alike.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}
