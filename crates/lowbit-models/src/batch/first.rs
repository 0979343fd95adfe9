//! The first tokens of replies.

use super::{BatchDrawn, BatchSteps, changed};
use crate::{GenerationOptions, LogitRules, ModelError};
use lowbit_kernels::ops;
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
    /// True if the logits are wanted as the model gave them.
    pub keeps_logits: bool,
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
        for (place, FirstRow { text, options, .. }) in rows.iter().enumerate() {
            self.firsts.set_row(place, text, 0, &options.sampling, options.repetition_context)?;
        }
        let mut logits = gathered(logits, rows)?;
        // Grammars say what may be drawn while a GPU still runs the pass.
        let change = |(place, row): (usize, &mut FirstRow<'_>)| {
            changed((row.rules.as_deref_mut(), row.keeps_logits), place, &mut logits)
        };
        let kept: Vec<_> = rows.iter_mut().enumerate().map(change).collect();
        let kind = self.firsts.kind(0..count).coarse();
        ops::sample_rows(&logits, &mut self.firsts, kind)?;
        let drawn = self.firsts.drawn(0..count)?.wait()?;
        let result = |(id, kept): (Result<u32, KernelError>, Result<Option<Tensor>, ModelError>)| match kept {
            Ok(logits) => BatchDrawn { id: id.map_err(ModelError::from), logits },
            Err(error) => BatchDrawn { id: Err(error), logits: None },
        };
        Ok(drawn.into_iter().zip(kept).map(result).collect())
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
