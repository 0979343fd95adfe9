use super::{Rope, RopeLayout};

/// Roundings to a product: cosine and sine are within 1 ulp; the factor, the product and the sum.
pub(crate) const ROUNDINGS: usize = 5;

/// The rotation in f64 from the same f32 angles: the angle's rounding is part of the contract.
/// `x` is `[positions, heads, width]`.
pub(crate) fn rope<T: Copy + Into<f64>>(x: &[T], width: usize, positions: &[u32], rope: &Rope) -> Vec<f64> {
    let (half, heads) = (rope.inv_freq.len(), x.len() / width / positions.len().max(1));
    let mut y: Vec<f64> = x.iter().map(|&x| x.into()).collect();
    for (row, y) in y.chunks_mut(width).enumerate() {
        for (i, &f) in rope.inv_freq.iter().enumerate() {
            let angle = f64::from(positions[row / heads] as f32 * f);
            let (a, b) = match rope.layout {
                RopeLayout::HalfSplit => (i, i + half),
                RopeLayout::Interleaved => (2 * i, 2 * i + 1),
            };
            let (sin, cos) = angle.sin_cos();
            let factor = f64::from(rope.attention_factor);
            (y[a], y[b]) = ((y[a] * cos - y[b] * sin) * factor, (y[b] * cos + y[a] * sin) * factor);
        }
    }
    y
}
