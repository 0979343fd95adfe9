//! The log-probabilities of a batch's tokens.

use crate::{ModelError, TokenLogprobs};
use lowbit_kernels::ops::{self, LogprobRows, RowLogprobs};
use lowbit_kernels::{KernelError, Tensor};

/// Those of all rows of a batch, if some are wanted; on a GPU they may still be on their way.
pub(super) struct Logprobs(Option<LogprobRows>);

impl Logprobs {
    /// Those of `tokens`, with the `top` likeliest of each row.
    pub fn new(logits: &Tensor, tokens: &Tensor, top: Option<usize>) -> Result<Self, KernelError> {
        Ok(Self(top.map(|top| ops::top_logprobs(logits, tokens, top)).transpose()?))
    }

    pub fn wait(self) -> Result<RowsOfLogprobs, KernelError> {
        Ok(RowsOfLogprobs(self.0.map(LogprobRows::wait).transpose()?))
    }
}

/// The same, on the host.
pub(super) struct RowsOfLogprobs(Option<Vec<RowLogprobs>>);

impl RowsOfLogprobs {
    /// Those of row `place`, for which `id` was drawn, with so many of the likeliest, if it wants
    /// them.
    pub fn of(
        &self,
        place: usize,
        id: &Result<u32, ModelError>,
        wanted: Option<usize>,
    ) -> Option<TokenLogprobs> {
        let (Some(rows), Ok(id), Some(count)) = (&self.0, id, wanted) else { return None };
        Some(TokenLogprobs::of(*id, &rows[place], count))
    }
}
