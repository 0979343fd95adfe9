/// The relative error bound of a sum of `k` products in f32, in any order: `k u / (1 - k u)`,
/// `u = 2^-24` (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Multiply by
/// `sum |a_i b_i|`.
pub fn gamma(k: usize) -> f64 {
    let ku = k as f64 * f64::from(f32::EPSILON) / 2.0;
    ku / (1.0 - ku)
}
