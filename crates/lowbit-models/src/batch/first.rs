//! The first tokens of replies.

use super::logprobs::Logprobs;
use super::{BatchDrawn, BatchSteps, change, copy_of};
use crate::{GenerationOptions, LogitRules, ModelError};
use lowbit_kernels::ops::{self, RowText};
use lowbit_kernels::{KernelError, Tensor};

/// A prompt whose reply begins.
#[derive(Debug)]
pub struct FirstRow<'a> {
    /// Its row of the logits.
    pub row: usize,
    /// All its tokens.
    pub text: &'a [u32],
    /// The sampling, as [`BatchRow`](crate::BatchRow) has it.
    pub options: &'a GenerationOptions,
    /// The changes to its logits, if there are any: those of `options`.
    pub rules: Option<&'a mut LogitRules>,
    /// As [`BatchRow`](crate::BatchRow) has it.
    pub logprobs: Option<usize>,
}

impl BatchSteps {
    /// Draws the first tokens of replies from `logits`, f32 `[P, vocab_size]`, which a pass over
    /// prompts gave, all at once, and waits for them: a result for each of `rows`, in order.
    ///
    /// # Errors
    /// Those of [`ops::sample_rows`]; [`KernelError::Value`] for more rows than
    /// [`Self::capacity`], or a longer window than [`Self::window`].
    pub fn first(
        &mut self,
        logits: Tensor,
        rows: &mut [FirstRow<'_>],
    ) -> Result<Vec<BatchDrawn>, ModelError> {
        let count = rows.len();
        if count == 0 {
            return Ok(vec![]);
        }
        let texts = rows.iter().map(|FirstRow { text, options, .. }| {
            let (params, window) = (&options.sampling, options.repetition_context);
            RowText { tokens: text, length: text.len(), step: 0, params, window }
        });
        self.firsts.set_rows(0, &texts.collect::<Vec<_>>())?;
        let mut logits = gathered(logits, rows)?;
        let top = rows.iter().filter_map(|row| row.logprobs).max();
        let changes = |row: &FirstRow<'_>| row.rules.as_ref().is_some_and(|rules| !rules.is_empty());
        let given = match top {
            // Rows are changed in place.
            Some(_) if rows.iter().any(changes) => Some(copy_of(&logits)?),
            _ => None,
        };
        // Grammars say what may be drawn while a GPU still runs the pass.
        let change =
            |(place, row): (usize, &mut FirstRow<'_>)| change(row.rules.as_deref_mut(), place, &mut logits);
        let changed: Vec<_> = rows.iter_mut().enumerate().map(change).collect();
        let kind = self.firsts.kind(0..count).coarse();
        ops::sample_rows(&logits, &mut self.firsts, kind)?;
        let tokens = self.firsts.tokens().rows(0, count)?;
        let logprobs = Logprobs::new(given.as_ref().unwrap_or(&logits), &tokens, top)?;
        let drawn = self.firsts.drawn(0..count)?.wait()?;
        let logprobs = logprobs.wait()?;
        let results = drawn.into_iter().zip(changed).zip(&*rows).enumerate();
        let result = results.map(|(place, ((id, changed), row))| {
            let id = changed.and(id.map_err(ModelError::from));
            BatchDrawn { logprobs: logprobs.of(place, &id, row.logprobs), id }
        });
        Ok(result.collect())
    }
}

/// The logits of these rows, after each other.
fn gathered(logits: Tensor, rows: &[FirstRow<'_>]) -> Result<Tensor, KernelError> {
    if rows.len() == logits.dim(0) && rows.iter().enumerate().all(|(place, row)| row.row == place) {
        return Ok(logits);
    }
    let mut own = Tensor::allocate(&[rows.len(), logits.dim(1)], logits.dtype(), logits.device())?;
    for (place, row) in rows.iter().enumerate() {
        ops::copy_rows(&logits, row.row, &mut own, place)?;
    }
    Ok(own)
}
