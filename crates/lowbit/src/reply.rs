//! A prompt through a session and its answer as text.

use crate::Error;
use lowbit_files::{FileError, TokenStream, Tokenizer};
use lowbit_models::{Finish, GenerationOptions, Session};
use std::ops::ControlFlow::{self, Break, Continue};

/// What a model answered.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Reply {
    /// The text, without special tokens.
    pub text: String,
    /// Its token ids, without the one that ended it.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

/// Runs `prompt` after what `session` holds and answers it. The tokenizer's end-of-text ids are stop ids beside those of
/// `options`. `each` is called with every piece of text as it is complete.
pub fn reply(
    session: &mut Session<'_>,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: &GenerationOptions,
    each: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Reply, Error> {
    let mut options = options.clone();
    options.stop_ids.extend(tokenizer.eos_ids());
    let logits = session.prefill(prompt, |_| Continue(()))?.expect("nothing interrupts the prompt");
    let mut text = Text { stream: tokenizer.stream(prompt)?, whole: String::new(), each, failed: None };
    let written = session.generate(logits, &options, |id| text.token(id))?;
    let whole = text.end()?;
    Ok(Reply { text: whole, tokens: written.tokens, finish: written.finish })
}

/// The text so far, and what went wrong with decoding it.
struct Text<'t, F> {
    stream: TokenStream<'t>,
    whole: String,
    each: F,
    failed: Option<FileError>,
}

impl<F: FnMut(&str) -> ControlFlow<()>> Text<'_, F> {
    fn token(&mut self, id: u32) -> ControlFlow<()> {
        match self.stream.push(id) {
            Ok(Some(piece)) => self.piece(&piece),
            Ok(None) => Continue(()),
            Err(error) => {
                self.failed = Some(error);
                Break(())
            }
        }
    }

    fn piece(&mut self, piece: &str) -> ControlFlow<()> {
        self.whole.push_str(piece);
        (self.each)(piece)
    }

    /// The whole text, with what was left of an unfinished character.
    fn end(mut self) -> Result<String, FileError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let rest = self.stream.flush()?;
        if !rest.is_empty() {
            // The text ends here whatever the caller says.
            let _ = self.piece(&rest);
        }
        Ok(self.whole)
    }
}
