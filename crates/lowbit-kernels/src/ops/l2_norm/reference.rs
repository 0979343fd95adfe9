/// Roundings to a result: `width` in the sum, two with eps before the root halve; root, reciprocal,
/// product.
pub(crate) fn roundings(width: usize) -> usize {
    width.div_ceil(2) + 4
}

/// `x / |x|` for each row of `width`.
pub(crate) fn l2_norm(x: &[f32], width: usize, eps: f32) -> Vec<f64> {
    let row = |x: &[f32]| {
        let sum: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let length = (sum + f64::from(eps)).sqrt();
        x.iter().map(|&x| f64::from(x) / length).collect::<Vec<_>>()
    };
    x.chunks(width).flat_map(row).collect()
}
