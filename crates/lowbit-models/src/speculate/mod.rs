//! Speculation: tokens are guessed, and one pass of the model verifies several of them. A guess
//! counts only if it is the very token that is drawn in its place, so that texts do not depend on
//! guesses.

mod draft_model;
mod mtp;
mod ngram;
mod pass;
mod script;
mod verify;

use crate::ModelError;
pub use draft_model::DraftModel;
use lowbit_kernels::{Device, Tensor};
pub use mtp::{Mtp, Predictor};
pub use ngram::Ngrams;
pub use pass::DraftPass;
pub use script::Script;
use std::fmt::Debug;
pub(crate) use verify::{Draws, RowDraws, Verifier};

/// The source of guesses for one text.
pub trait Drafter: Debug + Send {
    /// Up to `most` tokens that may follow `text`, which is all of the session's, in their order.
    /// Texts of successive calls go on from one another, unless the session went back.
    ///
    /// # Errors
    /// Those of the models that it runs.
    fn draft(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, ModelError>;

    /// True if it wants [`Self::see`] to be called.
    fn wants_states(&self) -> bool {
        false
    }

    /// Takes the states behind the model's last norm, `[T, hidden_size]`, of `tokens`, which are
    /// part of the text and of which the first stands at `position`. They may be overwritten when
    /// the model runs again.
    ///
    /// # Errors
    /// Those of the models that it runs.
    fn see(&mut self, position: usize, tokens: &[u32], states: &Tensor) -> Result<(), ModelError> {
        let _ = (position, tokens, states);
        Ok(())
    }
}

/// A session's source of guesses, and its limits.
#[derive(Debug)]
pub struct Speculation<'m> {
    pub(crate) drafter: Box<dyn Drafter + 'm>,
    most: usize,
    least: usize,
    pub(crate) pace: Pace,
    /// The last reply's, whose captured pass the next ones replay.
    pub(crate) verifier: Option<Verifier>,
}

/// Tokens that were guessed, in a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Speculated {
    /// Guesses that a pass verified.
    pub drafted: usize,
    /// Those of them that became text.
    pub accepted: usize,
    /// Passes of the model, those over a single token included.
    pub passes: usize,
}

/// Guesses of a pass at most: their rows still go through the kernels for few rows, and a window's
/// cache can go back by as many.
const MOST: usize = 15;

impl<'m> Speculation<'m> {
    /// With these guesses: up to 8 on a CPU and up to 3 on a GPU.
    pub fn new(drafter: impl Drafter + 'm) -> Self {
        Self { drafter: Box::new(drafter), most: 8, least: 1, pace: Pace::default(), verifier: None }
    }

    /// With up to `most` guesses per pass, of 15 on a CPU and 3 on a GPU.
    #[must_use]
    pub fn with_most(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// Passes verify no guesses where there are fewer than `least`.
    #[must_use]
    pub fn with_least(self, least: usize) -> Self {
        Self { least, ..self }
    }

    /// With as many guesses as there may be in each pass, whatever became of those before.
    #[must_use]
    pub fn with_fixed_pace(self) -> Self {
        Self { pace: Pace { next: MOST, is_fixed: true }, ..self }
    }

    /// The most guesses of a pass on `device`.
    pub fn most(&self, device: &Device) -> usize {
        self.most.min(MOST).min(device.plan().few_rows - 1)
    }

    /// Up to `most` guesses after `text`.
    pub(crate) fn draft(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, ModelError> {
        let most = most.min(self.pace.next);
        if most < self.least.max(1) {
            return Ok(vec![]);
        }
        let mut drafts = self.drafter.draft(text, most)?;
        drafts.truncate(most);
        if drafts.len() < self.least {
            drafts.clear();
        }
        Ok(drafts)
    }
}

/// The number of guesses that is worth a pass: more after passes that took all, fewer after passes
/// that took none. Only the time depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    next: usize,
    is_fixed: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self { next: 3, is_fixed: false }
    }
}

impl Pace {
    /// Takes the outcome of a pass.
    pub fn take(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 || self.is_fixed {
            return;
        }
        if accepted == drafted {
            self.next = (2 * self.next).min(MOST);
        } else if accepted == 0 {
            self.next = (self.next / 2).max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_follows_what_was_accepted() {
        let mut pace = Pace::default();
        let mut after = |drafted, accepted| {
            pace.take(drafted, accepted);
            pace.next
        };
        assert_eq!([after(3, 3), after(6, 6), after(12, 12), after(15, 15)], [6, 12, 15, 15]);
        assert_eq!([after(15, 4), after(0, 0), after(15, 0), after(7, 0)], [15, 15, 7, 3]);
        assert_eq!([after(3, 0), after(1, 0), after(1, 1)], [1, 1, 2]);
    }
}
