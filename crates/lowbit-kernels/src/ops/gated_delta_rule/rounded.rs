//! Bounds on the difference between a computation in chunks and the reference where products round
//! operands to 16 bits: those that `cuda/mod.rs` names, or on a CPU those of products with the
//! state alone.
//!
//! To first order in `r`, the operands' unit roundoff, and `u = 2^-24`, with the names of that
//! file, `S` the state that a chunk starts with, `R = v - g S^T k` the errors of its predictions,
//! `M = I + L`, and `A = |M^-1|`:
//! ```text
//! |error of R|     <= r |R| + (r + 2 (Dk + 8) u) g |S|^T |k|
//! |error of T|     <= r |T| + (Dk + 4 chunk) u A Labs A diag(beta)    Labs is L of the terms' magnitudes
//! |error of delta| <= |T| |error of R| + |error of T| |R| + 4 chunk u |T| |R|
//! |error of P|     <= r |P| + (Dk + chunk) u Pabs
//! |error of y|     <= |scale| (|q| e + (r + 2 Dk u) g |S|^T |q| + |P| (|error of delta| + r |delta|) +
//!                     |error of P| |delta| + 4 chunk u |P| |delta|)
//! ```
//! where each `r |x|` stands for a rounding, `r |x| + h`: `h` is what a subnormal number may be
//! away.
//!
//! `e` is the 2-norm of the error of a column of `S`, carried to the token as `reference.rs` says;
//! at the chunk's end it grows by
//! `sum over j of D[last][j] |k[j]| (|error of delta[j]| + (r + 4 chunk u) |delta[j]|) + chunk u |S|`.

use super::reference::{Bounded, TINY, U, dot, dot_magnitudes, wide};
use super::{Dims, GatedDeltaInputs, GatedDeltaRule, Rule};
use crate::{KernelError, Tensor};
use lowbit_formats::FloatType;

/// A chunk's operands for one head.
struct Chunk<'a> {
    k: Vec<&'a [f64]>,
    q: Vec<&'a [f64]>,
    /// `decay`, and its product from the chunk's start and to its end.
    decay: Vec<f64>,
    before: Vec<f64>,
    after: Vec<f64>,
    beta: Vec<f64>,
    /// `T`, and the bound of its error.
    transform: Matrix,
    transform_error: Matrix,
    /// `P`, likewise.
    pairs: Matrix,
    pairs_error: Matrix,
    rounding: Rounding,
    rule: Rule,
}

/// The bound on an operand's rounding.
#[derive(Clone, Copy)]
pub(crate) struct Rounding {
    relative: f64,
    least: f64,
}

impl Rounding {
    /// Of f32, keys and queries as well as the state, to bf16.
    pub fn on_cpu() -> Self {
        let one = Self::of(FloatType::BF16);
        Self { relative: 2.0 * one.relative + one.relative * one.relative, least: 2.0 * one.least }
    }

    /// For keys and queries of that type.
    pub fn of(float: FloatType) -> Self {
        match float {
            FloatType::F16 => Self { relative: 2f64.powi(-11), least: 2f64.powi(-25) },
            _ => Self { relative: 2f64.powi(-8), least: 2f64.powi(-134) },
        }
    }

    fn error(self, x: f64) -> f64 {
        self.relative * x.abs() + self.least
    }

    /// Of the products of `x`, all rounded, with `y`.
    fn products(self, x: &[f64], y: &[f64]) -> f64 {
        x.iter().zip(y).map(|(&x, y)| self.error(x) * y.abs()).sum()
    }
}

type Matrix = Vec<Vec<f64>>;

/// `[n, n]`, from a function of row and column.
fn matrix(n: usize, f: impl Fn(usize, usize) -> f64) -> Matrix {
    (0..n).map(|i| (0..n).map(|j| f(i, j)).collect()).collect()
}

fn product(a: &Matrix, b: &Matrix) -> Matrix {
    let n = a.len();
    let mut c = matrix(n, |_, _| 0.0);
    for (a, c) in a.iter().zip(&mut c) {
        for (a, b) in a.iter().zip(b) {
            c.iter_mut().zip(b).for_each(|(c, b)| *c += a * b);
        }
    }
    c
}

