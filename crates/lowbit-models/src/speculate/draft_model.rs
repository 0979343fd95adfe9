use super::Drafter;
use crate::{GenerationOptions, Model, ModelError, Session};
use std::ops::ControlFlow::Continue;

/// Guesses of a second, smaller model of the same vocabulary: its likeliest tokens.
#[derive(Debug)]
pub struct DraftModel<'m> {
    session: Session<'m>,
    /// Ids that the large model has.
    vocab_size: usize,
}

impl<'m> DraftModel<'m> {
    /// Guesses of `draft` for `model`. Both must give the same ids to the same texts.
    ///
    /// # Errors
    /// [`ModelError::Headless`] for a draft model without an output layer.
    pub fn new(draft: &'m Model, model: &Model) -> Result<Self, ModelError> {
        draft.check_head()?;
        Ok(Self { session: Session::new(draft), vocab_size: model.config().vocab_size })
    }
}

impl Drafter for DraftModel<'_> {
    fn draft(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, ModelError> {
        let session = &mut self.session;
        let room = session.context().saturating_sub(text.len());
        let known = session.model().config().vocab_size;
        if text.is_empty() || room < most || text.iter().any(|&id| id as usize >= known) {
            // A text that it cannot read has no guesses.
            return Ok(vec![]);
        }
        let common = session.tokens().iter().zip(text).take_while(|(own, id)| own == id).count();
        // The last token runs in any case: its logits are wanted.
        let common = session.go_back(common.min(text.len() - 1))?;
        let Some(logits) = session.prefill(&text[common..], |_| Continue(()))? else { return Ok(vec![]) };
        session.mark()?;
        let options = GenerationOptions::default().with_max_tokens(most);
        let mut guesses = session.generate(logits, &options, |_| Continue(()))?.tokens;
        let beyond = guesses.iter().position(|&id| id as usize >= self.vocab_size);
        guesses.truncate(beyond.unwrap_or(guesses.len()));
        Ok(guesses)
    }
}
