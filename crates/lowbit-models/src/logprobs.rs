//! Log-probabilities of tokens.

use lowbit_kernels::ops::RowLogprobs;

/// A token and the natural logarithm of its probability, before temperature, penalties and cuts.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Logprob {
    pub id: u32,
    pub logprob: f64,
}

/// The log-probability of a token, beside those of the likeliest ones.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token: Logprob,
    /// The likeliest tokens, the likeliest first, lower ids first where they tie.
    pub top: Vec<Logprob>,
}

impl TokenLogprobs {
    /// Those of token `id` after `logits`, `[vocab_size]`, with the `count` likeliest.
    ///
    /// # Panics
    /// If `id` is not less than `vocab_size`.
    pub fn new(logits: &[f32], id: u32, count: usize) -> Self {
        assert!((id as usize) < logits.len(), "token {id} of {}", logits.len());
        Self::of(id, &RowLogprobs::new(logits, id, count), count)
    }

    /// Those of token `id` by a row that is the token's, with the `count` likeliest, if it has as
    /// many.
    pub(crate) fn of(id: u32, row: &RowLogprobs, count: usize) -> Self {
        let top = row.top.iter().take(count).map(|&(id, logprob)| Logprob { id, logprob });
        Self { token: Logprob { id, logprob: row.token }, top: top.collect() }
    }
}
