//! Keys and values of 8 bits: their codes become floats in registers, between shared memory and the
//! tensor cores.
//!
//! The elements of keys, and the keys, are summed in any order that both operands have.
//! A unit's four codes of a word are neighbours, so it takes 4 neighbours of each 16 elements of
//! the queries, where floats would have it take two pairs. The columns of values that a unit has
//! are neighbours, too: `2 (l / 4)` and the next of each 16.

use super::config::StepConfig;
use super::pairs::{code_pair, scale_pair};
use super::sums::{Sums, SumsExpand};
use crate::gpu::cuda::ptx::{load_tiles, mma, register, shared_integer, shared_words, store_word};
use crate::ops::cache_rows::CacheType;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The byte, among a row's scales, of that of block `block` of 16 values; units whose values of a
/// block are in its second group of 8 have the next.
fn scale_offset(width: usize, block: usize) -> usize {
    2 * (16 * block / CacheType::group(width))
}

/// True if two blocks of 16 values have one scale.
fn share(width: usize) -> bool {
    CacheType::group(width) == 32
}

/// A unit's elements of the cube's rows of q, as right operands of products with codes: for each
/// block of rows and each 16 elements, unit `l` has elements `4 (l % 4)` and the next three of row
/// `l / 4`.
#[cube]
pub(super) fn load_queries(q_at: u32, #[comptime] config: StepConfig) -> Array<u32> {
    let stride = comptime!(16 * config.query_stride());
    let lane = UNIT_POS_X % 32u32;
    let q_at = register(q_at + lane / 4u32 * comptime!(stride as u32) + lane % 4u32 * 8u32);
    let steps = comptime!(config.width / 16);
    let mut queries = Array::<u32>::new(comptime!(config.blocks * config.width / 8));
    #[unroll]
    for i in 0..comptime!(config.blocks * steps) {
        let (block, step) = comptime!((i / steps, i % steps));
        let pair = shared_words(q_at, comptime!(block * 8 * stride + step * 32), 2usize);
        queries[comptime!(2 * i)] = pair[0];
        queries[comptime!(2 * i + 1)] = pair[1];
    }
    queries
}

/// As `products` of floats.
#[cube]
pub(super) fn products(
    queries: &Array<u32>,
    k_at: u32,
    #[comptime] config: StepConfig,
) -> Array<Vector<f32, Const<4>>> {
    let (count, steps) = comptime!((config.keys / 16, config.width / 16));
    let (width, row, dtype) = comptime!((config.width, 16 * config.stride(), config.dtype));
    let lane = UNIT_POS_X % 32u32;
    let scales_at = k_at + lane / 4u32 * comptime!(row as u32) + comptime!(width as u32);
    // The second group of 8 in each 16.
    let second =
        if comptime!(CacheType::group(width) == 8) { lane % 4u32 / 2u32 * 2u32 } else { 0u32.runtime() };
    let scales_at = register(scales_at + second);
    let k_at = register(k_at + lane % 16u32 * comptime!(row as u32) + lane / 16u32 * 16u32);
    let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(config.blocks * count));
    #[unroll]
    for i in 0..comptime!(config.blocks * count) {
        scores[i] = Vector::<f32, Const<4>>::new(0.0f32);
    }
    let mut scales = Array::<u32>::new(2usize);
    let mut left = Array::<Vector<u32, Const<4>>>::new(1usize);
    #[unroll]
    for p in 0..comptime!(steps / 2) {
        #[unroll]
        for n in 0..count {
            let codes = load_tiles(k_at, comptime!(n * 16 * row + p * 32), false);
            #[unroll]
            for half in 0..2usize {
                let step = comptime!(2 * p + half);
                if comptime!(half == 0 || !share(width)) {
                    #[unroll]
                    for h in 0..2usize {
                        let at = comptime!((n * 16 + 8 * h) * row + scale_offset(width, step));
                        let scale = shared_integer(scales_at, at, 2usize);
                        scales[h] = scale_pair(scale, scale, dtype);
                    }
                }
                let upper = codes.extract(comptime!(2 * half));
                let lower = codes.extract(comptime!(2 * half + 1));
                let mut keys = Vector::<u32, Const<4>>::new(0u32);
                keys.insert(0usize, code_pair(upper, scales[0], 0usize, 1usize, dtype));
                keys.insert(1usize, code_pair(lower, scales[1], 0usize, 1usize, dtype));
                keys.insert(2usize, code_pair(upper, scales[0], 2usize, 3usize, dtype));
                keys.insert(3usize, code_pair(lower, scales[1], 2usize, 3usize, dtype));
                left[0] = keys;
                #[unroll]
                for b in 0..comptime!(config.blocks) {
                    let i = comptime!(b * count + n);
                    let q = comptime!(2 * (b * steps + step));
                    scores[i] = mma(left[0], queries[q], queries[comptime!(q + 1)], scores[i], dtype);
                }
            }
        }
    }
    scores
}