impl<'a> Chunk<'a> {
    fn new(
        k: Vec<&'a [f64]>,
        q: Vec<&'a [f64]>,
        decay: Vec<f64>,
        beta: Vec<f64>,
        (rounding, rule): (Rounding, Rule),
    ) -> Self {
        let (n, dim) = (k.len(), k[0].len() as f64);
        let chunk = n as f64;
        let d = |i: usize, j: usize| decay[j + 1..=i].iter().product::<f64>();
        // Without a correction all of L is 0, and T is the diagonal of betas.
        let below = |i: usize, j: usize| j < i && rule == Rule::Delta;
        let l = matrix(n, |i, j| if below(i, j) { beta[i] * d(i, j) * dot(k[i], k[j]) } else { 0.0 });
        let magnitudes = |x: &[f64]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
        let size = |i: usize, j: usize, x: &[f64]| d(i, j) * dot_magnitudes(&magnitudes(k[j]), x);
        let l_size = matrix(n, |i, j| if below(i, j) { beta[i].abs() * size(i, j, k[i]) } else { 0.0 });
        let mut inverse = matrix(n, |i, j| f64::from(i == j));
        for i in 0..n {
            let (above, row) = inverse.split_at_mut(i);
            for (l, above) in l[i].iter().zip(above) {
                row[0].iter_mut().zip(&*above).for_each(|(x, y)| *x -= l * y);
            }
        }
        let a = matrix(n, |i, j| inverse[i][j].abs());
        let spread = product(&product(&a, &l_size), &a);
        let transform = matrix(n, |i, j| inverse[i][j] * beta[j]);
        let grown = (dim + 4.0 * chunk) * U;
        let transform_error =
            matrix(n, |i, j| rounding.error(transform[i][j]) + grown * spread[i][j] * beta[j].abs());
        let pairs = matrix(n, |i, j| if j <= i { d(i, j) * dot(q[i], k[j]) } else { 0.0 });
        let pairs_size = matrix(n, |i, j| if j <= i { size(i, j, q[i]) } else { 0.0 });
        let pairs_error =
            matrix(n, |i, j| rounding.error(pairs[i][j]) + (dim + chunk) * U * pairs_size[i][j]);
        let before = (0..n).map(|i| decay[..=i].iter().product()).collect();
        let after = (0..n).map(|i| d(n - 1, i)).collect();
        Self {
            k,
            q,
            decay,
            before,
            after,
            beta,
            transform,
            transform_error,
            pairs,
            pairs_error,
            rounding,
            rule,
        }
    }

    /// Takes a column of the state, and its error, through the chunk: `y` without scale, and its
    /// error.
    fn step(&self, s: &mut [f64], error: &mut f64, v: &[f64]) -> Vec<(f64, f64)> {
        let (n, dim, rounding) = (self.k.len(), s.len() as f64, self.rounding);
        let chunk = n as f64;
        let size: Vec<f64> = s.iter().map(|s| s.abs()).collect();
        let corrects = self.rule == Rule::Delta;
        let prediction = |i: usize| if corrects { self.before[i] * dot(s, self.k[i]) } else { 0.0 };
        let residual: Vec<f64> = (0..n).map(|i| v[i] - prediction(i)).collect();
        let of_residual = |i: usize| {
            if !corrects {
                return rounding.error(residual[i]);
            }
            let of_state =
                rounding.products(s, self.k[i]) + 2.0 * (dim + 8.0) * U * dot_magnitudes(&size, self.k[i]);
            rounding.error(residual[i]) + self.before[i] * of_state
        };
        let of_residual: Vec<f64> = (0..n).map(of_residual).collect();
        let delta: Vec<f64> = (0..n).map(|i| dot(&self.transform[i], &residual)).collect();
        let of_delta: Vec<f64> = (0..n)
            .map(|i| {
                dot_magnitudes(&of_residual, &self.transform[i])
                    + dot_magnitudes(&self.transform_error[i], &residual)
                    + 4.0
                        * chunk
                        * U
                        * (0..n).map(|j| (self.transform[i][j] * residual[j]).abs()).sum::<f64>()
            })
            .collect();
        let mut y = Vec::with_capacity(n);
        let mut carried = *error;
        for i in 0..n {
            let rho = match corrects {
                true => (1.0 - self.beta[i] * dot(self.k[i], self.k[i])).abs().max(1.0),
                false => 1.0,
            };
            carried *= self.decay[i] * rho;
            let value = self.before[i] * dot(s, self.q[i]) + dot(&self.pairs[i], &delta);
            let of_pairs = (0..n).map(|j| {
                let pair = self.pairs[i][j].abs();
                pair * (of_delta[j] + rounding.error(delta[j]) + 4.0 * chunk * U * delta[j].abs())
                    + self.pairs_error[i][j] * delta[j].abs()
            });
            let of_state = rounding.products(s, self.q[i]) + 2.0 * dim * U * dot_magnitudes(&size, self.q[i]);
            y.push((
                value,
                dot(self.q[i], self.q[i]).sqrt() * carried
                    + self.before[i] * of_state
                    + of_pairs.sum::<f64>(),
            ));
        }
        *error = carried + chunk * U * dot(s, s).sqrt();
        s.iter_mut().for_each(|s| *s *= self.before[n - 1]);
        for j in 0..n {
            s.iter_mut().zip(self.k[j]).for_each(|(s, k)| *s += self.after[j] * delta[j] * k);
            let step = self.after[j] * delta[j];
            let of_step = self.after[j] * of_delta[j] + rounding.error(step) + 4.0 * chunk * U * step.abs();
            *error += dot(self.k[j], self.k[j]).sqrt() * of_step;
        }
        y
    }
}

