//! A cube takes a block of query rows through tiles of keys, which it copies to shared memory while
//! it computes.
//!
//! With two stages, the next tile of keys and values is copied while one is used. With one, the
//! next tile of keys is copied while the weights are multiplied with the values, and the tile's
//! values while its scores are computed.

use super::config::TileConfig;
use super::rows::{
    Destination, PartPlace, RowBounds, cap_scores, row_bounds, visible_keys, zero_non_finite_values,
};
use super::sums::Sums;
use crate::gpu::cuda::ptx::{address, copy_vector, load_tiles, mma, wait_copies};
use crate::gpu::launch::kernel;
use crate::ops::attention::gpu::operands::{Inputs, InputsArgs, Sizes, row_index};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// See [`attention`](crate::ops::attention()). `scale` is an f32 and includes the factor log2(e). y
/// holds pairs of q's type, or the bits of f32 where the keys are split.
#[kernel]
pub(in crate::ops::attention) fn attention_tile(
    inputs: &Inputs<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
    y: &mut [u32],
    scales: &mut [f32],
    sizes: Sizes,
    scale: u32,
    #[comptime] config: TileConfig,
) {
    let scale = f32::reinterpret(scale);
    let shared = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(config.vectors()), 128usize);
    let mut non_finite = Shared::<[u32]>::new_slice(comptime!(config.keys));
    let q_at = address(&shared);
    let mut k_at = q_at + comptime!((16 * config.rows() * config.stride()) as u32);
    let to_v = comptime!((16 * config.keys * config.stride()) as u32);
    let to_next = comptime!((16 * config.stage()) as u32);
    // The last rows have most keys, and go first.
    let row0 = (sizes.rows.div_ceil(comptime!(config.rows() as u32)) - 1u32 - CUBE_POS_Y)
        * comptime!(config.rows() as u32);
    copy_rows(&inputs.q, q_at, row0, &sizes, config);

    let visible = visible_keys(&inputs.positions, row0, &sizes, config.cut());
    let base = CUBE_POS_X * sizes.capacity;
    let keys = KeyRange { base, end: visible.end };
    if visible.begin < visible.end {
        copy_keys(&inputs.k, k_at, &keys, visible.begin, comptime!(config.width), config);
        copy_keys(&inputs.v, k_at + to_v, &keys, visible.begin, comptime!(config.value_width), config);
    }
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let own = row0 + plane * comptime!((16 * config.blocks) as u32) + lane / 4u32;
    let bounds = row_bounds(&inputs.positions, own, &sizes, comptime!(2 * config.blocks));
    let mut sums = Sums::new(config);
    let mut at = visible.begin;
    // Less one stage's address, this is the other's.
    let both = 2u32 * k_at + to_next;
    while at < visible.end {
        let next = at + comptime!(config.keys as u32);
        wait_copies();
        sync_cube();
        if comptime!(config.stages == 2) {
            if next < visible.end {
                copy_keys(&inputs.k, both - k_at, &keys, next, comptime!(config.width), config);
                copy_keys(&inputs.v, both - k_at + to_v, &keys, next, comptime!(config.value_width), config);
            }
        } else if at != visible.begin {
            copy_keys(&inputs.v, k_at + to_v, &keys, at, comptime!(config.value_width), config);
        }
        let mut scores = products(q_at, k_at, config);
        cap_scores(&mut scores, scale, comptime!(config.blocks * config.keys / 8), config.softcap);
        if at < visible.all_begin || next > min(visible.all_end, visible.end) {
            if comptime!(config.stages == 1) {
                wait_copies();
            }
            zero_non_finite_values(k_at + to_v, &mut non_finite, config.values());
            mask(&mut scores, &non_finite, &bounds, at, visible.end, config);
        }
        let weights = sums.weigh(&mut scores, scale, config);
        if comptime!(config.stages == 1) {
            wait_copies();
            sync_cube();
            if next < visible.end {
                copy_keys(&inputs.k, k_at, &keys, next, comptime!(config.width), config);
            }
        }
        sums.add_weighted_values(&weights, k_at + to_v, config);
        if comptime!(config.stages == 2) {
            k_at = both - k_at;
        }
        at = next;
    }
    let any_keys = visible.begin < visible.end;
    let part = PartPlace::of_cube(sizes.rows);
    let out = Destination { own, rows: sizes.rows, group: sizes.group, scale, any_keys, part };
    sums.store(y, scales, &out, config);
}

