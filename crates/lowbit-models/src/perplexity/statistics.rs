use super::ComparedToken;

/// A figure and its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The figure.
    pub value: f64,
    /// NaN for a mean of one token.
    pub error: f64,
}

impl Estimate {
    /// The mean of n values and `sqrt(sum (v - mean)^2 / n / (n - 1))`.
    fn mean(values: &[f64]) -> Self {
        let n = values.len() as f64;
        let value = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|v| (v - value).powi(2)).sum();
        Self { value, error: (squares / n / (n - 1.0)).sqrt() }
    }

    /// `exp(value)`; the error is that of the first order.
    fn exp(self) -> Self {
        let value = self.value.exp();
        Self { value, error: value * self.error }
    }
}

/// Sorted values.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantiles(Vec<f64>);

impl Quantiles {
    /// Those of `values`; there must be at least one.
    pub fn new(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        (!values.is_empty()).then_some(Self(values))
    }

    /// The value at `fraction * (n - 1)` of the sorted values, counted from 0, interpolated between
    /// its neighbours: 0 is the minimum, 0.5 the median, 1 the maximum.
    pub fn at(&self, fraction: f64) -> f64 {
        let last = self.0.len() - 1;
        let place = fraction.clamp(0.0, 1.0) * last as f64;
        let (low, part) = (place.floor() as usize, place.fract());
        (1.0 - part) * self.0[low] + part * self.0[(low + 1).min(last)]
    }
}

/// The statistics that llama-perplexity prints for `--kl-divergence` (llama.cpp,
/// tools/perplexity/perplexity.cpp), by its definitions, with Q for the model and base for its
/// teacher. Sums are in f64 over deviations from the mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Tokens scored.
    pub tokens: usize,
    /// `exp` of the model's mean nll.
    pub perplexity: Estimate,
    /// The teacher's.
    pub teacher_perplexity: Estimate,
    /// The correlation of the two nlls; NaN where one of them never changes.
    pub correlation: f64,
    /// `ln(PPL(Q) / PPL(base))`: the mean difference of the nlls.
    pub log_ratio: Estimate,
    /// `PPL(Q) / PPL(base)`.
    pub ratio: Estimate,
    /// `PPL(Q) - PPL(base)`.
    pub difference: Estimate,
    /// The mean divergence, in nats.
    pub kl: Estimate,
    /// All divergences.
    pub kls: Quantiles,
    /// The mean difference of the true token's probability, the model's less the teacher's.
    pub probability_difference: Estimate,
    /// All of these differences.
    pub probability_differences: Quantiles,
    /// The root of their mean square.
    pub probability_rms: Estimate,
    /// The share of tokens where both models' likeliest token is the same.
    pub same_top: Estimate,
}

impl Statistics {
    /// The statistics of `tokens`; `None` without tokens.
    pub fn new(tokens: &[ComparedToken]) -> Option<Self> {
        let each = |value: fn(&ComparedToken) -> f64| -> Vec<f64> { tokens.iter().map(value).collect() };
        let (nll, teacher_nll) = (each(|token| token.nll), each(|token| token.teacher_nll));
        let log = (Estimate::mean(&nll), Estimate::mean(&teacher_nll));
        let (perplexity, teacher_perplexity) = (log.0.exp(), log.1.exp());
        let log_ratio = Estimate::mean(&each(|token| token.nll - token.teacher_nll));
        // The first order of the difference of both exponentials, so that what the two have in
        // common cancels.
        let scaled = nll.iter().zip(&teacher_nll);
        let scaled: Vec<_> =
            scaled.map(|(a, b)| perplexity.value * a - teacher_perplexity.value * b).collect();
        let difference = Estimate {
            value: perplexity.value - teacher_perplexity.value,
            error: Estimate::mean(&scaled).error,
        };
        let kls = each(|token| token.kl);
        let differences = each(ComparedToken::probability_difference);
        let squares = Estimate::mean(&differences.iter().map(|p| p * p).collect::<Vec<_>>());
        let rms = squares.value.sqrt();
        let rms_error = if rms == 0.0 { 0.0 } else { squares.error / (2.0 * rms) };
        Some(Self {
            tokens: tokens.len(),
            perplexity,
            teacher_perplexity,
            correlation: correlation(&nll, &teacher_nll),
            log_ratio,
            ratio: log_ratio.exp(),
            difference,
            kl: Estimate::mean(&kls),
            kls: Quantiles::new(kls)?,
            probability_difference: Estimate::mean(&differences),
            probability_differences: Quantiles::new(differences)?,
            probability_rms: Estimate { value: rms, error: rms_error },
            same_top: Estimate::mean(&each(|token| f64::from(u8::from(token.same_top)))),
        })
    }
}

