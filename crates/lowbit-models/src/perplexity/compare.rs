use super::{Scoring, each_row, log_sum_exp, windows};
use crate::{Model, ModelError};
use std::ops::ControlFlow;

/// A model's and its teacher's prediction of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ComparedToken {
    /// Tokens of the window before it.
    pub position: usize,
    /// The model's negative log-likelihood of it, in nats.
    pub nll: f64,
    /// The teacher's.
    pub teacher_nll: f64,
    /// `KL(teacher || model) = sum_i p_i ln(p_i / q_i)` over the vocabulary, in nats; p are the
    /// teacher's probabilities.
    pub kl: f64,
    /// True if both give the same token the greatest probability; of equal ones the first counts.
    pub same_top: bool,
}

impl ComparedToken {
    /// The token's probability in the model less that in the teacher:
    /// `exp(-nll) - exp(-teacher_nll)`.
    pub fn probability_difference(&self) -> f64 {
        (-self.nll).exp() - (-self.teacher_nll).exp()
    }
}

/// Runs a model and its teacher side by side over `tokens`, in the windows of
/// [`super::perplexity`], and compares their predictions of each scored token. Logits of one chunk
/// of a window are held at a time, and 40 bytes per scored token are kept.
///
/// # Errors
/// Those of [`super::perplexity`], the teacher's within [`ModelError::Teacher`];
/// [`ModelError::Vocabulary`] for vocabularies of different sizes; [`ModelError::Divergence`] where
/// the model gives a token a probability of 0 and the teacher does not.
pub fn compare(
    model: &Model,
    teacher: &Model,
    tokens: &[u32],
    context: usize,
    scoring: (Scoring, Option<u32>),
    mut progress: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<ComparedToken>, ModelError> {
    let sizes = (model.config().vocab_size, teacher.config().vocab_size);
    if sizes.0 != sizes.1 {
        return Err(ModelError::Vocabulary { model: sizes.0, teacher: sizes.1 });
    }
    let windows = windows(tokens, context, scoring)?;
    model.check_ids(tokens)?;
    let mut compared = Vec::new();
    for window in windows {
        each_row([model, teacher], &window, |position, [logits, teacher_logits]| {
            let teacher_nll = window.nll(teacher_logits, position);
            let kl = divergence(teacher_logits, logits);
            let infinite = |(token, probability)| {
                let position = window.before + position + 1;
                ModelError::Divergence { position, token, probability }
            };
            compared.push(ComparedToken {
                position: position + 1,
                nll: window.nll(logits, position)?,
                teacher_nll: teacher_nll.map_err(|error| ModelError::Teacher(Box::new(error)))?,
                kl: kl.map_err(infinite)?,
                same_top: top(logits) == top(teacher_logits),
            });
            Ok(())
        })?;
        if progress(window.end()).is_break() {
            break;
        }
    }
    if compared.is_empty() {
        return Err(ModelError::TooShort { tokens: tokens.len(), context });
    }
    Ok(compared)
}

/// `KL(p || q)` of the softmax of two rows of checked logits, in f64. The error is a token with
/// `q = 0 < p`, and its p.
pub(super) fn divergence(p_logits: &[f32], q_logits: &[f32]) -> Result<f64, (usize, f64)> {
    let (p_norm, q_norm) = (log_sum_exp(p_logits), log_sum_exp(q_logits));
    let mut sum = 0.0;
    for (token, (&p, &q)) in p_logits.iter().zip(q_logits).enumerate() {
        let (ln_p, ln_q) = (f64::from(p) - p_norm, f64::from(q) - q_norm);
        let p = ln_p.exp();
        if p == 0.0 {
            continue;
        }
        if ln_q == f64::NEG_INFINITY {
            return Err((token, p));
        }
        sum += p * (ln_p - ln_q);
    }
    // A divergence is never negative; a sum of rounded terms may be.
    Ok(sum.max(0.0))
}

/// The first of the greatest logits.
fn top(logits: &[f32]) -> usize {
    let mut top = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[top] {
            top = token;
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perplexity::negative_log_likelihood;

    /// Logits in (-6, 6) that a linear congruential generator draws.
    fn logits(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..count).map(|_| 12.0 * next() - 6.0).collect()
    }

    /// `sum p ln(p / q)` of probabilities that are normalised first: no logarithm of a sum, no
    /// shift by the greatest.
    fn reference(p_logits: &[f32], q_logits: &[f32]) -> f64 {
        let softmax = |logits: &[f32]| -> Vec<f64> {
            let exps: Vec<_> = logits.iter().map(|&logit| f64::from(logit).exp()).collect();
            let sum: f64 = exps.iter().sum();
            exps.iter().map(|exp| exp / sum).collect()
        };
        softmax(p_logits).iter().zip(softmax(q_logits)).map(|(p, q)| p * (p / q).ln()).sum()
    }

    #[test]
    fn divergences_are_those_of_normalised_probabilities() {
        for (count, seed) in [(2, 1), (7, 2), (256, 3), (5003, 4)] {
            let (p, q) = (logits(seed, count), logits(seed + 100, count));
            let (got, want) = (divergence(&p, &q).unwrap(), reference(&p, &q));
            // Each term is p times a difference of logarithms below 12 + ln(count), each within a
            // few roundings of sums of `count`.
            let bound = 4.0 * count as f64 * f64::EPSILON * (12.0 + (count as f64).ln());
            assert!(want > 0.01 && (got - want).abs() <= bound, "{count}: {got} for {want}");
            assert_eq!(divergence(&p, &p), Ok(0.0));
            assert!((reference(&q, &p) - want).abs() > bound, "{count}: the operands' order counts");
        }
    }

    #[test]
    fn a_divergence_by_hand_and_excluded_tokens() {
        // p = (3/4, 1/4), q = (1/2, 1/2): 3/4 ln(3/2) + 1/4 ln(1/2).
        let want = 0.75 * 1.5f64.ln() - 0.25 * 2f64.ln();
        let got = divergence(&[3f32.ln(), 0.0], &[5.0, 5.0]).unwrap();
        assert!((got - want).abs() < f64::from(f32::EPSILON), "{got} for {want}");
        let infinite = f32::NEG_INFINITY;
        assert_eq!(divergence(&[0.0, infinite], &[0.0, infinite]), Ok(0.0));
        assert_eq!(divergence(&[0.0, infinite], &[0.0, 0.0]), Ok(2f64.ln()));
        assert_eq!(divergence(&[0.0, 0.0], &[0.0, infinite]), Err((1, 0.5)));
    }

    #[test]
    fn the_first_of_equal_logits_is_the_top() {
        assert_eq!((top(&[1.0, 3.0, 3.0]), top(&[2.0, 1.0]), top(&[f32::NEG_INFINITY, -1.0])), (1, 0, 1));
    }

    #[test]
    fn probability_differences_are_the_models_less_the_teachers() {
        let (nll, teacher_nll) = (2f64.ln(), negative_log_likelihood(&[0.0; 4], 1));
        let token = ComparedToken { position: 1, nll, teacher_nll, kl: 0.0, same_top: true };
        assert!((token.probability_difference() - 0.25).abs() < 1e-15);
    }
}
