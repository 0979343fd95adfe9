//! Log-probabilities of tokens.

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
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let candidate = |id: u32| Logprob { id, logprob: f64::from(logits[id as usize] - max) - sum.ln() };
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let count = count.min(ids.len());
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if count > 0 && count < ids.len() {
            ids.select_nth_unstable_by(count - 1, by_logit);
        }
        ids.truncate(count);
        ids.sort_unstable_by(by_logit);
        Self { token: candidate(id), top: ids.into_iter().map(candidate).collect() }
    }
}
