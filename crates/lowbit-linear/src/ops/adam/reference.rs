use super::{AdamStep, BETA1, BETA2, EPS};

/// A number after a step, and its averages, in f64; and how much rounding may change each, in units
/// of f32's.
pub(crate) fn adam([value, mean, square]: [f32; 3], gradient: f32, step: AdamStep) -> ([f64; 3], [f64; 3]) {
    let [value, mean, square, gradient] = [value, mean, square, gradient].map(f64::from);
    let [beta1, beta2] = [BETA1, BETA2].map(f64::from);
    // The ops' factors: 1 - beta in f32.
    let [rest1, rest2] = [BETA1, BETA2].map(|beta| f64::from(1.0 - beta));
    let mean_terms = (beta1 * mean).abs() + (rest1 * gradient).abs();
    let mean = beta1 * mean + rest1 * gradient;
    let square = beta2 * square + rest2 * gradient * gradient;
    let unbiased = |x: f64, beta: f64| x / (1.0 - beta.powi(step.count as i32));
    let root = unbiased(square, beta2).sqrt() + f64::from(EPS);
    let moved = f64::from(step.rate) * unbiased(mean, beta1) / root;
    let most = f64::from(step.rate) * unbiased(mean_terms, beta1) / root;
    // A mean of terms that cancel is as wrong as its terms; the rest are a root, a quotient and
    // four products.
    ([value - moved, mean, square], [value.abs() + moved.abs() + 16.0 * most, 4.0 * mean_terms, 5.0 * square])
}
