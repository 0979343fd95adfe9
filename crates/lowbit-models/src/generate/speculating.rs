//! Replies whose tokens are guessed, and verified several at a time.

use super::{Finish, Generation, GenerationOptions, Session};
use crate::speculate::{Draws, RowDraws, Verifier};
use crate::{ModelError, Speculated, Speculation};
use lowbit_kernels::Tensor;
use std::ops::ControlFlow;

/// A reply that is being written.
struct Writing<'s, 'm, 'o> {
    session: &'s mut Session<'m>,
    options: &'o GenerationOptions,
    each: &'o mut dyn FnMut(u32) -> ControlFlow<()>,
    draws: Draws,
    tokens: Vec<u32>,
    speculated: Speculated,
}

impl<'m> Session<'m> {
    /// As [`Self::generate`], with guesses.
    pub(super) fn generate_speculating(
        &mut self,
        logits: &Tensor,
        options: &GenerationOptions,
        each: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, ModelError> {
        self.keep_all()?;
        let Some(mut speculation) = self.speculation.take() else { unreachable!("it speculates") };
        let result = Draws::new(options, self.model).and_then(|draws| {
            let (tokens, speculated) = (vec![], Speculated::default());
            let mut writing = Writing { session: self, options, each, draws, tokens, speculated };
            let finish = writing.write(logits, &mut speculation)?;
            let Writing { tokens, speculated, .. } = writing;
            Ok(Generation { tokens, finish, speculated })
        });
        self.speculation = Some(speculation);
        result
    }
}

impl Writing<'_, '_, '_> {
    fn write(&mut self, logits: &Tensor, speculation: &mut Speculation<'_>) -> Result<Finish, ModelError> {
        let logits = logits.reshape(&[1, logits.len()])?;
        let id = self.draw(&logits)?;
        let mut finish = self.take(id)?;
        let most = speculation.most(self.session.model.device());
        let wants_states = speculation.drafter.wants_states();
        let place = (self.session.model, &self.session.cache);
        let last = speculation.verifier.take();
        let mut verifier = Verifier::after(last, place, (1 + most, wants_states), &self.draws)?;
        loop {
            if let Some(finish) = finish {
                speculation.verifier = Some(verifier);
                return Ok(finish);
            }
            finish = self.pass(&mut verifier, speculation, most)?;
        }
    }

    /// Runs the last token and its drafts, and takes what is drawn; why the text ends, if it does.
    fn pass(
        &mut self,
        verifier: &mut Verifier,
        speculation: &mut Speculation<'_>,
        most: usize,
    ) -> Result<Option<Finish>, ModelError> {
        let Session { model, cache, tokens, .. } = &mut *self.session;
        let position = cache.position();
        let unwritten = self.options.max_tokens - self.tokens.len() - 1;
        let room = model.config().max_position_embeddings - position - 1;
        let rows = verifier.most_rows(model, cache)?;
        let most = most.min(unwritten).min(room).min(rows - 1);
        let mut drafts = speculation.draft(tokens, most)?;
        let beyond = drafts.iter().position(|&id| id as usize >= model.config().vocab_size);
        drafts.truncate(beyond.unwrap_or(drafts.len()));
        tokens.extend(&drafts);
        let draws = verifier.run(model, cache, tokens, self.tokens.len());
        self.session.tokens.truncate(position + 1);
        let after = |error| match error {
            ModelError::Kernel(error) => ModelError::Draw { tokens: position + 1, error },
            error => error,
        };
        let verified = self.verify(draws.map_err(after)?, &drafts);
        let kept = match &verified {
            Ok((kept, _)) => *kept,
            // The row whose draw failed has run, as a step of its own would have.
            Err(_) => self.session.tokens.len() - position,
        };
        self.speculated.passes += 1;
        self.speculated.drafted += drafts.len();
        self.speculated.accepted += kept - 1;
        speculation.pace.take(drafts.len(), kept - 1);
        let Session { model, cache, tokens, .. } = &mut *self.session;
        if let Some(states) = verifier.states(kept)? {
            speculation.drafter.see(position, &tokens[position..position + kept], &states)?;
        }
        verifier.keep(model, cache, (position, kept))?;
        verified.map(|(_, finish)| finish)
    }

    /// Draws row by row until one is not what was guessed. Returns the number of rows that were
    /// drawn from, which are those that stay, and why the text ends, if it does.
    fn verify(&mut self, draws: RowDraws, drafts: &[u32]) -> Result<(usize, Option<Finish>), ModelError> {
        let mut known = vec![];
        let logits = match draws {
            RowDraws::Known(ids) => {
                known = ids;
                None
            }
            RowDraws::Logits(logits) => Some(logits),
        };
        let mut known = known.into_iter();
        for row in 0..=drafts.len() {
            let id = match &logits {
                Some(logits) => self.draw(&logits.rows(row, row + 1)?)?,
                None => {
                    let tokens = self.session.tokens.len();
                    let id = known.next().expect("a token was drawn in each row");
                    id.map_err(|error| ModelError::Draw { tokens, error })?
                }
            };
            let finish = self.take(id)?;
            if finish.is_some() || drafts.get(row) != Some(&id) {
                return Ok((row + 1, finish));
            }
        }
        unreachable!("behind the last draft nothing is guessed")
    }

    fn draw(&mut self, logits: &Tensor) -> Result<u32, ModelError> {
        let text = &self.session.tokens;
        self.draws.draw(logits, text, self.tokens.len()).map_err(|error| match error {
            ModelError::Kernel(error) => ModelError::Draw { tokens: text.len(), error },
            error => error,
        })
    }

    /// Takes a token that was drawn; why the text ends with it, if it does.
    fn take(&mut self, id: u32) -> Result<Option<Finish>, ModelError> {
        self.session.tokens.push(id);
        if self.options.stop_ids.contains(&id) {
            return Ok(Some(Finish::Stop));
        }
        self.tokens.push(id);
        let is_complete = self.draws.accept(id)?;
        if (self.each)(id).is_break() {
            return Ok(Some(Finish::Interrupted));
        }
        if is_complete {
            return Ok(Some(Finish::Stop));
        }
        let is_full = self.session.tokens.len() > self.session.context();
        Ok((is_full || self.tokens.len() >= self.options.max_tokens).then_some(Finish::Length))
    }
}
