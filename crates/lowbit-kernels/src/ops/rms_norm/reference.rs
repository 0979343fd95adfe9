use crate::ops::elementwise::Gate;
use crate::ops::silu_mul::{SiluMul, silu};

/// Roundings to a result: `width` in the sum, division and eps before the root halve; root, reciprocal, two products;
/// the gate and its product.
pub(crate) fn roundings(width: usize, gated: bool) -> usize {
    width.div_ceil(2) + 5 + if gated { SiluMul::ROUNDINGS } else { 0 }
}

/// `x / sqrt(mean(x^2) + eps) * weight`, times `silu(gate)` where there is one.
pub(crate) fn rms_norm(x: &[f32], gate: Option<&[f32]>, weight: &[f32], eps: f32) -> Vec<f64> {
    let width = weight.len();
    let mut y = Vec::with_capacity(x.len());
    for (row, x) in x.chunks(width).enumerate() {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
        for (d, (&x, &weight)) in x.iter().zip(weight).enumerate() {
            let gate = gate.map_or(1.0, |gate| silu(f64::from(gate[row * width + d])));
            y.push(f64::from(x) / (mean + f64::from(eps)).sqrt() * f64::from(weight) * gate);
        }
    }
    y
}
