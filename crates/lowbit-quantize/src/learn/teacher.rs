use super::trainer::{Trainer, Weights};
use super::{LearnProgress, LearnReport, Learning};
use crate::QuantizeError;
use lowbit_files::Checkpoint;
use lowbit_models::{Model, Target};
use std::ops::ControlFlow;
use std::path::Path;

/// The model that is quantised, which its rounded form learns from.
pub struct Teacher<'a> {
    model: Model,
    learning: Learning<'a>,
}

impl<'a> Teacher<'a> {
    /// Loads `checkpoint`.
    ///
    /// # Errors
    /// As [`Model::load_for`].
    pub fn load(checkpoint: &Checkpoint, learning: Learning<'a>) -> Result<Self, QuantizeError> {
        let target = Target::for_gradients(learning.device, learning.options.activations)?;
        let model = Model::load_for(checkpoint, target)?;
        Ok(Self { model, learning })
    }

    /// Learns the weights of the checkpoint `rounded`, by the names that modules have there. `original` gives a module's values before
    /// they were rounded. Nothing of that checkpoint is in use in the end.
    ///
    /// # Errors
    /// As [`Model::load_for`], [`Trainer::new`] and [`Trainer::run`].
    pub fn teach(
        &self,
        rounded: &Path,
        original: impl Fn(&str) -> Result<Vec<f32>, QuantizeError>,
        progress: impl FnMut(&LearnProgress) -> ControlFlow<()>,
    ) -> Result<(Weights, LearnReport), QuantizeError> {
        let Learning { data, options, saving, device } = self.learning;
        let checkpoint = Checkpoint::open(rounded)?;
        let student = Model::load_for(&checkpoint, Target::for_gradients(device, options.activations)?)?;
        // On a GPU weights have a layout of their own: what is learned begins with what the file has.
        let mapped = Model::load_for(&checkpoint, Target::for_gradients(student.host(), None)?)?;
        let weights = mapped.inventory().weights;
        let trainer = Trainer::new([&self.model, &student], &weights, data, options, original)?;
        drop((weights, mapped, checkpoint));
        trainer.run(saving, progress)
    }

    /// Removes the saved state, once the output is there.
    ///
    /// # Errors
    /// [`QuantizeError::Io`].
    pub fn finish(&self) -> Result<(), QuantizeError> {
        self.learning.saving.map_or(Ok(()), |saving| saving.remove())
    }
}
