//! What a unit has of a token, and what it makes of it before the state is read.

use super::convolution::{block, channels};
use super::memory::load;
use super::{FOUR, Shape};
use crate::gpu::float::read;
use crate::ops::gated_delta_rule::DecaySign;
use crate::ops::{delta_gates, l2_norm};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// What a unit has.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub head: usize,
    pub key_head: usize,
    pub key_heads: usize,
    pub value_heads: usize,
    pub lane: usize,
    /// Its first column, and how many there are from there on.
    pub column: usize,
    pub columns: usize,
}

/// The first of the four rows of keys that the unit has in its place `i`, and how many there are from there on.
#[cube]
pub(super) fn rows(i: usize, at: &Place, #[comptime] shape: Shape) -> (usize, usize) {
    let key_dim = comptime!(shape.key_dim);
    let row = (i * comptime!(shape.lanes) + at.lane) * FOUR;
    (row, key_dim - min(row, key_dim.runtime()))
}

/// The unit's part of a token's keys and queries, then the values of its columns, and what its gates come as. What is to be
/// convolved comes as it is, all from `q`.
#[cube]
pub(super) fn load_token<X: Int, G: Int, N: Size>(
    q: &[Vector<X, N>],
    k: &[Vector<X, N>],
    v: &[Vector<X, N>],
    a: &[G],
    b: &[G],
    t: usize,
    at: &Place,
    token: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let gate = t * at.value_heads + at.head;
    if comptime!(shape.convolution.is_some()) {
        let first = t * channels(at, shape);
        #[unroll]
        for i in 0..comptime!(shape.blocks()) {
            let (channel, count) = block(i, at, shape);
            load::<X, N>(q, first + channel, count, token, comptime!(i * FOUR), 1usize, shape.dtype);
        }
    } else {
        let keys = comptime!(FOUR * shape.fours());
        let key = (t * at.key_heads + at.key_head) * comptime!(shape.key_dim);
        #[unroll]
        for i in 0..comptime!(shape.fours()) {
            let (row, count) = rows(i, at, shape);
            load::<X, N>(k, key + row, count, token, comptime!(i * FOUR), 1usize, shape.dtype);
            load::<X, N>(q, key + row, count, token, comptime!(keys + i * FOUR), 1usize, shape.dtype);
        }
        let value = gate * comptime!(shape.value_dim) + at.column;
        load::<X, N>(v, value, at.columns, token, comptime!(2 * keys), 1usize, shape.dtype);
    }
    let gates = comptime!(FOUR * shape.blocks());
    token[gates] = read(a, gate, shape.gates.dtype);
    token[comptime!(gates + 1)] = read(b, gate, shape.gates.dtype);
}

/// A token's decay and beta; `a_log` and `dt_bias` are `of_head`.
#[cube]
pub(super) fn gates(a: f32, b: f32, of_head: &Array<f32>, #[comptime] shape: Shape) -> (f32, f32) {
    if comptime!(shape.gates.raw) {
        let (log_decay, beta) = delta_gates::gpu::one(a, b, of_head[0], of_head[1]);
        (log_decay.exp(), beta)
    } else {
        let log_decay = if comptime!(shape.sign == DecaySign::Rate) { -a } else { a };
        (log_decay.exp(), b)
    }
}

/// Normalises the unit's part of a token's keys and queries, where that is asked for.
#[cube]
pub(super) fn normalise(token: &mut Array<f32>, eps: f32, #[comptime] shape: Shape) {
    if comptime!(shape.qk_norm.is_some()) {
        let convention = comptime!(shape.qk_norm.expect("it is asked for"));
        let rows = comptime!(FOUR * shape.fours());
        let mut sums = Array::<f32>::new(2usize);
        #[unroll]
        for i in 0..2usize {
            sums[i] = 0.0;
            #[unroll]
            for r in 0..rows {
                sums[i] = fma(token[i * rows + r], token[i * rows + r], sums[i]);
            }
        }
        add_up(&mut sums, 2usize, shape.lanes);
        #[unroll]
        for i in 0..2usize {
            let scale =
                l2_norm::gpu::scale(sums[i], comptime!(shape.key_dim as f32).runtime(), eps, convention);
            #[unroll]
            for r in 0..rows {
                token[i * rows + r] *= scale;
            }
        }
    }
}

/// The sums over the units that share a column, for all of them.
#[cube]
pub(super) fn add_up(sums: &mut Array<f32>, #[comptime] count: usize, #[comptime] lanes: usize) {
    #[unroll]
    for round in 0..comptime!(lanes.ilog2()) {
        #[unroll]
        for i in 0..count {
            sums[i] += plane_shuffle_xor(sums[i], comptime!(1u32 << round));
        }
    }
}
