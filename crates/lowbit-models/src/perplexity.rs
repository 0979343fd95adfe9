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
/// for models that start with one. `progress` is called with the number of tokens done; `Break` stops.
///
/// # Errors
/// [`ModelError::Window`] and [`ModelError::TooShort`]; [`ModelError::Logits`] for logits that are NaN or infinite (-inf beside
/// finite ones is allowed) and [`ModelError::Impossible`] for a token whose logit is -inf; those of [`Model::forward`].
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
    if scoring == Scoring::SecondHalf && tokens.len() / 2 < context {
        return Err(ModelError::TooShort { tokens: tokens.len(), context });
    }
    model.check_ids(tokens)?;
    let (mut scored, mut sum, mut done) = (0, 0.0, 0);
    for window in tokens.chunks(context) {
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
        sum += score(model, &input[..input.len() - 1], &window[1..], (first, done))?;
        scored += window.len() - 1 - first;
        done += window.len();
        if progress(done).is_break() {
            break;
        }
    }
    if scored == 0 {
        return Err(ModelError::TooShort { tokens: tokens.len(), context });
    }
    Ok(Perplexity { tokens: scored, nll: sum / scored as f64 })
}

/// The most logits per forward pass: a gigabyte.
const MOST_LOGITS: usize = 1 << 28;

/// The sum over `targets`, from `first` on, of their negative log-likelihoods given `input`. `before` tokens of the text
/// precede the window; errors count from the text's start.
fn score(
    model: &Model,
    input: &[u32],
    targets: &[u32],
    (first, before): (usize, usize),
) -> Result<f64, ModelError> {
    let limit = model.config().max_position_embeddings;
    if input.len() > limit {
        return Err(ModelError::ContextLength { tokens: input.len(), limit });
    }
    let vocab_size = model.config().vocab_size;
    let (mut cache, mut sum, mut start) = (model.cache(), 0.0, 0);
    for chunk in input.chunks((MOST_LOGITS / vocab_size.max(1)).max(1)) {
        let logits = model.forward(chunk, &mut cache, Logits::All)?;
        let logits = logits.ok_or(ModelError::NoTokens)?.to_device(model.host())?;
        for (row, position) in logits.as_slice::<f32>()?.chunks_exact(vocab_size).zip(start..) {
            let index = before + position;
            check(row).map_err(|(token, got)| ModelError::Logits { position: index + 1, token, got })?;
            if position >= first {
                let id = targets[position];
                match negative_log_likelihood(row, id) {
                    nll if nll.is_finite() => sum += nll,
                    _ => return Err(ModelError::Impossible { index: index + 1, id }),
                }
            }
        }
        start += chunk.len();
    }
    Ok(sum)
}

/// Checks that no logit is NaN or +inf and that at least one is finite. The error is the offending token and its logit.
fn check(logits: &[f32]) -> Result<(), (usize, String)> {
    let is_bad = |logit: &f32| logit.is_nan() || *logit == f32::INFINITY;
    if let Some(token) = logits.iter().position(is_bad) {
        return Err((token, logits[token].to_string()));
    }
    match logits.iter().any(|logit| logit.is_finite()) {
        true => Ok(()),
        false => Err((0, "-inf, as all are".into())),
    }
}

fn negative_log_likelihood(logits: &[f32], target: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // In f64: the distance of two finite f32 may be more than an f32 holds.
    let max = f64::from(max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    sum.ln() + max - f64::from(logits[target as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_without_an_answer_are_named() {
        assert_eq!(check(&[1.0, f32::NEG_INFINITY]), Ok(()));
        assert_eq!(check(&[1.0, f32::NAN, f32::INFINITY]), Err((1, "NaN".into())));
        assert_eq!(check(&[1.0, f32::MAX, f32::INFINITY]), Err((2, "inf".into())));
        assert!(check(&[f32::NEG_INFINITY; 3]).is_err() && check(&[]).is_err());
    }

    #[test]
    fn likelihoods_of_far_logits() {
        assert!((negative_log_likelihood(&[0.0, 0.0], 1) - 2f64.ln()).abs() < 1e-15);
        assert_eq!(negative_log_likelihood(&[f32::MAX, f32::MIN], 0), 0.0);
        let far = negative_log_likelihood(&[f32::MAX, f32::MIN], 1);
        assert!(far.is_finite() && far > 6e38, "{far}");
        assert_eq!(negative_log_likelihood(&[0.0, f32::NEG_INFINITY], 1), f64::INFINITY);
    }
}
