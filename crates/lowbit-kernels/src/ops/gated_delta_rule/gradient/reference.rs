//! The gradients in f64, and how far f32 may be from each.
//!
//! To first order in `u = 2^-24`, for each column j of the state, with `kept` what is left of it
//! after its decay, `r` the residual `v - kept^T k`, `G` the state's gradient, and `M >= |kept|`
//! and `N >= |G|` the magnitudes of their terms:
//! ```text
//! e(kept_j) = decay e(S_j) + 4 u |M_j|                 e(r_j) = e(kept_j) |k| + (Dk + 4) u M_j . |k| + 2 u |v_j|
//! e(S_j)    = rho e(kept_j) + beta |k| (the roundings of r_j) + 3 u |M_j|
//! e(dd_j)   = e(G_j) |k| + (Dk + 2) u N_j . |k|         dd = G^T k
//! e(G_j)    = decay (rho e(G_j) + beta |k| (the roundings of dd_j) + 8 u |N_j|)
//! ```
//! in the 2-norm, since errors pass through `I - beta k k^T`, whose norm is
//! `rho = max(1, |1 - beta |k|^2|)`, in both directions. The results sum up products: each factor's
//! error times the other factor, and a rounding for each term.

use super::{Decay, Problem};
use crate::ops::gated_delta_rule::reference::{Bounded, TINY, U, dot, dot_magnitudes};
use std::ops::Range;

impl Bounded {
    fn zeros(len: usize) -> Self {
        Self { values: vec![0.0; len], bounds: vec![TINY; len] }
    }

    fn add(&mut self, at: usize, (value, bound): (f64, f64)) {
        self.values[at] += value;
        self.bounds[at] += bound + 16.0 * U * (value.abs() + bound);
    }
}

/// A matrix's columns.
type Columns = Vec<Vec<f64>>;

/// A token's step as the way back needs it.
struct Kept {
    /// Of each column: what was left of it, its terms' magnitudes, and its error.
    s: Columns,
    m: Columns,
    error: Vec<f64>,
    /// The residual and its error.
    r: Vec<(f64, f64)>,
}

/// A token's operands for one value head.
struct Token {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    dy: Vec<f64>,
    decay: f64,
    beta: f64,
}

fn norm(x: &[f64]) -> f64 {
    dot(x, x).sqrt()
}

impl Token {
    fn rho(&self) -> f64 {
        (1.0 - self.beta * dot(&self.k, &self.k)).abs().max(1.0)
    }
}

/// `[dq, dk, dv, dlog_decay, dbeta]`.
pub(super) fn gated_delta_rule_backward(
    problem: &Problem<'_>,
    sequences: &[Range<usize>],
    state: &[f32],
    dy: &[f32],
) -> [Bounded; 5] {
    let Decay::Heads(log_decay) = problem.decay else { panic!("a decay per channel has no gradient") };
    let dims = problem.dims;
    let (key_dim, value_heads, value_dim) = (dims.key_dim, dims.value_heads, dims.value_dim);
    let gates = problem.beta.len();
    let lens = [problem.q.len(), problem.k.len(), problem.v.len(), gates, gates];
    let mut all = lens.map(Bounded::zeros);
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    for (sequence, tokens) in sequences.iter().enumerate() {
        for head in 0..value_heads {
            let place =
                |t: usize| (t * dims.key_heads + dims.key_head(problem.params.head_map, head)) * key_dim;
            let token = |t: usize| {
                let (key, gate) = (place(t)..place(t) + key_dim, t * value_heads + head);
                let value = gate * value_dim..(gate + 1) * value_dim;
                Token {
                    q: wide(&problem.q[key.clone()]),
                    k: wide(&problem.k[key]),
                    v: wide(&problem.v[value.clone()]),
                    dy: wide(&dy[value]),
                    decay: f64::from(log_decay[gate]).exp(),
                    beta: problem.beta[gate].into(),
                }
            };
            let first = (sequence * value_heads + head) * key_dim * value_dim;
            let column = |j: usize| {
                (0..key_dim).map(|i| f64::from(state[first + i * value_dim + j])).collect::<Vec<_>>()
            };
            let all_tokens: Vec<Token> = tokens.clone().map(token).collect();
            let kept = forward(&all_tokens, (0..value_dim).map(column).collect());
            let mut back = Back::new(key_dim, value_dim, problem);
            for (i, t) in tokens.clone().enumerate().rev() {
                let gate = t * value_heads + head;
                back.step(&all_tokens[i], &kept[i], &mut all, (place(t), gate * value_dim, gate));
            }
        }
    }
    all
}

/// The steps of a head from its first state, column by column.
fn forward(tokens: &[Token], mut s: Columns) -> Vec<Kept> {
    let mut m: Columns = s.iter().map(|s| s.iter().map(|s| s.abs()).collect()).collect();
    let mut error = vec![0.0; s.len()];
    let mut all = vec![];
    for token in tokens {
        let (k, width) = (&token.k, token.k.len() as f64);
        let mut r = vec![];
        let mut kept = Kept { s: vec![], m: vec![], error: vec![], r: vec![] };
        for j in 0..s.len() {
            s[j].iter_mut().chain(&mut m[j]).for_each(|s| *s *= token.decay);
            let of_kept = token.decay * error[j] + 4.0 * U * norm(&m[j]);
            let rounded = (width + 4.0) * U * dot_magnitudes(&m[j], k) + 2.0 * U * token.v[j].abs();
            let residual = token.v[j] - dot(&s[j], k);
            r.push((residual, of_kept * norm(k) + rounded));
            kept.s.push(s[j].clone());
            kept.m.push(m[j].clone());
            kept.error.push(of_kept);
            for ((s, m), &k) in s[j].iter_mut().zip(&mut m[j]).zip(k) {
                *s += token.beta * k * residual;
                *m += (token.beta * k * residual).abs();
            }
            error[j] = token.rho() * of_kept + token.beta.abs() * norm(k) * rounded + 3.0 * U * norm(&m[j]);
        }
        kept.r = r;
        all.push(kept);
    }
    all
}

