use crate::ops::glu::Gate;

/// Roundings to a result: `width` in the sum, division and eps before the root halve; root,
/// reciprocal, two products; the gate and its product.
pub fn roundings(width: usize, gated: bool) -> usize {
    width.div_ceil(2) + 5 + if gated { Gate::Silu.roundings() } else { 0 }
}

/// `x / sqrt(mean(x^2) + eps) * weight`, times `silu(gate)` where there is one.
pub fn rms_norm(x: &[f32], gate: Option<&[f32]>, weight: &[f32], eps: f32) -> Vec<f64> {
    let width = weight.len();
    let mut y = Vec::with_capacity(x.len());
    for (row, x) in x.chunks(width).enumerate() {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
        for (d, (&x, &weight)) in x.iter().zip(weight).enumerate() {
            let gate = gate.map_or(1.0, |gate| Gate::Silu.reference(gate[row * width + d].into()).factor.0);
            y.push(f64::from(x) / (mean + f64::from(eps)).sqrt() * f64::from(weight) * gate);
        }
    }
    y
}

/// silu, and its derivative with the magnitude of its terms.
pub fn silu_and_slope(x: f64) -> (f64, f64, f64) {
    let s = 1.0 / (1.0 + (-x).exp());
    (x * s, s * (1.0 + x * (1.0 - s)), s * (1.0 + x.abs() * (1.0 - s)))
}
