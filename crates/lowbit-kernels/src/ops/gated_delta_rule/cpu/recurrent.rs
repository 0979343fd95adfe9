//! The recurrence token after token.
//!
//! Both `S^T k` and `S^T q` are read from the state before the step, in one pass over it:
//! `y = scale * (decay S^T q + (k . q) delta)`. Columns of the state do not depend on each other,
//! so a few of them take all tokens while they are in the nearest cache. The first is not read
//! where nothing is corrected (`CORRECTS` is false). Where each channel has its own decay
//! (`CHANNELS`), `k` and `q` are multiplied by the decays first, instead of the sums after.

use super::{Problem, Token};
use crate::ops::gated_delta_rule::Rule;
use crate::scan::Piece;
use crate::simd::slices::dot;
use crate::simd::{Kernel, Lanes, Scalar, Simd};

/// One head of one sequence.
pub(super) struct Recurrent<'p, 'r, 'y> {
    pub problem: &'p Problem<'p>,
    pub piece: Piece<'r, 'y>,
}

/// A token, and what its step needs besides.
#[derive(Clone, Copy)]
struct Step<'a> {
    token: Token<'a>,
    /// The factors of the state in the two sums: `k` and `q`, times the decays of the channels.
    reads: [&'a [f32]; 2],
    /// `scale * decay`
    kept: f32,
    /// `scale * (k . q)`
    added: f32,
}

impl Kernel for Recurrent<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Piece { tokens, columns, y, state } = self.piece;
        let (dims, params) = (self.problem.dims, self.problem.params);
        let head = columns.start / dims.value_dim;
        let tokens: Vec<Token> = tokens.map(|t| self.problem.token(t, head)).collect();
        let decayed = decayed(&tokens);
        let mut steps = Vec::with_capacity(tokens.len());
        for (i, &token) in tokens.iter().enumerate() {
            let reads = match token.channels {
                [] => [token.k, token.q],
                channels => [0, 1].map(|of| &decayed[(2 * i + of) * channels.len()..][..channels.len()]),
            };
            let added = params.scale * dot(simd, token.k, token.q);
            steps.push(Step { token, reads, kept: params.scale * token.decay, added });
        }
        match (params.rule, self.problem.per_channel()) {
            (Rule::Delta, false) => run::<S, true, false>(simd, &steps, y, state),
            (Rule::Delta, true) => run::<S, true, true>(simd, &steps, y, state),
            (Rule::Additive, false) => run::<S, false, false>(simd, &steps, y, state),
            (Rule::Additive, true) => run::<S, false, true>(simd, &steps, y, state),
        }
    }
}

/// `k` and then `q` of each token times the decays of the channels; empty where these have none.
#[inline(always)]
fn decayed(tokens: &[Token]) -> Vec<f32> {
    let mut all = Vec::new();
    for token in tokens {
        for x in [token.k, token.q] {
            all.extend(x.iter().zip(token.channels).map(|(x, decay)| x * decay));
        }
    }
    all
}

/// All tokens, by vectors of columns.
#[inline(always)]
fn run<S: Simd, const CORRECTS: bool, const CHANNELS: bool>(
    simd: S,
    steps: &[Step],
    y: &mut [&mut [f32]],
    state: &mut [f32],
) {
    let width = y[0].len();
    let mut column = 0;
    while width - column >= 4 * S::LANES {
        columns::<S, 4, CORRECTS, CHANNELS>(simd, steps, y, state, column);
        column += 4 * S::LANES;
    }
    while width - column >= S::LANES {
        columns::<S, 1, CORRECTS, CHANNELS>(simd, steps, y, state, column);
        column += S::LANES;
    }
    for column in column..width {
        columns::<Scalar, 1, CORRECTS, CHANNELS>(Lanes, steps, y, state, column);
    }
}

/// `N` vectors of columns through all tokens.
#[inline(always)]
fn columns<S: Simd, const N: usize, const CORRECTS: bool, const CHANNELS: bool>(
    simd: S,
    steps: &[Step],
    y: &mut [&mut [f32]],
    state: &mut [f32],
    column: usize,
) {
    let width = y[0].len();
    let block = column..column + N * S::LANES;
    for (&Step { token, reads, kept, added }, y) in steps.iter().zip(y) {
        let zero = [simd.splat(0.0); N];
        let (mut sk, mut sq) = (zero, zero);
        for ((row, &k), &q) in state.chunks_exact(width).zip(reads[0]).zip(reads[1]) {
            let row = &row[block.clone()];
            let (k, q) = (simd.splat(k), simd.splat(q));
            for n in 0..N {
                let s = simd.load(&row[n * S::LANES..]);
                if CORRECTS {
                    sk[n] = simd.mul_add(s, k, sk[n]);
                }
                sq[n] = simd.mul_add(s, q, sq[n]);
            }
        }
        let (v, y) = (&token.v[block.clone()], &mut y[block.clone()]);
        let decay = simd.splat(token.decay);
        let mut delta = zero;
        for n in 0..N {
            let lanes = n * S::LANES..(n + 1) * S::LANES;
            let mut error = simd.load(&v[lanes.clone()]);
            if CORRECTS {
                error = simd.add(error, simd.mul(simd.splat(-token.decay), sk[n]));
            }
            delta[n] = simd.mul(simd.splat(token.beta), error);
            let kept = simd.mul(simd.splat(kept), sq[n]);
            simd.store(simd.mul_add(simd.splat(added), delta[n], kept), &mut y[lanes]);
        }
        for (i, (row, &k)) in state.chunks_exact_mut(width).zip(token.k).enumerate() {
            let row = &mut row[block.clone()];
            let k = simd.splat(k);
            let decay = if CHANNELS { simd.splat(token.channels[i]) } else { decay };
            for n in 0..N {
                let lanes = &mut row[n * S::LANES..(n + 1) * S::LANES];
                let s = simd.mul(decay, simd.load(lanes));
                simd.store(simd.mul_add(k, delta[n], s), lanes);
            }
        }
    }
}
