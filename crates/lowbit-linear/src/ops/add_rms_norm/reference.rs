//! The op in f64, and the bound of f32's error.

use crate::ops::rms_norm::reference as rms_norm;

/// `(sum, y)` in f64, and how far f32 may be from each. `h + x` rounds once; that error reaches y
/// through the element and, halved by the root, through the mean square.
pub(crate) fn add_rms_norm(h: &[f32], x: &[f32], weight: &[f32], eps: f32) -> [Vec<(f64, f64)>; 2] {
    let width = weight.len();
    let sums: Vec<f64> = h.iter().zip(x).map(|(&h, &x)| f64::from(h) + f64::from(x)).collect();
    let gamma = |roundings| crate::gamma::gamma(roundings);
    let norm = |row: &[f64]| {
        let mean = row.iter().map(|sum| sum.powi(2)).sum::<f64>() / width as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        row.iter().zip(weight).map(|(sum, &weight)| sum * scale * f64::from(weight)).collect::<Vec<_>>()
    };
    let ys = sums.chunks(width).flat_map(norm);
    let roundings = rms_norm::roundings(width, false) + 2;
    [
        sums.iter().map(|&sum| (sum, gamma(1) * sum.abs())).collect(),
        ys.map(|y| (y, gamma(roundings) * y.abs())).collect(),
    ]
}
