use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use lowbit_models::{Constraint, Grammar, ModelError};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A grammar that was compiled, before its first token.
pub(super) struct HeldGrammar {
    start: Mutex<Matcher>,
    /// Words of a mask.
    words: usize,
}

impl HeldGrammar {
    pub(super) fn new(matcher: Matcher, words: usize) -> Self {
        Self { start: Mutex::new(matcher), words }
    }
}

impl fmt::Debug for HeldGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldGrammar").finish_non_exhaustive()
    }
}

impl Grammar for HeldGrammar {
    fn start(&self) -> Box<dyn Constraint> {
        // A copy with caches of its own: texts of one grammar do not wait for each other.
        let matcher = self.start.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Box::new(HeldText { matcher, mask: SimpleVob::new(), words: self.words })
    }
}

/// A text's place in a grammar.
struct HeldText {
    matcher: Matcher,
    mask: SimpleVob,
    words: usize,
}

impl fmt::Debug for HeldText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldText").finish_non_exhaustive()
    }
}

fn failed(error: &dyn fmt::Display) -> ModelError {
    ModelError::Grammar(super::first_line(&error.to_string()))
}

impl Constraint for HeldText {
    fn mask(&mut self) -> Result<&[u32], ModelError> {
        self.mask = self.matcher.compute_mask_or_eos().map_err(|error| failed(&error))?;
        let mask = self.mask.as_slice();
        mask.get(..self.words).ok_or_else(|| {
            ModelError::Grammar(format!("a mask has {} words, but {} are wanted", mask.len(), self.words))
        })
    }

    fn accept(&mut self, id: u32) -> Result<bool, ModelError> {
        self.matcher.consume_token(id).map_err(|error| failed(&error))?;
        Ok(self.matcher.is_stopped())
    }
}