/// Pearson's correlation.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let n = a.len() as f64;
    let (mean_a, mean_b) = (a.iter().sum::<f64>() / n, b.iter().sum::<f64>() / n);
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (a - mean_a, b - mean_b);
        ab += a * b;
        aa += a * a;
        bb += b * b;
    }
    ab / (aa * bb).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(nll: f64, teacher_nll: f64, kl: f64, same_top: bool) -> ComparedToken {
        ComparedToken { position: 1, nll, teacher_nll, kl, same_top }
    }

    /// Values that repeat nowhere, of both signs in `nll - teacher_nll`.
    fn tokens(count: usize) -> Vec<ComparedToken> {
        let value = |i: usize, step: f64| (i as f64 * step).fract();
        let one = |i| {
            let teacher = 3.0 * value(i, 0.618_034);
            token(teacher + value(i, 0.414_214) - 0.4, teacher, value(i, 0.732_051).powi(3), i % 7 != 3)
        };
        (1..=count).map(one).collect()
    }

    #[track_caller]
    fn close(got: f64, want: f64) {
        // A few hundred values of about 1: sums of powers lose up to their count in roundings, a
        // variance its square root.
        assert!((got - want).abs() <= 1e-10 * want.abs().max(1e-3), "{got} for {want}");
    }

    /// llama.cpp's own sums: powers and products, no deviations.
    #[test]
    fn errors_are_those_of_sums_of_powers() {
        let tokens = tokens(301);
        let n = tokens.len() as f64;
        let got = Statistics::new(&tokens).unwrap();
        let mean = |value: &dyn Fn(&ComparedToken) -> f64| tokens.iter().map(value).sum::<f64>() / n;
        let covariance = |a: &dyn Fn(&ComparedToken) -> f64, b: &dyn Fn(&ComparedToken) -> f64| {
            (mean(&|token| a(token) * b(token)) - mean(a) * mean(b)) / (n - 1.0)
        };
        let (q, base) = (|token: &ComparedToken| token.nll, |token: &ComparedToken| token.teacher_nll);
        let (var_q, var_base, cov) = (covariance(&q, &q), covariance(&base, &base), covariance(&q, &base));
        let (ppl, ppl_base) = (mean(&q).exp(), mean(&base).exp());
        close(got.perplexity.value, ppl);
        close(got.perplexity.error, ppl * var_q.sqrt());
        close(got.teacher_perplexity.error, ppl_base * var_base.sqrt());
        close(got.correlation, cov / (var_q * var_base).sqrt());
        let ratio_error = (var_q + var_base - 2.0 * cov).sqrt();
        close(got.log_ratio.value, (ppl / ppl_base).ln());
        close(got.log_ratio.error, ratio_error);
        close(got.ratio.error, ppl / ppl_base * ratio_error);
        close(got.difference.value, ppl - ppl_base);
        let squared = ppl.powi(2) * var_q + ppl_base.powi(2) * var_base - 2.0 * ppl * ppl_base * cov;
        close(got.difference.error, squared.sqrt());
        close(got.kl.error, covariance(&|token| token.kl, &|token| token.kl).sqrt());
        let dp = ComparedToken::probability_difference;
        close(got.probability_rms.value, mean(&|token| dp(token).powi(2)).sqrt());
        let square = |token: &ComparedToken| dp(token).powi(2);
        close(
            got.probability_rms.error,
            0.5 / got.probability_rms.value * covariance(&square, &square).sqrt(),
        );
        let share = tokens.iter().filter(|token| token.same_top).count() as f64 / n;
        close(got.same_top.value, share);
        close(got.same_top.error, (share * (1.0 - share) / (n - 1.0)).sqrt());
    }

    #[test]
    fn quantiles_lie_between_neighbours() {
        let four = Quantiles::new(vec![4.0, 1.0, 8.0, 2.0]).unwrap();
        let at = [0.0, 0.25, 0.5, 0.9, 1.0].map(|fraction| four.at(fraction));
        assert_eq!(at[..3], [1.0, 1.75, 3.0]);
        assert!((at[3] - 6.8).abs() < 1e-14 && at[4] == 8.0, "{at:?}");
        assert_eq!(Quantiles::new(vec![5.0]).unwrap().at(0.99), 5.0);
        assert!(Quantiles::new(vec![]).is_none() && Statistics::new(&[]).is_none());
    }

    #[test]
    fn equal_models_differ_in_nothing() {
        let tokens: Vec<_> = (0..9).map(|i| token(f64::from(i), f64::from(i), 0.0, true)).collect();
        let got = Statistics::new(&tokens).unwrap();
        let zero = Estimate { value: 0.0, error: 0.0 };
        let zeros = [got.log_ratio, got.difference, got.kl, got.probability_difference, got.probability_rms];
        assert_eq!(zeros, [zero; 5]);
        assert_eq!(got.same_top, Estimate { value: 1.0, error: 0.0 });
        close(got.correlation, 1.0);
        assert!(Statistics::new(&tokens[..1]).unwrap().kl.error.is_nan());
    }
}
