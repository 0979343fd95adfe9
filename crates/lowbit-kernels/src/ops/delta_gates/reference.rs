//! The gates in f64, and how far f32 may be from them, in units `u = 2^-24`.

pub(super) const U: f64 = f32::EPSILON as f64 / 2.0;

/// `(value, bound)` of `log_decay` and of `beta` for one token and head.
///
/// The sum `a + dt_bias` rounds once, and softplus passes that on with slope sigmoid. Each of
/// `exp(a_log)`, `exp` and `ln_1p` is within 2 units of its last place (4 u), sigmoid within 2.5;
/// the sum and the product round once. An error of `exp(-|x|)` reaches softplus at most as it is,
/// since `ln_1p`'s slope is at most 1. Subnormal numbers may be flushed to zero: the results, and
/// of the decay the exponential and softplus, which `exp(a_log)` multiplies.
pub(crate) fn delta_gates(a: f32, b: f32, a_log: f32, dt_bias: f32) -> [(f64, f64); 2] {
    let x = f64::from(a) + f64::from(dt_bias);
    let rate = f64::from(a_log).exp();
    let tail = (-x.abs()).exp();
    let softplus = x.max(0.0) + tail.ln_1p();
    let bound = rate * U * (sigmoid(x) * x.abs() + 4.0 * tail + (4.0 + 1.0 + 4.0 + 1.0) * softplus);
    let beta = sigmoid(f64::from(b));
    let flushed = f64::from(f32::MIN_POSITIVE);
    [(-rate * softplus, bound + (1.0 + 2.0 * rate) * flushed), (beta, 2.0 * 2.5 * U * beta + flushed)]
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
