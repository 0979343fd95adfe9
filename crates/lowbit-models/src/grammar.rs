use crate::ModelError;
use std::fmt::Debug;

/// A form that texts must have, such as a grammar, compiled for a model's vocabulary. The crate
/// `lowbit` has one for JSON schemas, regular expressions and grammars; it is asked while tokens
/// are sampled, see [`GenerationOptions::with_grammar`](crate::GenerationOptions::with_grammar).
pub trait Grammar: Debug + Send + Sync {
    /// The form of a text that begins.
    fn start(&self) -> Box<dyn Constraint>;
}

/// A text's place in its [`Grammar`].
pub trait Constraint: Debug + Send {
    /// The tokens that may come next: a bit each, that of token `v` in word `v / 32`, for all
    /// tokens of the model's vocabulary, see [`logit_mask`](lowbit_kernels::ops::logit_mask()). At
    /// least one is set. It is called once per token, on the thread that samples.
    ///
    /// # Errors
    /// [`ModelError::Grammar`] when it takes too much work to tell.
    fn mask(&mut self) -> Result<&[u32], ModelError>;

    /// Takes the next token, and returns true if the text is complete with it: nothing may follow.
    ///
    /// # Errors
    /// [`ModelError::Grammar`] for a token that was not allowed.
    fn accept(&mut self, id: u32) -> Result<bool, ModelError>;
}
