mod compare;
mod layers;
mod statistics;

pub use compare::{ComparedToken, compare};
pub use layers::compare_layers;
pub use statistics::{Estimate, Quantiles, Statistics};

use crate::{Cache, Logits, Model, ModelError};
use lowbit_kernels::Tensor;
use std::ops::ControlFlow;

/// The tokens of a window that are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// All but the first, also in the shorter window at the end of the text.
    All,
    /// The second half, over whole windows only, as llama-perplexity does.
    SecondHalf,
}

/// A model's perplexity on a text.
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

/// Scores `tokens` in windows of `context` tokens that do not overlap, each from an empty cache.
/// With [`Scoring::SecondHalf`] and the id of BOS in `scoring`, each window's first token is
/// replaced by it, as llama-perplexity does for models that start with one. `progress` is called
/// with the number of tokens done, and stops the run by returning `Break`.
///
/// # Errors
/// [`ModelError::Window`] and [`ModelError::TooShort`]; [`ModelError::Logits`] for logits that are
/// NaN or infinite (-inf beside finite ones is allowed) and [`ModelError::Impossible`] for a token
/// whose logit is -inf; those of [`Model::forward`].
pub fn perplexity(
    model: &Model,
    tokens: &[u32],
    context: usize,
    scoring: (Scoring, Option<u32>),
    mut progress: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<Perplexity, ModelError> {
    let windows = windows(tokens, context, scoring)?;
    model.check_ids(tokens)?;
    let (mut scored, mut sum) = (0, 0.0);
    for window in windows {
        each_row([model], &window, |position, [row]| {
            sum += window.nll(row, position)?;
            scored += 1;
            Ok(())
        })?;
        if progress(window.end()).is_break() {
            break;
        }
    }
    if scored == 0 {
        return Err(ModelError::TooShort { tokens: tokens.len(), context });
    }
    Ok(Perplexity { tokens: scored, nll: sum / scored as f64 })
}

/// Work for [`Model::load_compiled`]: runs what [`perplexity`] and [`compare`] run for a text of
/// this many tokens, one window of each length.
///
/// # Errors
/// As [`Model::forward`], but without those for texts that cannot be scored.
pub fn dry_perplexity(
    model: &Model,
    tokens: usize,
    context: usize,
    scoring: Scoring,
) -> Result<(), ModelError> {
    let text = vec![0; tokens];
    let Ok(windows) = windows(&text, context, (scoring, None)) else { return Ok(()) };
    let mut lengths: Vec<usize> = windows.map(|window| window.input.len()).collect();
    lengths.dedup();
    for &length in lengths.iter().filter(|&&length| length <= model.config().max_position_embeddings) {
        let mut cache = model.cache();
        for chunk in text[..length].chunks(chunk([model])) {
            model.forward(chunk, &mut cache, Logits::All)?;
        }
    }
    Ok(())
}

/// Tokens of which the logits of `models` are computed in a pass.
fn chunk<const N: usize>(models: [&Model; N]) -> usize {
    let most_values = models.iter().map(|model| model.config().vocab_size).max().unwrap_or(1);
    (MOST_LOGITS / most_values.max(1)).max(1)
}

/// A part of a text that is read from an empty cache.
struct Window<'a> {
    /// The models' input: all tokens but the last, the first of them replaced by BOS if that was
    /// asked for.
    input: Vec<u32>,
    /// The token after each of them.
    targets: &'a [u32],
    /// The first position of `targets` that is scored.
    first: usize,
    /// Tokens of the text before this window; errors count from the text's start.
    before: usize,
}

impl Window<'_> {
    /// The number of the text's tokens that are done after this window.
    fn end(&self) -> usize {
        self.before + self.targets.len() + 1
    }

    /// The negative log-likelihood of the token after `position`, given its logits.
    fn nll(&self, logits: &[f32], position: usize) -> Result<f64, ModelError> {
        let id = self.targets[position];
        match negative_log_likelihood(logits, id) {
            nll if nll.is_finite() => Ok(nll),
            _ => Err(ModelError::Impossible { index: self.before + position + 1, id }),
        }
    }
}

/// The windows of `tokens` of which something is scored.
fn windows(
    tokens: &[u32],
    context: usize,
    (scoring, bos): (Scoring, Option<u32>),
) -> Result<impl Iterator<Item = Window<'_>>, ModelError> {
    if context < 2 {
        return Err(ModelError::Window(context));
    }
    if scoring == Scoring::SecondHalf && tokens.len() / 2 < context {
        return Err(ModelError::TooShort { tokens: tokens.len(), context });
    }
    Ok(tokens.chunks(context).enumerate().filter_map(move |(index, window)| {
        let (before, whole) = (index * context, window.len() == context);
        let first = match scoring {
            Scoring::All if window.len() >= 2 => 0,
            Scoring::SecondHalf if whole => context / 2,
            _ => return None,
        };
        let mut input = window[..window.len() - 1].to_vec();
        if let (Scoring::SecondHalf, Some(bos)) = (scoring, bos) {
            input[0] = bos;
        }
        Some(Window { input, targets: &window[1..], first, before })
    }))
}

/// The most logits per forward pass of one model: a gigabyte.
const MOST_LOGITS: usize = 1 << 28;

/// Runs models side by side over a window and calls `visit` with each scored position and every
/// model's logits there. The logits of all positions are checked. Models after the first are named
/// as teachers in errors.
fn each_row<const N: usize>(
    models: [&Model; N],
    window: &Window<'_>,
    mut visit: impl FnMut(usize, [&[f32]; N]) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let of = |index: usize, error| if index == 0 { error } else { ModelError::Teacher(Box::new(error)) };
    for (index, model) in models.iter().enumerate() {
        let (tokens, limit) = (window.input.len(), model.config().max_position_embeddings);
        if tokens > limit {
            return Err(of(index, ModelError::ContextLength { tokens, limit }));
        }
    }
    let mut caches = models.map(Model::cache);
    let mut start = 0;
    for chunk in window.input.chunks(chunk(models)) {
        let mut logits = Vec::with_capacity(N);
        for (index, (model, cache)) in models.iter().zip(&mut caches).enumerate() {
            logits.push(all_logits(model, cache, chunk).map_err(|error| of(index, error))?);
        }
        for (row, position) in (start..start + chunk.len()).enumerate() {
            let mut rows: [&[f32]; N] = [&[]; N];
            for (index, (logits, model)) in logits.iter().zip(models).enumerate() {
                let vocab_size = model.config().vocab_size;
                rows[index] = &logits.as_slice::<f32>()?[row * vocab_size..][..vocab_size];
                check(rows[index]).map_err(|(token, got)| {
                    of(index, ModelError::Logits { position: window.before + position + 1, token, got })
                })?;
            }
            if position >= window.first {
                visit(position, rows)?;
            }
        }
        start += chunk.len();
    }
    Ok(())
}

/// The logits after each token of `chunk`, in the host's memory.
fn all_logits(model: &Model, cache: &mut Cache, chunk: &[u32]) -> Result<Tensor, ModelError> {
    let logits = model.forward(chunk, cache, Logits::All)?.ok_or(ModelError::NoTokens)?;
    Ok(logits.to_device(model.host())?)
}

/// Checks that no logit is NaN or +inf and that at least one is finite. The error is the offending
/// token and its logit.
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

/// `ln(sum exp(logits))`.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // In f64: the distance of two finite f32 may be more than an f32 holds.
    let max = f64::from(max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    sum.ln() + max
}

fn negative_log_likelihood(logits: &[f32], target: u32) -> f64 {
    log_sum_exp(logits) - f64::from(logits[target as usize])
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