/// Begins to copy the cube's rows of q.
#[cube]
fn copy_rows(q: &[Vector<u32, Const<4>>], to: u32, row0: u32, sizes: &Sizes, #[comptime] config: TileConfig) {
    let vectors = comptime!((config.width / 8) as u32);
    #[unroll]
    for i in 0..comptime!((config.rows() * config.width / 8).div_ceil(config.units())) {
        let vector = UNIT_POS_X + comptime!((i * config.units()) as u32);
        let row = vector / vectors;
        // Rows past the last are computed and not stored.
        let from = row_index(min(row0 + row, sizes.rows - 1u32), sizes.group) * vectors + vector % vectors;
        let to = to + 16u32 * (row * comptime!(config.stride() as u32) + vector % vectors);
        let whole = comptime!((config.rows() * config.width / 8).is_multiple_of(config.units()));
        if whole.runtime() || row < comptime!(config.rows() as u32) {
            copy_vector(q, from, to);
        }
    }
}

/// A cube's keys.
#[derive(CubeType)]
struct KeyRange {
    /// The row of the head's first key.
    base: u32,
    /// The end of the cube's keys.
    end: u32,
}

/// Begins to copy a tile of keys or values from key `first` on. For keys past the end it copies the
/// last one.
#[cube]
fn copy_keys(
    x: &[Vector<u32, Const<4>>],
    to: u32,
    keys: &KeyRange,
    first: u32,
    #[comptime] width: usize,
    #[comptime] config: TileConfig,
) {
    let vectors = comptime!((width / 8) as u32);
    #[unroll]
    for i in 0..comptime!((config.keys * width / 8).div_ceil(config.units())) {
        let vector = UNIT_POS_X + comptime!((i * config.units()) as u32);
        let key = vector / vectors;
        let from = (keys.base + min(first + key, keys.end - 1u32)) * vectors + vector % vectors;
        let to = to + 16u32 * (key * comptime!((width / 8 + 1) as u32) + vector % vectors);
        let whole = comptime!((config.keys * width / 8).is_multiple_of(config.units()));
        if whole.runtime() || key < comptime!(config.keys as u32) {
            copy_vector(x, from, to);
        }
    }
}

/// The products of a plane's rows with a tile of keys: for each block of 16 rows and each 8 keys,
/// unit `l` has those of rows `l / 4` and `l / 4 + 8` with keys `2 (l % 4)` and the next.
#[cube]
fn products(q_at: u32, k_at: u32, #[comptime] config: TileConfig) -> Array<Vector<f32, Const<4>>> {
    let count = comptime!(config.keys / 8);
    let stride = comptime!(16 * config.stride());
    let lane = UNIT_POS_X % 32u32;
    let first = UNIT_POS_X / 32u32 * comptime!((16 * config.blocks) as u32);
    let q_at = q_at + (first + lane % 16u32) * comptime!(stride as u32) + lane / 16u32 * 16u32;
    let k_at =
        k_at + (lane / 16u32 * 8u32 + lane % 8u32) * comptime!(stride as u32) + lane / 8u32 % 2u32 * 16u32;
    let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(config.blocks * count));
    #[unroll]
    for i in 0..comptime!(config.blocks * count) {
        scores[i] = Vector::<f32, Const<4>>::new(0.0f32);
    }
    #[unroll]
    for d in 0..comptime!(config.width / 16) {
        let mut rows = Array::<Vector<u32, Const<4>>>::new(comptime!(config.blocks));
        #[unroll]
        for b in 0..comptime!(config.blocks) {
            rows[b] = load_tiles(q_at, comptime!(b * 16 * stride + d * 32), false);
        }
        #[unroll]
        for n in 0..comptime!(count / 2) {
            let keys = load_tiles(k_at, comptime!(n * 16 * stride + d * 32), false);
            #[unroll]
            for b in 0..comptime!(config.blocks) {
                let i = comptime!(b * count + 2 * n);
                scores[i] = mma(rows[b], keys.extract(0usize), keys.extract(1usize), scores[i], config.dtype);
                let i = comptime!(b * count + 2 * n + 1);
                scores[i] = mma(rows[b], keys.extract(2usize), keys.extract(3usize), scores[i], config.dtype);
            }
        }
    }
    scores
}

/// Makes the scores of keys that a row does not see -inf, and those of marked keys that it sees
/// NaN.
#[cube]
fn mask(
    scores: &mut Array<Vector<f32, Const<4>>>,
    non_finite: &Shared<[u32]>,
    bounds: &RowBounds,
    first: u32,
    end: u32,
    #[comptime] config: TileConfig,
) {
    let count = comptime!(config.keys / 8);
    #[unroll]
    for n in 0..count {
        #[unroll]
        for j in 0..2usize {
            let key = UNIT_POS_X % 4u32 * 2u32 + comptime!((8 * n + j) as u32);
            let bad = non_finite[key as usize] != 0u32;
            let key = first + key;
            #[unroll]
            for r in 0..comptime!(2 * config.blocks) {
                let i = comptime!(r / 2 * count + n);
                let mut score = scores[i];
                let element = comptime!(r % 2 * 2 + j);
                score.insert(element, bounds.masked(score.extract(element), r, key, end, bad));
                scores[i] = score;
            }
        }
    }
}
