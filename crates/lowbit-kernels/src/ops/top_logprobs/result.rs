use crate::KernelError;

/// The log-probabilities of a row, natural logarithms.
#[derive(Clone, Debug, PartialEq)]
pub struct RowLogprobs {
    /// That of the row's token.
    pub token: f64,
    /// The likeliest ids with theirs.
    pub top: Vec<(u32, f64)>,
}

impl RowLogprobs {
    /// Those of token `id` after `logits`, and of the `top` likeliest, as
    /// [`top_logprobs()`](super::top_logprobs()) defines them.
    pub fn new(logits: &[f32], id: u32, top: usize) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let logprob =
            |id: u32| logits.get(id as usize).map_or(f64::NAN, |logit| f64::from(logit - max) - sum.ln());
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let count = top.min(ids.len());
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if count > 0 && count < ids.len() {
            ids.select_nth_unstable_by(count - 1, by_logit);
        }
        ids.truncate(count);
        ids.sort_unstable_by(by_logit);
        Self { token: logprob(id), top: ids.into_iter().map(|id| (id, logprob(id))).collect() }
    }

    /// By a GPU's words: the sum, the token's distance from the greatest logit, then ids with
    /// theirs, of which the first `top` are wanted.
    #[cfg(feature = "gpu")]
    fn of_words(words: &[u32], top: usize) -> Self {
        let [sum, token, likeliest @ ..] = words else { unreachable!("a row has a sum and a token") };
        let float = |bits: u32| f64::from(f32::from_bits(bits));
        let norm = float(*sum).ln();
        let top =
            likeliest.as_chunks().0.iter().take(top).map(|&[id, distance]| (id, float(distance) - norm));
        Self { token: float(*token) - norm, top: top.collect() }
    }
}

/// The log-probabilities of rows, which may still be on their way to the host.
#[derive(Debug)]
pub struct LogprobRows(Rows);

#[derive(Debug)]
enum Rows {
    Here(Vec<RowLogprobs>),
    #[cfg(feature = "gpu")]
    Coming {
        words: Box<dyn crate::gpu::Pending>,
        /// Words of a row.
        row: usize,
        top: usize,
    },
}

impl LogprobRows {
    pub(super) fn here(rows: Vec<RowLogprobs>) -> Self {
        Self(Rows::Here(rows))
    }

    #[cfg(feature = "gpu")]
    pub(super) fn coming(words: Box<dyn crate::gpu::Pending>, row: usize, top: usize) -> Self {
        Self(Rows::Coming { words, row, top })
    }

    /// Waits for them.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU fails.
    pub fn wait(self) -> Result<Vec<RowLogprobs>, KernelError> {
        match self.0 {
            Rows::Here(rows) => Ok(rows),
            #[cfg(feature = "gpu")]
            Rows::Coming { words, row, top } => {
                let words = words.wait()?;
                Ok(words.chunks_exact(row).map(|words| RowLogprobs::of_words(words, top)).collect())
            }
        }
    }
}
