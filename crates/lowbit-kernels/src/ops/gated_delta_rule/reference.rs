//! The recurrence in f64, and how far f32 may be from it.
//!
//! To first order in `u = 2^-24`, whichever way the sums are grouped, a computed step is the exact
//! step from the computed state with a small error `eps` in `delta` (each column `j` of the state
//! has its own):
//! ```text
//! |eps_j| <= |beta| (n M^T|k| + 4 |v|) u    n = Dk + 6 (1 + chunk) roundings lie on the way of each product
//! M       = decay M + |k| |delta|^T         M >= |S|: what the terms that make up S amount to without cancelling
//! ```
//! and 6 roundings a step in the state itself (`exp` counts for 2, the product of decays, the
//! product with k, the sum, and one for the last). An error e_j in column j then goes through
//! `I - beta k k^T`, whose norm is `rho = max(1, |1 - beta |k|^2|)`, so in the 2-norm
//! ```text
//! e_j <- decay rho e_j + |k| |eps_j| + 6 u |M_j|
//! |error of y_j| <= |scale| (|q| e_j + n u M_j^T |q|)
//! ```
//! If k and q are normalised here, their errors `dk` and `dq` add `|beta| M^T dk` to `eps`,
//! `|dk| |delta|` to `e`, and `|scale| M^T dq` to `y`'s. If the gates are computed here, beta's
//! error adds itself times `|v - S^T k|` to `eps`, and the logarithm of the decay's adds itself
//! times `decay |M|` to `e`, before the step.
//!
//! Without a correction, `M^T|k|` is not in `eps`, and `rho` is 1. With a decay per channel,
//! `decay e_j` is the largest decay times e_j, and what the decays' errors add is a vector.

use super::{DeltaGates, Dims, GatedDeltaInputs, GatedDeltaRule, Rule};
use crate::gamma::gamma;
use crate::ops::{ChannelDecay, delta_gates, l2_norm};
use crate::{KernelError, Tensor};
use lowbit_formats::DType;
use std::ops::Range;

/// Values in f64, and the bound of each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bounded {
    pub values: Vec<f64>,
    pub bounds: Vec<f64>,
}

impl Bounded {
    pub(super) fn set(&mut self, at: usize, (value, bound): (f64, f64)) {
        (self.values[at], self.bounds[at]) = (value, bound);
    }

    /// Some values, and their bounds.
    fn part(&self, range: Range<usize>) -> (&[f64], &[f64]) {
        (&self.values[range.clone()], &self.bounds[range])
    }
}

/// f32's unit roundoff.
pub(super) const U: f64 = f32::EPSILON as f64 / 2.0;
/// Underflow: far more than the sum of all subnormals rounded off, far less than anything that
/// matters.
pub(super) const TINY: f64 = 1e-36;

/// `y` and the state after all tokens, and the bounds of an f32 computation that goes `chunk`
/// tokens at a time. Only the columns `(head, j)` that `wanted` names are computed; the others are
/// 0.
pub(crate) fn gated_delta_rule(
    inputs: &GatedDeltaInputs,
    state: &Tensor,
    params: &GatedDeltaRule,
    chunk: usize,
    wanted: impl Fn(usize, usize) -> bool,
) -> Result<(Bounded, Bounded), KernelError> {
    let dims = super::check(inputs, state, params)?;
    let Dims { key_dim, value_heads, value_dim, .. } = dims;
    let (q, k, v) = (normalised(inputs.q, params)?, normalised(inputs.k, params)?, wide(inputs.v)?);
    let [log_decay, beta] = gates(&inputs.gates)?;
    let mut last = Bounded { values: wide(state)?, bounds: vec![0.0; state.len()] };
    let mut y = Bounded { values: vec![0.0; v.len()], bounds: vec![0.0; v.len()] };
    let columns = (0..value_heads).flat_map(|head| (0..value_dim).map(move |j| (head, j)));
    let columns: Vec<_> = columns.filter(|&(head, j)| wanted(head, j)).collect();
    for (sequence, tokens) in inputs.cu_seqlens.as_slice::<u32>()?.windows(2).enumerate() {
        for &(head, j) in &columns {
            let first = (sequence * value_heads + head) * key_dim * value_dim;
            let place = |i: usize| first + i * value_dim + j;
            let state = (0..key_dim).map(|i| last.values[place(i)]);
            let mut column = Column::new(state, chunk, params.rule);
            for t in tokens[0] as usize..tokens[1] as usize {
                let gate = t * value_heads + head;
                let key = (t * dims.key_heads + dims.key_head(params.head_map, head)) * key_dim;
                let key = key..key + key_dim;
                let decays = (0..key_dim).map(|i| {
                    let at = if inputs.gates.per_channel() { gate * key_dim + i } else { gate };
                    (log_decay.values[at].exp(), log_decay.bounds[at])
                });
                let decays: Vec<_> = decays.collect();
                let beta = (beta.values[gate], beta.bounds[gate]);
                column.step(k.part(key.clone()), v[gate * value_dim + j], (&decays, beta));
                y.set(gate * value_dim + j, column.read(q.part(key), f64::from(params.scale)));
            }
            (0..key_dim).for_each(|i| last.set(place(i), (column.s[i], column.error + TINY)));
        }
    }
    Ok((y, last))
}

/// q or k as the rule multiplies it.
fn normalised(x: &Tensor, params: &GatedDeltaRule) -> Result<Bounded, KernelError> {
    let Some(eps) = params.qk_norm else {
        return exact(x);
    };
    let values = l2_norm::reference::l2_norm(x.cast(DType::F32)?.as_slice()?, x.dim(-1), eps);
    let error = gamma(l2_norm::reference::roundings(x.dim(-1)));
    Ok(Bounded { bounds: values.iter().map(|x| error * x.abs()).collect(), values })
}