/// As [`super::reference::gated_delta_rule`], of rounded operands; q and k are normalised, the
/// gates computed.
pub(crate) fn gated_delta_rule(
    inputs: &GatedDeltaInputs,
    state: &Tensor,
    params: &GatedDeltaRule,
    (rounding, chunk): (Rounding, usize),
    wanted: impl Fn(usize, usize) -> bool,
) -> Result<(Bounded, Bounded), KernelError> {
    let dims = super::check(inputs, state, params)?;
    let Dims { key_dim, value_heads, value_dim, .. } = dims;
    let [q, k, v] = [wide(inputs.q)?, wide(inputs.k)?, wide(inputs.v)?];
    let (log_decay, beta) = inputs.gates.computed()?;
    let [log_decay, beta] = [wide(&log_decay)?, wide(&beta)?];
    let mut last = Bounded { values: wide(state)?, bounds: vec![0.0; state.len()] };
    let mut y = Bounded { values: vec![0.0; v.len()], bounds: vec![0.0; v.len()] };
    for (sequence, tokens) in inputs.cu_seqlens.as_slice::<u32>()?.windows(2).enumerate() {
        for head in 0..value_heads {
            let columns: Vec<usize> = (0..value_dim).filter(|&j| wanted(head, j)).collect();
            if columns.is_empty() {
                continue;
            }
            let key = |t: usize| (t * dims.key_heads + dims.key_head(params.head_map, head)) * key_dim;
            let gate = |t: usize| t * value_heads + head;
            let tokens: Vec<usize> = (tokens[0] as usize..tokens[1] as usize).collect();
            let chunks = tokens.chunks(chunk).map(|tokens| {
                let decay = |&t: &usize| log_decay[gate(t)].exp();
                Chunk::new(
                    tokens.iter().map(|&t| &k[key(t)..][..key_dim]).collect(),
                    tokens.iter().map(|&t| &q[key(t)..][..key_dim]).collect(),
                    tokens.iter().map(decay).collect(),
                    tokens.iter().map(|&t| beta[gate(t)]).collect(),
                    (rounding, params.rule),
                )
            });
            let chunks: Vec<Chunk> = chunks.collect();
            for j in columns {
                let first = (sequence * value_heads + head) * key_dim * value_dim;
                let place = |i: usize| first + i * value_dim + j;
                let mut s: Vec<f64> = (0..key_dim).map(|i| last.values[place(i)]).collect();
                let mut error = 0.0;
                for (chunk, tokens) in chunks.iter().zip(tokens.chunks(chunk)) {
                    let v: Vec<f64> = tokens.iter().map(|&t| v[gate(t) * value_dim + j]).collect();
                    for (&t, (value, bound)) in tokens.iter().zip(chunk.step(&mut s, &mut error, &v)) {
                        let scale = f64::from(params.scale);
                        y.set(gate(t) * value_dim + j, (scale * value, scale.abs() * bound + TINY));
                    }
                }
                (0..key_dim).for_each(|i| last.set(place(i), (s[i], error + TINY)));
            }
        }
    }
    Ok((y, last))
}
