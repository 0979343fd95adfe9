//! The recurrence in chunks of [`CHUNK`] tokens, as products of small matrices.
//!
//! Within a chunk that starts with state `S`, for tokens `i` and `j` of it, let
//! `D[i][j] = decay[j + 1] .. decay[i]` and `g[i] = decay[0] .. decay[i]`. Then
//! ```text
//! delta[i] = beta[i] * (v[i] - g[i] S^T k[i] - sum over j < i of D[i][j] (k[i] . k[j]) delta[j])
//! y[i]     = scale * (g[i] S^T q[i] + sum over j <= i of D[i][j] (q[i] . k[j]) delta[j])
//! S        = g[last] S + sum over j of k[j] (D[last][j] delta[j])^T
//! ```
//! `delta` is found by forward substitution. (Inverting the triangle first, as GPUs do, lets chunks be prepared in
//! parallel, but applies the inverse to `Dk` more columns; here the heads are parallel enough.) `D` is a product of
//! decays: it underflows to 0 where it should, and nothing can overflow or cancel, as differences of summed
//! logarithms could.

use super::{Problem, Token};
use crate::gemm::{Extent, Onto, Packed, Transposed, product, transpose};
use crate::ops::gated_delta_rule::StateLayout;
use crate::scan::Piece;
use crate::simd::{Kernel, Simd};

/// Tokens of a chunk. More would make the products with the state little faster, and the triangles' share grows with
/// it (measured: 16 takes 8 % less time than 32, and 18 % less than 64).
pub(crate) const CHUNK: usize = 16;

/// One head of one sequence, chunk after chunk.
pub(super) struct Chunked<'p, 'r, 'y> {
    pub problem: &'p Problem<'p>,
    pub piece: Piece<'r, 'y>,
}

impl Kernel for Chunked<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Piece { tokens, columns, y, state } = self.piece;
        let (dims, params) = (self.problem.dims, self.problem.params);
        let tokens: Vec<Token> =
            tokens.map(|t| self.problem.token(t, columns.start / dims.value_dim)).collect();
        let width = dims.value_dim.next_multiple_of(S::LANES);
        let mut scratch = Scratch::new(dims.key_dim, width, params.scale);
        let layout = Layout { order: params.state_layout, value_dim: dims.value_dim, width };
        let mut copy = layout.copied(state);
        let rows = copy.as_deref_mut().unwrap_or(&mut *state);
        for (tokens, y) in tokens.chunks(CHUNK).zip(y.chunks_mut(CHUNK)) {
            scratch.chunk(simd, tokens, y, rows);
        }
        if let Some(copy) = copy {
            layout.restore(&copy, state);
        }
    }
}

/// How a head's state lies, and how wide its rows are to be.
#[derive(Clone, Copy)]
struct Layout {
    order: StateLayout,
    value_dim: usize,
    /// `value_dim` and what fills the last vector.
    width: usize,
}

impl Layout {
    /// `[Dk, width]`, unless the state lies like that already.
    fn copied(self, state: &[f32]) -> Option<Vec<f32>> {
        let Self { order, value_dim, width } = self;
        if order == StateLayout::KeyValue && value_dim == width {
            return None;
        }
        let key_dim = state.len() / value_dim;
        let mut rows = vec![0.0; key_dim * width];
        match order {
            StateLayout::KeyValue => {
                for (row, state) in rows.chunks_exact_mut(width).zip(state.chunks_exact(value_dim)) {
                    row[..value_dim].copy_from_slice(state);
                }
            }
            StateLayout::ValueKey => transpose((state, key_dim), (&mut rows, width), (value_dim, key_dim)),
        }
        Some(rows)
    }

    fn restore(self, rows: &[f32], state: &mut [f32]) {
        let Self { order, value_dim, width } = self;
        let key_dim = state.len() / value_dim;
        match order {
            StateLayout::KeyValue => {
                for (row, state) in rows.chunks_exact(width).zip(state.chunks_exact_mut(value_dim)) {
                    state.copy_from_slice(&row[..value_dim]);
                }
            }
            StateLayout::ValueKey => transpose((rows, width), (state, key_dim), (key_dim, value_dim)),
        }
    }
}

/// What a chunk of `c` tokens is computed in.
struct Scratch {
    key_dim: usize,
    /// Columns of the state.
    width: usize,
    scale: f32,
    /// `[2c, Dk]`: the keys, then the queries.
    keys_queries: Packed,
    /// `[Dk, CHUNK]`: the keys' transpose.
    keys_transposed: Vec<f32>,
    /// `[2c, CHUNK]`: `k[i] . k[j]`, then `q[i] . k[j]`; row by row times `D`.
    pairs: Vec<f32>,
    /// `[2c, width]`: `S^T k[i]`, then `S^T q[i]`, which become `y`.
    reads: Vec<f32>,
    /// `[c, width]`: `v`, which becomes `delta`.
    delta: Vec<f32>,
    /// `D[i]`
    decays: [f32; CHUNK],
}

