//! The gates in f64, and how far f32 may be from them: as those of the delta rule are.

use super::StepLimits;

const U: f64 = f32::EPSILON as f64 / 2.0;

/// `(value, bound)` of `log_decay` and of `beta` for one token and head. The roundings are
/// [`super::super::reference`]'s; a clamp adds none.
pub(crate) fn step_gates(dt: f32, a_log: f32, dt_bias: f32, limits: StepLimits) -> [(f64, f64); 2] {
    let x = f64::from(dt) + f64::from(dt_bias);
    let rate = f64::from(a_log).exp();
    let tail = (-x.abs()).exp();
    let softplus = x.max(0.0) + tail.ln_1p();
    let step = softplus.clamp(limits.least.into(), limits.most.into());
    let slope = 1.0 / (1.0 + (-x).exp());
    let bound = U * (slope * x.abs() + 4.0 * tail + (4.0 + 1.0) * softplus);
    let flushed = f64::from(f32::MIN_POSITIVE);
    let of_decay = rate * (bound + (4.0 + 1.0) * U * step) + (1.0 + 2.0 * rate) * flushed;
    [(-rate * step, of_decay), (step, bound + flushed)]
}