/// `log_decay` and `beta`.
fn gates(gates: &DeltaGates) -> Result<[Bounded; 2], KernelError> {
    let (a, b, a_log, dt_bias) = match *gates {
        DeltaGates::Computed { log_decay, beta } => return Ok([exact(log_decay)?, exact(beta)?]),
        DeltaGates::Channels { a, b, a_log, dt_bias, decay } => {
            return channels([wide(a)?, wide(b)?, wide(a_log)?, wide(dt_bias)?], decay);
        }
        DeltaGates::Raw { a, b, a_log, dt_bias } => (wide(a)?, wide(b)?, wide(a_log)?, wide(dt_bias)?),
        DeltaGates::Steps { dt, a_log, dt_bias, .. } => (wide(dt)?, wide(dt)?, wide(a_log)?, wide(dt_bias)?),
    };
    let mut bounded = [(); 2].map(|()| Bounded { values: vec![0.0; a.len()], bounds: vec![0.0; a.len()] });
    for i in 0..a.len() {
        let head = i % a_log.len();
        let [a, b, a_log, dt_bias] = [a[i], b[i], a_log[head], dt_bias[head]].map(|x| x as f32);
        let both = match *gates {
            DeltaGates::Steps { limits, .. } => {
                delta_gates::step_reference::step_gates(a, a_log, dt_bias, limits)
            }
            _ => delta_gates::reference::delta_gates(a, b, a_log, dt_bias),
        };
        bounded.iter_mut().zip(both).for_each(|(gate, one)| gate.set(i, one));
    }
    Ok(bounded)
}

/// Those with a decay per channel.
fn channels([a, b, a_log, dt_bias]: [Vec<f64>; 4], decay: ChannelDecay) -> Result<[Bounded; 2], KernelError> {
    let channels = dt_bias.len() / a_log.len();
    let bounded = |all: Vec<(f64, f64)>| {
        let (values, bounds) = all.into_iter().unzip();
        Bounded { values, bounds }
    };
    let of = |i: usize| {
        let (head, bias) = (i / channels % a_log.len(), dt_bias[i % dt_bias.len()]);
        delta_gates::channel_reference::channel_decay(a[i] as f32, a_log[head] as f32, bias as f32, decay)
    };
    let beta = |&b: &f64| delta_gates::reference::delta_gates(0.0, b as f32, 0.0, 0.0)[1];
    Ok([bounded((0..a.len()).map(of).collect()), bounded(b.iter().map(beta).collect())])
}

fn exact(x: &Tensor) -> Result<Bounded, KernelError> {
    Ok(Bounded { values: wide(x)?, bounds: vec![0.0; x.len()] })
}

pub(super) fn wide(x: &Tensor) -> Result<Vec<f64>, KernelError> {
    Ok(x.cast(DType::F32)?.as_slice::<f32>()?.iter().map(|&x| f64::from(x)).collect())
}

/// A column of the state.
struct Column {
    s: Vec<f64>,
    /// The terms' magnitudes.
    m: Vec<f64>,
    /// The bound of the error's 2-norm.
    error: f64,
    /// Roundings on the way of a product.
    n: f64,
    rule: Rule,
}

impl Column {
    fn new(s: impl Iterator<Item = f64>, chunk: usize, rule: Rule) -> Self {
        let s: Vec<f64> = s.collect();
        let m = s.iter().map(|s| s.abs()).collect();
        let n = (s.len() + 6 * (1 + chunk)) as f64;
        Self { s, m, error: 0.0, n, rule }
    }

    /// Of beta the bound is absolute, of the decays it is relative.
    fn step(
        &mut self,
        (k, k_error): (&[f64], &[f64]),
        v: f64,
        (decays, (beta, beta_error)): (&[(f64, f64)], (f64, f64)),
    ) {
        for ((s, m), (decay, _)) in self.s.iter_mut().zip(&mut self.m).zip(decays) {
            (*s, *m) = (*s * decay, *m * decay);
        }
        let largest = decays.iter().map(|(decay, _)| *decay).fold(0.0, f64::max);
        let moved = self.m.iter().zip(decays).map(|(m, (_, error))| (error * m).powi(2));
        let of_decay = largest * self.error + moved.sum::<f64>().sqrt();
        let corrects = self.rule == Rule::Delta;
        let residual = if corrects { v - dot(&self.s, k) } else { v };
        let delta = beta * residual;
        let of_product = match corrects {
            true => self.n * U * dot_magnitudes(&self.m, k) + dot(&self.m, k_error),
            false => 0.0,
        };
        let eps = beta.abs() * (of_product + 4.0 * U * v.abs()) + beta_error * residual.abs();
        for ((s, m), &k) in self.s.iter_mut().zip(&mut self.m).zip(k) {
            *s += k * delta;
            *m += (k * delta).abs();
        }
        let norm2 = dot(k, k);
        let rho = if corrects { (1.0 - beta * norm2).abs().max(1.0) } else { 1.0 };
        let of_keys = dot(k_error, k_error).sqrt() * delta.abs();
        self.error = rho * of_decay + norm2.sqrt() * eps + of_keys + 6.0 * U * dot(&self.m, &self.m).sqrt();
    }

    fn read(&self, (q, q_error): (&[f64], &[f64]), scale: f64) -> (f64, f64) {
        let of_product = self.n * U * dot_magnitudes(&self.m, q) + dot(&self.m, q_error);
        let error = dot(q, q).sqrt() * self.error + of_product;
        (scale * dot(&self.s, q), scale.abs() * error + TINY)
    }
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `m . |x|`.
pub(super) fn dot_magnitudes(m: &[f64], x: &[f64]) -> f64 {
    m.iter().zip(x).map(|(m, x)| m * x.abs()).sum()
}