/// The gradient of a head's state on its way back.
struct Back {
    scale: f64,
    g: Columns,
    n: Columns,
    error: Vec<f64>,
}

impl Back {
    fn new(key_dim: usize, value_dim: usize, problem: &Problem<'_>) -> Self {
        let zeros = || vec![vec![0.0; key_dim]; value_dim];
        let scale = problem.params.scale.into();
        Self { scale, g: zeros(), n: zeros(), error: vec![0.0; value_dim] }
    }

    /// `[dq, dk, dv, dlog_decay, dbeta]` of a token go to `all`, from these places on.
    fn step(&mut self, token: &Token, kept: &Kept, all: &mut [Bounded; 5], places: (usize, usize, usize)) {
        let Token { q, k, dy, decay, beta, .. } = token;
        let (key, value, gate) = places;
        let (rows, columns) = (k.len(), dy.len());
        let terms = columns as f64 + 6.0;
        for (j, dy) in dy.iter().enumerate() {
            for (i, q) in q.iter().enumerate() {
                self.g[j][i] += self.scale * q * dy;
                self.n[j][i] += (self.scale * q * dy).abs();
            }
            self.error[j] += 3.0 * U * norm(&self.n[j]);
        }
        // ddelta: its value, its error, and the part of this that its own sum rounds.
        let dd = |j: usize| {
            let rounded = (rows as f64 + 2.0) * U * dot_magnitudes(&self.n[j], k);
            (dot(&self.g[j], k), self.error[j] * norm(k) + rounded, rounded)
        };
        let dd: Vec<(f64, f64, f64)> = (0..columns).map(dd).collect();
        let dv: Vec<(f64, f64)> =
            dd.iter().map(|&(dd, off, _)| (beta * dd, beta.abs() * off + U * (beta * dd).abs())).collect();
        let sum = |f: &dyn Fn(usize) -> (f64, f64)| {
            (0..columns).map(f).fold((0.0, 0.0), |(v, b), (value, bound)| (v + value, b + bound))
        };
        // A product of two that are off, a rounding for each term of their magnitudes on top.
        let product = |(a, of_a): (f64, f64), (b, of_b): (f64, f64), magnitude: f64| {
            (
                a * b,
                of_a * b.abs()
                    + a.abs() * of_b
                    + of_a * of_b
                    + terms * U * (magnitude + of_a * b.abs() + a.abs() * of_b),
            )
        };
        let r = &kept.r;
        all[4].add(gate, sum(&|j| product((dd[j].0, dd[j].1), r[j], (dd[j].0 * r[j].0).abs())));
        let along = sum(&|j| product(r[j], (dy[j], 0.0), (r[j].0 * dy[j]).abs()));
        let most: f64 = (0..columns).map(|j| (r[j].0 * dy[j]).abs()).sum();
        for (i, k) in k.iter().enumerate() {
            let reads =
                sum(&|j| product((kept.s[j][i], kept.error[j]), (dy[j], 0.0), kept.m[j][i] * dy[j].abs()));
            let bound = reads.1 + (k * beta).abs() * (along.1 + 4.0 * U * most);
            all[0].add(key + i, (self.scale * (reads.0 + k * beta * along.0), self.scale.abs() * bound));
            let added = sum(&|j| product((self.g[j][i], self.error[j]), r[j], self.n[j][i] * r[j].0.abs()));
            let taken = sum(&|j| product((kept.s[j][i], kept.error[j]), dv[j], kept.m[j][i] * dv[j].0.abs()));
            all[1].add(key + i, (beta * added.0 - taken.0, beta.abs() * added.1 + taken.1));
        }
        let mut dlog = (0.0, 0.0);
        for j in 0..columns {
            all[2].add(value + j, dv[j]);
            for (i, k) in k.iter().enumerate() {
                self.g[j][i] -= k * dv[j].0;
                self.n[j][i] += (k * dv[j].0).abs();
            }
            let moved = token.rho() * self.error[j] + beta.abs() * norm(k) * dd[j].2;
            self.error[j] = moved + 4.0 * U * norm(&self.n[j]);
            dlog.0 += dot(&self.g[j], &kept.s[j]);
            let (of_g, of_s) = (self.error[j], kept.error[j]);
            dlog.1 += of_g * norm(&kept.s[j]) + norm(&self.g[j]) * of_s + of_g * of_s;
            dlog.1 += (rows as f64 + terms) * U * dot(&self.n[j], &kept.m[j]);
            self.g[j].iter_mut().chain(&mut self.n[j]).for_each(|g| *g *= decay);
            self.error[j] = decay * self.error[j] + 4.0 * U * norm(&self.n[j]);
        }
        all[3].add(gate, dlog);
    }
}
