//! The gradients in f64, and how far f32 may be from each.
//!
//! A weight's relative error is that of the forward op's, `relative`, and so is y's. A gradient of
//! a score has two terms, dy . v and dy . y, whose sums have Dv roundings each; weights, y and what
//! they make are within three times `relative` of them. The slope of a soft cap c errs by twice the
//! score's error over c, and a few roundings.

use super::AttentionParams;
use crate::gamma::gamma;
use crate::ops::attention::reference::{self, Operands, relative};

/// Values, and the bound of each.
#[derive(Clone, Debug)]
pub(super) struct Bounded {
    pub values: Vec<f64>,
    pub bounds: Vec<f64>,
}

impl Bounded {
    fn zeros(len: usize) -> Self {
        Self { values: vec![0.0; len], bounds: vec![0.0; len] }
    }

    fn add(&mut self, at: usize, term: f64, bound: f64) {
        self.values[at] += term;
        self.bounds[at] += bound;
    }
}

/// `[dq, dk, dv]`.
pub(super) fn attention_backward(of: &Operands<'_>, dy: &[f32], params: &AttentionParams) -> [Bounded; 3] {
    let [query_heads, heads, capacity, width, value_width] = of.sizes;
    let scale = f64::from(params.scale);
    let [mut dq, mut dk, mut dv] = [of.q, of.k, of.v].map(|x| Bounded::zeros(x.len()));
    let rows = of.positions.len() * query_heads;
    for row in 0..rows {
        let (h, visible) = (row % query_heads, params.visible(of.positions[row / query_heads], capacity));
        let wide = |x: &[f32], row: usize, width: usize| {
            x[row * width..(row + 1) * width].iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
        };
        let key = |j: usize| h / (query_heads / heads) * capacity + j;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let magnitude = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>();
        let (q, dy) = (wide(of.q, row, width), wide(dy, row, value_width));
        let ks: Vec<_> = visible.clone().map(|j| wide(of.k, key(j), width)).collect();
        let vs: Vec<_> = visible.clone().map(|j| wide(of.v, key(j), value_width)).collect();
        let cap = params.softcap.map(f64::from);
        let capped = |score: f64| cap.map_or(score, |cap| cap * (score / cap).tanh());
        let scores: Vec<f64> = ks.iter().map(|k| capped(scale * dot(&q, k))).collect();
        let products = ks.iter().map(|k| scale.abs() * magnitude(&q, k)).fold(0.0, f64::max);
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp() / total).collect();
        let along: f64 = weights.iter().zip(&vs).map(|(p, v)| p * dot(&dy, v)).sum();
        let of_along: f64 = weights.iter().zip(&vs).map(|(p, v)| p * magnitude(&dy, v)).sum();
        let most = [products, cap.unwrap_or(0.0)];
        let of_weight = relative(visible.len(), width, most, 0.0);
        let of_score = 2.0 * reference::score(most, width, 0.0);
        let of_slope = cap.map_or(0.0, |cap| of_score / cap + gamma(8));
        for (i, j) in visible.clone().enumerate() {
            let slope = cap.map_or(1.0, |cap| 1.0 - (scores[i] / cap).powi(2));
            let ds = scale * weights[i] * slope * (dot(&dy, &vs[i]) - along);
            let most = (scale * weights[i]).abs() * (magnitude(&dy, &vs[i]) + of_along);
            let off =
                most * (3.0 * of_weight + gamma(value_width + 8)) + most * of_slope * (1.0 + 3.0 * of_weight);
            let term = |x: f64, count: usize| (ds * x, x.abs() * (off + gamma(count + 1) * (most + off)));
            for d in 0..width {
                let (value, bound) = term(ks[i][d], visible.len());
                dq.add(row * width + d, value, bound);
                let (value, bound) = term(q[d], rows);
                dk.add(key(j) * width + d, value, bound);
            }
            for (d, dy) in dy.iter().enumerate() {
                let value = weights[i] * dy;
                dv.add(
                    key(j) * value_width + d,
                    value,
                    value.abs() * (of_weight + gamma(rows + 1) * (1.0 + of_weight)),
                );
            }
        }
    }
    [dq, dk, dv]
}
