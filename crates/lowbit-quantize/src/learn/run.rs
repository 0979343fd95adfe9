//! A run of learning: one phase, or one per block and another for the whole model. It keeps
//! results, reports progress and saves the state.

use super::objective::Objective;
use super::state::{Finished, Identity, Saved};
use super::trainer::{Position, Taken, Trainer};
use super::{BlockReport, LearnProgress, Learning, Weights};
use crate::QuantizeError;
use lowbit_kernels::QuantizedTensor;
use lowbit_models::tape::Named;
use std::ops::ControlFlow;

pub(super) struct Run<'a, P> {
    pub learning: Learning<'a>,
    /// Blocks that learn by themselves, before all of the model does.
    blocks: usize,
    identity: Identity,
    /// The saved state of the phase in which a run was interrupted.
    saved: Option<Saved<'a>>,
    pub finished: Finished,
    progress: P,
}

impl<'a, P: FnMut(&LearnProgress) -> ControlFlow<()>> Run<'a, P> {
    /// At its beginning, or where it was interrupted. `rounded` are the weights that learn, in the
    /// host's memory; `targets` is the digest of the file with what the teacher says, where there
    /// is one.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for a state that must not be there, that is damaged, or of another
    /// run.
    pub fn new(
        learning: Learning<'a>,
        blocks: usize,
        (rounded, targets): (&[Named<QuantizedTensor>], Option<&str>),
        progress: P,
    ) -> Result<Self, QuantizeError> {
        let identity = Identity::new(learning.options, learning.data, rounded, targets);
        let blocks = if learning.options.by_block { blocks } else { 0 };
        let steps = learning.options.for_blocks().steps;
        let mut saved = learning.saving.map(|saving| saving.load(&identity)).transpose()?.flatten();
        let finished = saved.as_mut().map(|saved| saved.finished(rounded, (blocks, steps))).transpose()?;
        Ok(Self { learning, blocks, identity, saved, finished: finished.unwrap_or_default(), progress })
    }

    /// Learns block by block: the next one.
    ///
    /// # Errors
    /// As [`Self::learn`].
    pub fn learn_block(&mut self, trainer: Trainer<'_, impl Objective>) -> Result<(), QuantizeError> {
        let host = trainer.model.host();
        let Position { best: (after, weights), best_step, before, went_back, tokens, .. } =
            self.learn(trainer, None)?;
        for (name, weight) in weights {
            self.finished.learned.insert(name, weight.quantized(host)?);
        }
        self.finished.blocks.push(BlockReport { before, after, best_step, went_back });
        self.finished.tokens += tokens;
        self.save(None)
    }

    /// Learns to the last step, and says where that ended. `rounded` as [`Trainer::start`].
    ///
    /// # Errors
    /// [`QuantizeError::Interrupted`]; the objective's; those of the state.
    pub fn learn(
        &mut self,
        mut trainer: Trainer<'_, impl Objective>,
        rounded: Option<Weights>,
    ) -> Result<Position, QuantizeError> {
        let of = (trainer.objective.windows(), trainer.options.steps);
        let saved = self.saved.take().map(|saved| saved.position(&mut trainer.weights, of)).transpose()?;
        let saved = saved.flatten();
        let mut position = saved.map_or_else(|| trainer.start(rounded), Ok)?;
        // A block may have nothing to learn.
        while !trainer.weights.is_empty() && position.step < trainer.options.steps {
            let taken = trainer.advance(&mut position)?;
            let stop = self.tell(&position, &taken).is_break();
            // A block that is learned is saved at its end.
            let is_due = taken.validation.is_some() && self.finished.blocks.len() == self.blocks;
            if stop || is_due {
                trainer.fetch()?;
                self.save(Some((&trainer.weights, &position)))?;
            }
            if stop {
                return Err(QuantizeError::Interrupted);
            }
        }
        Ok(position)
    }

    fn tell(&mut self, position: &Position, taken: &Taken) -> ControlFlow<()> {
        let (options, done) = (self.learning.options, self.finished.blocks.len());
        let before = |blocks: usize| options.for_blocks().steps.saturating_mul(blocks as u32);
        (self.progress)(&LearnProgress {
            step: before(done).saturating_add(position.step),
            steps: before(self.blocks).saturating_add(options.steps),
            block: (done < self.blocks).then_some((done + 1, self.blocks)),
            loss: taken.loss,
            validation: taken.validation,
            went_back: taken.went_back,
            tokens: self.finished.tokens + position.tokens,
            step_tokens: taken.tokens,
        })
    }

    /// Saves the state, if that is wanted: in a phase, or between two.
    fn save(&self, phase: Option<(&Weights, &Position)>) -> Result<(), QuantizeError> {
        self.learning.saving.map_or(Ok(()), |saving| saving.save(&self.identity, &self.finished, phase))
    }
}
