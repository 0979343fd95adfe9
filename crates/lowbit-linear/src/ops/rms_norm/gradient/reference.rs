//! The gradients in f64, and how far f32 may be from each: the sum of its terms' magnitudes times
//! [`gamma`].

use crate::gamma::gamma;
use crate::ops::rms_norm::reference::{roundings, silu_and_slope};

/// Values in f64, and the bound of each.
pub(in crate::ops) type Bounded = (Vec<f64>, Vec<f64>);

/// `[dx, dgate, dweight]`; dgate is of no gate where there is none.
pub(in crate::ops) fn rms_norm_backward(
    x: &[f32],
    gate: Option<&[f32]>,
    (weight, eps): (&[f32], f32),
    dy: &[f32],
) -> [Bounded; 3] {
    let width = weight.len();
    let rows = x.len() / width;
    let mut dx = (vec![], vec![]);
    let mut dgate = (vec![], vec![]);
    let mut dweight = (vec![0.0; width], vec![0.0; width]);
    // Of r alone, which comes three times; of the sum with dz, and of what makes and joins both
    // terms.
    let of_r = roundings(width, gate.is_some());
    let (of_dx, of_dgate) = (gamma(3 * of_r + width + 8), gamma(of_r + 16));
    let of_dweight = gamma(rows + of_r + 4);
    for (row, x) in x.chunks_exact(width).enumerate() {
        let at = |d: usize| row * width + d;
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
        let r = 1.0 / (mean + f64::from(eps)).sqrt();
        let gated = |d: usize| gate.map_or((1.0, 0.0, 0.0), |gate| silu_and_slope(gate[at(d)].into()));
        let dy = |d: usize| f64::from(dy[at(d)]);
        let dz = |d: usize| f64::from(weight[d]) * dy(d) * gated(d).0;
        let along: f64 = (0..width).map(|d| f64::from(x[d]) * dz(d)).sum::<f64>() / width as f64;
        let most: f64 = (0..width).map(|d| (f64::from(x[d]) * dz(d)).abs()).sum::<f64>() / width as f64;
        for (d, &x) in x.iter().enumerate() {
            let x = f64::from(x);
            dx.0.push(r * (dz(d) - x * r * r * along));
            dx.1.push(of_dx * r * (dz(d).abs() + x.abs() * r * r * most));
            let norm = x * r * f64::from(weight[d]);
            let (silu, slope, magnitude) = gated(d);
            dgate.0.push(dy(d) * norm * slope);
            dgate.1.push(of_dgate * (dy(d) * norm).abs() * magnitude);
            dweight.0[d] += dy(d) * silu * x * r;
            dweight.1[d] += of_dweight * (dy(d) * silu * x * r).abs();
        }
    }
    [dx, dgate, dweight]
}
