use super::Activation;

/// One sequence in f64: `x` `[T, C]`, `weight` `[C, W]`, `state` `[C, W-1]`. Returns `y`, and what
/// the sum's terms amount to without cancelling.
pub(crate) fn causal_conv1d(
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    state: &[f32],
    channels: usize,
    activation: Option<Activation>,
) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len() / channels;
    let input = |t: usize, c: usize| match t.checked_sub(width - 1) {
        Some(t) => x[t * channels + c],
        None => state[c * (width - 1) + t],
    };
    let one = |at: usize| {
        let (t, c) = (at / channels, at % channels);
        let terms = (0..width).map(|w| f64::from(weight[c * width + w]) * f64::from(input(t + w, c)));
        let bias = bias.map_or(0.0, |bias| f64::from(bias[c]));
        let (sum, magnitude) = terms.fold((bias, bias.abs()), |(s, m), term| (s + term, m + term.abs()));
        match activation {
            Some(Activation::Silu) => (sum / (1.0 + (-sum).exp()), magnitude),
            None => (sum, magnitude),
        }
    };
    (0..x.len()).map(one).unzip()
}

/// The bound of the error of `y` in f32: the sum's `width + 1` roundings go through the activation,
/// whose slope is below 1.1, and which is within 3.5 units of its last place, or of 2^-119's.
pub(crate) fn bound(y: f64, magnitude: f64, width: usize, activation: Option<Activation>) -> f64 {
    const U: f64 = f32::EPSILON as f64 / 2.0;
    let sum = (width + 1) as f64 * U * magnitude + f64::from(f32::MIN_POSITIVE);
    match activation {
        Some(Activation::Silu) => 1.1 * sum + 2.0 * 3.5 * U * (y.abs() + 2f64.powi(-119)),
        None => sum,
    }
}
