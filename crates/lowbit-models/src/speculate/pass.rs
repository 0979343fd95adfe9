//! A pass that verifies drafts of several sequences, each with a cache of its own.

use crate::layers::{Recurrences, StateRows, Step};
use crate::{Cache, Model, ModelError, Sequence};
use lowbit_kernels::ops::Form;
use lowbit_kernels::{KernelError, Tensor};

/// A pass over the last token of each sequence and those drafted after it. What it has written must
/// be settled by [`Self::keep`], for each sequence.
#[derive(Debug)]
pub struct DraftPass {
    /// f32 `[T, vocab_size]`.
    logits: Tensor,
    /// The states behind the last norm, `[T, hidden_size]`, if they were asked for.
    states: Option<Tensor>,
    sequences: Vec<Drafted>,
}

/// A sequence's part of a pass.
#[derive(Debug)]
struct Drafted {
    /// Its first row.
    row: usize,
    /// Tokens before the pass.
    position: usize,
    /// Of its recurrences, if it has drafts.
    inputs: Recurrences,
}

impl Model {
    /// Runs each sequence's last token and the tokens drafted after it in one pass: its `tokens`,
    /// after those that its cache has seen. Row by row this is a decode step: on a CPU, in as many
    /// as 16 rows and where matrices are quantised, with the very bits of one. Caches with windows
    /// must [keep all](Self::cache_that_keeps_all).
    ///
    /// # Errors
    /// As [`Self::forward_batch`].
    pub fn forward_drafts(
        &self,
        batch: &mut [Sequence<'_>],
        wants_states: bool,
    ) -> Result<DraftPass, ModelError> {
        self.check_batch(batch.iter().map(|sequence| (sequence.tokens, sequence.cache.position())))?;
        self.check_head()?;
        let places: Vec<_> = batch.iter().map(|it| (it.cache.position(), it.tokens.len())).collect();
        let step = Step::with_drafts(places.iter().copied(), self.device())?;
        let hidden = self.hidden(batch, &step)?;
        let states = wants_states.then(|| self.decoder().normed(&hidden)).transpose()?;
        let mut row = 0;
        let sequences = places.into_iter().zip(step.recurrences()).map(|((position, tokens), inputs)| {
            row += tokens;
            Drafted { row: row - tokens, position, inputs }
        });
        let sequences = sequences.collect();
        let logits = self.decoder().logits(&hidden)?.into_tensor();
        Ok(DraftPass { logits, states: states.map(|states| states.into_tensor()), sequences })
    }
}

impl DraftPass {
    /// The logits of all rows, f32 `[T, vocab_size]`.
    pub(super) fn all_logits(&self) -> &Tensor {
        &self.logits
    }

    /// The logits after a sequence's token number `row` of the pass, f32 `[1, vocab_size]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a row that is not there.
    pub fn logits(&self, sequence: usize, row: usize) -> Result<Tensor, KernelError> {
        let row = self.sequences[sequence].row + row;
        self.logits.rows(row, row + 1)
    }

    /// The states behind the last norm of a sequence's first `rows` tokens of the pass,
    /// `[rows, hidden_size]`, if they were asked for.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for rows that are not there.
    pub fn states(&self, sequence: usize, rows: usize) -> Result<Option<Tensor>, KernelError> {
        let row = self.sequences[sequence].row;
        self.states.as_ref().map(|states| states.rows(row, row + rows)).transpose()
    }

    /// Keeps the first `rows` of a sequence's tokens of the pass, at least one: its `cache` is then
    /// as if the others had never run.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn keep(
        &mut self,
        model: &Model,
        cache: &mut Cache,
        (sequence, rows): (usize, usize),
    ) -> Result<(), KernelError> {
        let Drafted { position, inputs, .. } = &mut self.sequences[sequence];
        let inputs = std::mem::take(inputs);
        if !inputs.is_empty() {
            let first = |x: Tensor| x.rows(0, rows);
            let of_layer = |inputs: Vec<Tensor>| inputs.into_iter().map(first).collect();
            let inputs = inputs.into_iter().map(of_layer).collect::<Result<Vec<_>, _>>()?;
            let stays = Tensor::new(&[0, rows as u32], &[2], model.device())?;
            catch_up(model, cache, &inputs, &stays)?;
        }
        cache.set_position(*position + rows);
        Ok(())
    }
}

/// Moves the recurrences in `cache` on by these inputs, of which the rows `stays`, u32 `[0, T]`,
/// are kept.
pub(super) fn catch_up(
    model: &Model,
    cache: &mut Cache,
    inputs: &[Vec<Tensor>],
    stays: &Tensor,
) -> Result<(), KernelError> {
    let rows = StateRows { form: Form::Recurrent, ..StateRows::of(stays) };
    model.decoder().catch_up(inputs, rows, cache)
}