impl Scratch {
    fn new(key_dim: usize, width: usize, scale: f32) -> Self {
        Self {
            key_dim,
            width,
            scale,
            keys_queries: Packed::default(),
            keys_transposed: vec![0.0; key_dim * CHUNK],
            pairs: vec![0.0; 2 * CHUNK * CHUNK],
            reads: vec![0.0; 2 * CHUNK * width],
            delta: vec![0.0; CHUNK * width],
            decays: [0.0; CHUNK],
        }
    }

    #[inline(always)]
    fn chunk<S: Simd>(&mut self, simd: S, tokens: &[Token], y: &mut [&mut [f32]], state: &mut [f32]) {
        let (c, width) = (tokens.len(), self.width);
        self.pack(tokens);
        let left = &self.keys_queries;
        let of = |columns| Extent { rows: 2 * c, depth: self.key_dim, columns };
        product(simd, left, &self.keys_transposed, &mut self.pairs, of(CHUNK), Onto::Nothing);
        product(simd, left, state, &mut self.reads, of(width), Onto::Nothing);
        let mut decay = 1.0;
        for (i, (token, y)) in tokens.iter().zip(y).enumerate() {
            decay *= token.decay;
            self.decays[..i].iter_mut().for_each(|d| *d *= token.decay);
            self.decays[i] = 1.0;
            for pairs in [i, c + i].map(|row| row * CHUNK) {
                self.pairs[pairs..=pairs + i].iter_mut().zip(&self.decays).for_each(|(x, d)| *x *= d);
            }
            self.substitute(simd, i, c, decay, token.beta);
            y.copy_from_slice(&self.reads[(c + i) * width..][..y.len()]);
        }
        for (delta, &d) in self.delta.chunks_exact_mut(width).zip(&self.decays[..c]) {
            delta.iter_mut().for_each(|x| *x *= d);
        }
        let keys = Transposed(&self.keys_queries);
        let extent = Extent { rows: self.key_dim, depth: c, columns: width };
        product(simd, keys, &self.delta, state, extent, Onto::Scaled(decay));
    }

    #[inline(always)]
    fn pack(&mut self, tokens: &[Token]) {
        let (c, two) = (tokens.len(), 0..2 * tokens.len());
        let row = |i: usize| if i < c { tokens[i].k } else { tokens[i - c].q };
        self.keys_queries.pack(two.map(row), self.key_dim);
        self.keys_queries.transpose_rows(c, &mut self.keys_transposed, CHUNK);
        for (row, token) in self.delta.chunks_exact_mut(self.width).zip(tokens) {
            row[..token.v.len()].copy_from_slice(token.v);
        }
    }

    /// `delta[i]` and `y[i]`, from those before.
    #[inline(always)]
    fn substitute<S: Simd>(&mut self, simd: S, i: usize, c: usize, decay: f32, beta: f32) {
        let mut column = 0;
        while column + 4 * S::LANES <= self.width {
            self.substitute_columns::<S, 4>(simd, i, c, [decay, beta], column);
            column += 4 * S::LANES;
        }
        while column < self.width {
            self.substitute_columns::<S, 1>(simd, i, c, [decay, beta], column);
            column += S::LANES;
        }
    }

    #[inline(always)]
    fn substitute_columns<S: Simd, const V: usize>(
        &mut self,
        simd: S,
        i: usize,
        c: usize,
        [decay, beta]: [f32; 2],
        column: usize,
    ) {
        let (width, block) = (self.width, V * S::LANES);
        let [of_key, of_query] = [i, c + i].map(|row| &self.pairs[row * CHUNK..][..=i]);
        let (before, delta) = self.delta.split_at_mut(i * width);
        let [mut predicted, mut y] = [[simd.splat(0.0); V]; 2];
        for ((before, &k), &q) in before.chunks_exact(width).zip(of_key).zip(of_query) {
            let before = &before[column..][..block];
            for v in 0..V {
                let x = simd.load(&before[v * S::LANES..]);
                predicted[v] = simd.mul_add(simd.splat(k), x, predicted[v]);
                y[v] = simd.mul_add(simd.splat(q), x, y[v]);
            }
        }
        let (read_key, read_query) = self.reads.split_at_mut(c * width);
        let read_key = &read_key[i * width + column..][..block];
        let read_query = &mut read_query[i * width + column..][..block];
        let delta = &mut delta[column..][..block];
        for v in 0..V {
            let at = v * S::LANES..(v + 1) * S::LANES;
            let sum = simd.mul_add(simd.splat(decay), simd.load(&read_key[at.clone()]), predicted[v]);
            let error = simd.mul_add(simd.splat(-1.0), sum, simd.load(&delta[at.clone()]));
            let new = simd.mul(simd.splat(beta), error);
            simd.store(new, &mut delta[at.clone()]);
            let old = simd.mul_add(simd.splat(decay), simd.load(&read_query[at.clone()]), y[v]);
            let sum = simd.mul_add(simd.splat(of_query[i]), new, old);
            simd.store(simd.mul(simd.splat(self.scale), sum), &mut read_query[at]);
        }
    }
}
