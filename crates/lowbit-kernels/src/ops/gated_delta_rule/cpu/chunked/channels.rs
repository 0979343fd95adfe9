//! A chunk's keys and queries of a value head each of whose channels has its own decay.
//!
//! `D[i][j]` is a product of at most [`CHUNK`] decays per channel. So are the factors of a chunk's
//! start and end: none is above 1, and none is the quotient of two that may have underflown. `k[j]`
//! times `D[i][j]` is made for one `j` after the other, which takes three operations per channel
//! and pair of tokens; a product with a state of as many columns as channels takes more.

use super::{CHUNK, Pairs};
use crate::gemm::Packed;
use crate::ops::gated_delta_rule::cpu::Token;
use crate::simd::Simd;
use crate::simd::slices::dot;

pub(super) struct Channels {
    /// `[CHUNK, Dk]`: `D[last][j] k[j]`, the factor of `delta[j]` in the state.
    pub added: Packed,
    /// `g[last]`, and ones that fill the last tile of rows.
    pub kept: Vec<f32>,
    /// `[2 CHUNK, Dk]`: the keys, then the queries, times `g`.
    reads: Vec<f32>,
    /// `[CHUNK, Dk]`: `D[i][j] k[j]`, for the last `i` so far.
    later: Vec<f32>,
    key_dim: usize,
}

/// The most rows of a tile.
const TILE: usize = 8;

impl Channels {
    pub fn new(key_dim: usize) -> Self {
        Self {
            added: Packed::default(),
            kept: vec![1.0; key_dim.next_multiple_of(TILE)],
            reads: vec![0.0; 2 * CHUNK * key_dim],
            later: vec![0.0; CHUNK * key_dim],
            key_dim,
        }
    }

    /// Takes a chunk's tokens; fills `packed` with the keys and queries for products with the
    /// state, and `pairs`.
    #[inline(always)]
    pub fn take<S: Simd>(&mut self, simd: S, tokens: &[Token], (packed, pairs): (&mut Packed, &mut Pairs)) {
        let dim = self.key_dim;
        self.kept.fill(1.0);
        self.reads.fill(0.0);
        self.later.fill(0.0);
        let (keys, queries) = self.reads.split_at_mut(CHUNK * dim);
        for (token, (k, q)) in
            tokens.iter().zip(keys.chunks_exact_mut(dim).zip(queries.chunks_exact_mut(dim)))
        {
            let all = self.kept.iter_mut().zip(token.channels).zip(k.iter_mut().zip(q));
            for ((((kept, &decay), (k, q)), &key), &query) in all.zip(token.k).zip(token.q) {
                *kept *= decay;
                (*k, *q) = (*kept * key, *kept * query);
            }
        }
        for (j, (token, later)) in tokens.iter().zip(self.later.chunks_exact_mut(dim)).enumerate() {
            later.copy_from_slice(token.k);
            pairs.0[CHUNK + j][j] = dot(simd, later, token.q);
            for (i, token) in tokens.iter().enumerate().skip(j + 1) {
                let [key, query] = decayed_dots(simd, later, token);
                (pairs.0[i][j], pairs.0[CHUNK + i][j]) = (key, query);
            }
        }
        packed.pack(self.reads.chunks_exact(dim), dim);
        self.added.pack(self.later.chunks_exact(dim), dim);
    }
}

/// Multiplies `x` by a token's decays, and returns its products with the token's key and query.
#[inline(always)]
fn decayed_dots<S: Simd>(simd: S, x: &mut [f32], token: &Token) -> [f32; 2] {
    let mut sums = [[simd.splat(0.0); 2]; 2];
    let count = x.len();
    let Token { q, k, channels, .. } = *token;
    let (q, k, channels) = (&q[..count], &k[..count], &channels[..count]);
    let mut at = 0;
    while at + 2 * S::LANES <= count {
        for (n, sums) in sums.iter_mut().enumerate() {
            let lanes = at + n * S::LANES..;
            let x = &mut x[lanes.clone()];
            let decayed = simd.mul(simd.load(x), simd.load(&channels[lanes.clone()]));
            simd.store(decayed, x);
            sums[0] = simd.mul_add(decayed, simd.load(&k[lanes.clone()]), sums[0]);
            sums[1] = simd.mul_add(decayed, simd.load(&q[lanes]), sums[1]);
        }
        at += 2 * S::LANES;
    }
    while at < count {
        let lanes = at..count.min(at + S::LANES);
        let load = |x: &[f32]| simd.load_partial(&x[lanes.clone()], 0.0);
        let decayed = simd.mul(load(x), load(channels));
        simd.store_partial(decayed, &mut x[lanes.clone()]);
        sums[0][0] = simd.mul_add(decayed, load(k), sums[0][0]);
        sums[0][1] = simd.mul_add(decayed, load(q), sums[0][1]);
        at += S::LANES;
    }
    [0, 1].map(|of| simd.sum(simd.add(sums[0][of], sums[1][of])))
}
