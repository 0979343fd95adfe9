use crate::{Logits, Model, ModelError};
use std::ops::ControlFlow;

/// Which tokens of a window are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// All but the first; what is left of the text after whole windows is scored too.
    All,
    /// The second half, over whole windows only, as llama-perplexity does.
    SecondHalf,
}

/// How well a model predicts a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Tokens scored.
    pub tokens: usize,
    /// Their mean negative log-likelihood, in nats.
    pub nll: f64,
}

impl Perplexity {
    /// `exp(nll)`.
    pub fn perplexity(&self) -> f64 {
        self.nll.exp()
    }
}

/// Scores `tokens` in windows of `context` that do not overlap, each from an empty cache. With
/// [`Scoring::SecondHalf`] and a `bos` id, each window's first token is replaced by it, as llama-perplexity does
/// for models that start with one. `progress` hears how many tokens are done, and can break off.
///
/// # Errors
/// [`ModelError::Window`] and [`ModelError::TooShort`]; those of [`Model::forward`].
pub fn perplexity(
    model: &Model,
    tokens: &[u32],
    context: usize,
    (scoring, bos): (Scoring, Option<u32>),
    mut progress: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<Perplexity, ModelError> {
    if context < 2 {
        return Err(ModelError::Window(context));
    }
    if scoring == Scoring::SecondHalf && tokens.len() < 2 * context {
        return Err(ModelError::TooShort { tokens: tokens.len(), context });
    }
    model.check_ids(tokens)?;
    let (mut scored, mut sum) = (0, 0.0);
    for (index, window) in tokens.chunks(context).enumerate() {
        let whole = window.len() == context;
        let first = match scoring {
            Scoring::All if window.len() >= 2 => 0,
            Scoring::SecondHalf if whole => context / 2,
            _ => continue,
        };
        let mut input = window.to_vec();
        if let (Scoring::SecondHalf, Some(bos)) = (scoring, bos) {
            input[0] = bos;
        }
        let logits = model.forward(&input[..input.len() - 1], &mut model.cache(), Logits::All)?;
        let logits = logits.ok_or(ModelError::NoTokens)?.to_device(model.host())?;
        let vocab_size = logits.dim(-1);
        let rows = logits.as_slice::<f32>()?.chunks_exact(vocab_size);
        for (row, &target) in rows.zip(&window[1..]).skip(first) {
            sum += negative_log_likelihood(row, target);
            scored += 1;
        }
        if progress((index * context) + window.len()).is_break() {
            break;
        }
    }
    if scored == 0 {
        return Err(ModelError::TooShort { tokens: tokens.len(), context });
    }
    Ok(Perplexity { tokens: scored, nll: sum / scored as f64 })
}

fn negative_log_likelihood(logits: &[f32], target: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    sum.ln() + f64::from(max) - f64::from(logits[target as usize])
}
