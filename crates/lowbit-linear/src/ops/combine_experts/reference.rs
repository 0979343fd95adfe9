/// `(y, bound)` of one output, from its experts' weights and outputs: each product and each sum
/// rounds once.
pub(crate) fn combine_experts(terms: impl Iterator<Item = (f32, f32)>) -> (f64, f64) {
    let (mut sum, mut magnitude, mut count) = (0.0, 0.0, 0);
    for (weight, x) in terms {
        let term = f64::from(weight) * f64::from(x);
        (sum, magnitude, count) = (sum + term, magnitude + term.abs(), count + 1);
    }
    (sum, crate::gamma::gamma(count + 1) * magnitude + f64::from(f32::MIN_POSITIVE))
}