/// Replaces the scales of the tile of values at `tile` that are not finite by zeros, and marks
/// their keys: in rows that do not see the key, its weight of 0 times such a value would be NaN.
/// The tile is the plane's own, which meets when this ends.
#[cube]
pub(super) fn zero_non_finite_scales(
    tile: u32,
    non_finite: &mut Shared<[u32]>,
    #[comptime] config: StepConfig,
) {
    let (keys, width) = comptime!((config.keys as u32, config.value_width));
    let marks = UNIT_POS_X / 32u32 * keys;
    let mut key = UNIT_POS_X % 32u32;
    while key < keys {
        let scales =
            register(tile + key * comptime!(16 * config.value_stride() as u32) + comptime!(width as u32));
        let mut bad = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(width / CacheType::group(width) / 2) {
            let words = shared_words(scales, comptime!(4 * i), 1usize);
            let word = words[0];
            if word & 0x7c00u32 == 0x7c00u32 || word & 0x7c00_0000u32 == 0x7c00_0000u32 {
                store_word(scales, comptime!(4 * i), 0u32.runtime());
                bad = 1u32;
            }
        }
        non_finite[(marks + key) as usize] = bad;
        key += 32u32;
    }
    sync_plane();
}

#[cube]
impl Sums {
    /// As `add_weighted_values` of floats.
    pub fn add_weighted_codes(&mut self, weights: &Array<u32>, v_at: u32, #[comptime] config: StepConfig) {
        let (count, columns) = comptime!((config.keys / 16, config.value_width / 16));
        let (width, row, dtype) = comptime!((config.value_width, 16 * config.value_stride(), config.dtype));
        let lane = UNIT_POS_X % 32u32;
        let scales_at = v_at + lane % 4u32 * comptime!(2 * row as u32) + comptime!(width as u32);
        let second =
            if comptime!(CacheType::group(width) == 8) { lane / 16u32 * 2u32 } else { 0u32.runtime() };
        let scales_at = register(scales_at + second);
        let key = lane / 16u32 * 8u32 + lane % 8u32;
        let v_at = register(v_at + key * comptime!(row as u32) + lane / 8u32 % 2u32 * 16u32);
        let mut scales = Array::<u32>::new(2usize);
        let mut left = Array::<Vector<u32, Const<4>>>::new(1usize);
        #[unroll]
        for n in 0..count {
            #[unroll]
            for p in 0..comptime!(columns / 2) {
                let codes = load_tiles(v_at, comptime!(n * 16 * row + p * 32), true);
                #[unroll]
                for half in 0..2usize {
                    let column = comptime!(2 * p + half);
                    if comptime!(half == 0 || !share(width)) {
                        #[unroll]
                        for h in 0..2usize {
                            let at = comptime!((n * 16 + 8 * h) * row + scale_offset(width, column));
                            let low = shared_integer(scales_at, at, 2usize);
                            let high = shared_integer(scales_at, comptime!(at + row), 2usize);
                            scales[h] = scale_pair(low, high, dtype);
                        }
                    }
                    let first = codes.extract(half);
                    let last = codes.extract(comptime!(half + 2));
                    let mut values = Vector::<u32, Const<4>>::new(0u32);
                    values.insert(0usize, code_pair(first, scales[0], 0usize, 2usize, dtype));
                    values.insert(1usize, code_pair(first, scales[0], 1usize, 3usize, dtype));
                    values.insert(2usize, code_pair(last, scales[1], 0usize, 2usize, dtype));
                    values.insert(3usize, code_pair(last, scales[1], 1usize, 3usize, dtype));
                    left[0] = values;
                    #[unroll]
                    for b in 0..comptime!(config.blocks) {
                        let w = comptime!(2 * (b * count + n));
                        let i = comptime!(b * columns + column);
                        self.values[i] =
                            mma(left[0], weights[w], weights[comptime!(w + 1)], self.values[i], dtype);
                    }
                }
            }
        }
    }
}
