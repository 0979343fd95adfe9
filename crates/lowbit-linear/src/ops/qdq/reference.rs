//! The formulas in f64, and how far f32 may be from them.

use crate::gamma::gamma;

/// `(scale, bias)` of a group, and how far the scale may be off: a subtraction and a division, each
/// rounded once (Vulkan lets a division be 2.5 units in the last place off).
pub(crate) fn grid(w: &[f32], levels: usize) -> (f64, f64, f64) {
    let (min, max) = w.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), &w| {
        (min.min(f64::from(w)), max.max(f64::from(w)))
    });
    let scale = (max - min) / (levels - 1) as f64;
    let scale = if scale > 0.0 { scale } else { 1.0 };
    (scale, min, scale * gamma(4) + f64::from(f32::MIN_POSITIVE))
}

#[cfg(test)]
/// The distance of `code` from `(w - bias) / scale`, in steps: at most a half, and f32's roundings.
pub(crate) fn distance(w: f32, code: u8, (scale, bias): (f64, f64)) -> f64 {
    ((f64::from(w) - bias) / scale - f64::from(code)).abs()
}

/// `code * scale + bias`, and how far f32 may be off.
pub(crate) fn forward(code: u8, scale: f32, bias: f32) -> (f64, f64) {
    let product = f64::from(code) * f64::from(scale);
    let y = product + f64::from(bias);
    (y, gamma(2) * (product.abs() + f64::from(bias).abs()) + f64::from(f32::MIN_POSITIVE))
}

/// The sum of a group's `factor * dy`, and how far f32 may be off in whatever order it adds.
pub(crate) fn sum(terms: impl Iterator<Item = (f64, f32)>) -> (f64, f64) {
    let (mut sum, mut magnitude, mut count) = (0.0, 0.0, 0);
    for (factor, dy) in terms {
        let term = factor * f64::from(dy);
        (sum, magnitude, count) = (sum + term, magnitude + term.abs(), count + 1);
    }
    (sum, gamma(count + 1) * magnitude + f64::from(f32::MIN_POSITIVE))
}
