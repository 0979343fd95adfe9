use super::RmsNormRope;
use crate::gamma::gamma;
use crate::ops::rms_norm::reference as rms_norm;
use crate::ops::rope::{RopeLayout, reference as rope};

/// Heads in f64, and how far f32 may be from each element: a rotation adds two products, each with
/// the norm's roundings and its own. `x` is `[positions, heads, columns]`; `weight` stands for the
/// one that `params` has.
pub(crate) fn rms_norm_rope(
    x: &[f32],
    columns: usize,
    weight: &[f32],
    positions: &[u32],
    params: &RmsNormRope<'_>,
) -> Vec<(f64, f64)> {
    let width = params.head_dim;
    let x: Vec<f32> = x.chunks(columns).flat_map(|head| &head[..width]).copied().collect();
    let (heads, roundings) = match params.norm {
        Some((_, eps)) => (rms_norm::rms_norm(&x, None, weight, eps), rms_norm::roundings(width, false)),
        None => (x.iter().map(|&x| x.into()).collect(), 0),
    };
    let (rotary, half) = (params.rope.rotary_dim(), params.rope.rotary_dim() / 2);
    let factor = f64::from(params.rope.attention_factor()).max(1.0);
    let bound = |(i, head): (usize, &f64)| {
        let other = match (i % width, params.rope.layout()) {
            (d, _) if d >= rotary => return gamma(roundings) * head.abs(),
            (_, RopeLayout::Interleaved) => i / width * width + ((i % width) ^ 1),
            (d, RopeLayout::HalfSplit) => i / width * width + (d + half) % rotary,
        };
        gamma(roundings + rope::ROUNDINGS) * factor * (head.abs() + heads[other].abs())
    };
    let bounds: Vec<f64> = heads.iter().enumerate().map(bound).collect();
    rope::rope(&heads, width, positions, params.rope).into_iter().zip(bounds).collect()
}
