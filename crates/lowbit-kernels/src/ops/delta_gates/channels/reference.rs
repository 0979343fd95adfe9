//! A channel's decay in f64, and how far f32 may be from it: by softplus that of the delta rule's
//! gates.

use super::super::reference::{U, delta_gates, sigmoid};
use super::ChannelDecay;

/// `(value, bound)` of `log_decay` of one channel.
///
/// With a bound, the sum rounds once, `exp(a_log)` is within 4 u, the product with it rounds once,
/// and sigmoid passes all that on with slope `s (1 - s)`; it is itself within 5 u, and the last
/// product rounds once. Subnormal numbers may be flushed to zero.
pub(crate) fn channel_decay(a: f32, a_log: f32, dt_bias: f32, decay: ChannelDecay) -> (f64, f64) {
    let ChannelDecay::Bounded(bound) = decay else {
        return delta_gates(a, 0.0, a_log, dt_bias)[0];
    };
    let x = f64::from(a_log).exp() * (f64::from(a) + f64::from(dt_bias));
    let (s, bound) = (sigmoid(x), f64::from(bound));
    let relative = U * (6.0 * (1.0 - s) * x.abs() + 5.0 + 1.0);
    let flushed = f64::from(f32::MIN_POSITIVE);
    (bound * s, bound.abs() * (s * relative + 2.0 * flushed) + flushed)
}
