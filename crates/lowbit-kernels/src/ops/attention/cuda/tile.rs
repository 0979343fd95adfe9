//! A cube takes a block of query rows through tiles of keys, which it copies to shared memory while it computes.
//!
//! With two stages, the next tile of keys and values is copied while one is used. With one, the next tile of keys is copied
//! while the weights are multiplied with the values, and the tile's values while its scores are computed.

use super::config::TileConfig;
use super::sums::{Destination, Sums};
use crate::gpu::cuda::ptx::{address, copy_vector, load_tiles, mma, wait_copies};
use crate::gpu::launch::kernel;
use crate::ops::attention::gpu::operands::{Inputs, InputsArgs, Sizes, VisibleKeys, row_index};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// See [`attention`](crate::ops::attention()). `scale` is an f32 and includes the factor log2(e). y holds pairs of q's type,
/// or the bits of f32 where the keys are split.
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
    let mut shared =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(config.vectors()), 128usize);
    let mut non_finite = Shared::<[u32]>::new_slice(comptime!(config.keys));
    let q_at = address(&shared);
    let mut k_at = q_at + comptime!((16 * config.rows() * config.stride()) as u32);
    let to_v = comptime!((16 * config.keys * config.stride()) as u32);
    let to_next = comptime!((16 * config.stage()) as u32);
    // The last rows have most keys, and go first.
    let row0 = (sizes.rows.div_ceil(comptime!(config.rows() as u32)) - 1u32 - CUBE_POS_Y)
        * comptime!(config.rows() as u32);
    copy_rows(&inputs.q, q_at, row0, &sizes, config);

    let visible = visible_keys(&inputs.positions, row0, &sizes, config);
    let base = CUBE_POS_X * sizes.capacity;
    let keys = KeyRange { base, end: visible.end };
    if visible.begin < visible.end {
        copy_keys(&inputs.k, k_at, &keys, visible.begin, comptime!(config.width), config);
        copy_keys(&inputs.v, k_at + to_v, &keys, visible.begin, comptime!(config.value_width), config);
    }
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let own = row0 + plane * comptime!((16 * config.blocks) as u32) + lane / 4u32;
    let bounds = row_bounds(&inputs.positions, own, &sizes, config);
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
        if at < visible.all_begin || next > min(visible.all_end, visible.end) {
            zero_non_finite_values(&mut shared, &mut non_finite, (k_at + to_v - q_at) / 16u32, config);
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
    let out = Destination { own, rows: sizes.rows, group: sizes.group, scale, any_keys };
    sums.store(y, scales, &out, config);
}

/// Which keys each of a unit's rows sees: those from `low` to `high`.
#[derive(CubeType)]
struct RowBounds {
    low: Array<u32>,
    high: Array<u32>,
}

/// Of the unit's rows, two of each block, from row `own` on.
#[cube]
fn row_bounds(positions: &[u32], own: u32, sizes: &Sizes, #[comptime] config: TileConfig) -> RowBounds {
    let mut low = Array::<u32>::new(comptime!(2 * config.blocks));
    let mut high = Array::<u32>::new(comptime!(2 * config.blocks));
    #[unroll]
    for r in 0..comptime!(2 * config.blocks) {
        let row = min(own + comptime!(8 * r as u32), sizes.rows - 1u32);
        let position = positions[(row / sizes.group) as usize];
        high[r] = select(position < sizes.capacity, position + 1u32, 0u32);
        low[r] = high[r] - min(high[r], sizes.window);
    }
    RowBounds { low, high }
}

/// The keys that the cube's rows see, or its part of them where the keys are split.
#[cube]
fn visible_keys(positions: &[u32], row0: u32, sizes: &Sizes, #[comptime] config: TileConfig) -> VisibleKeys {
    let mut found = Shared::<[u32]>::new_slice(comptime!(4 * config.planes));
    let mut begin = 0xffff_ffffu32.runtime();
    let mut end = 0u32.runtime();
    let mut all_begin = 0u32.runtime();
    let mut all_end = 0xffff_ffffu32.runtime();
    #[unroll]
    for i in 0..comptime!(config.rows().div_ceil(config.units())) {
        let row =
            row0 + (UNIT_POS_X + comptime!((i * config.units()) as u32)) % comptime!(config.rows() as u32);
        let position = positions[(min(row, sizes.rows - 1u32) / sizes.group) as usize];
        let high = select(position < sizes.capacity, position + 1u32, 0u32);
        let low = high - min(high, sizes.window);
        begin = min(begin, select(high == 0u32, 0xffff_ffffu32, low));
        end = max(end, high);
        all_begin = max(all_begin, low);
        all_end = min(all_end, high);
    }
    let (begin, end) = (plane_min(begin), plane_max(end));
    let (all_begin, all_end) = (plane_max(all_begin), plane_min(all_end));
    let plane = (UNIT_POS_X / 32u32 * 4u32) as usize;
    let lane = UNIT_POS_X % 32u32;
    if lane == 0u32 {
        found[plane] = begin;
        found[plane + 1] = end;
        found[plane + 2] = all_begin;
        found[plane + 3] = all_end;
    }
    sync_cube();
    let mut visible = VisibleKeys {
        begin: found[0usize],
        end: found[1usize],
        all_begin: found[2usize],
        all_end: found[3usize],
    };
    #[unroll]
    for plane in 1..comptime!(config.planes) {
        visible.begin = min(visible.begin, found[comptime!(4 * plane)]);
        visible.end = max(visible.end, found[comptime!(4 * plane + 1)]);
        visible.all_begin = max(visible.all_begin, found[comptime!(4 * plane + 2)]);
        visible.all_end = min(visible.all_end, found[comptime!(4 * plane + 3)]);
    }
    visible.begin = min(visible.begin, visible.end);
    if comptime!(config.split) {
        visible.keep_split(comptime!(config.keys as u32));
    }
    visible
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

/// Begins to copy a tile of keys or values from key `first` on. For keys past the end it copies the last one.
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

/// The products of a plane's rows with a tile of keys: for each block of 16 rows and each 8 keys, unit `l` has those of rows
/// `l / 4` and `l / 4 + 8` with keys `2 (l % 4)` and the next.
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

/// Waits for the tile of values, from vector `first` of shared memory on, replaces each vector with a value that is not
/// finite by zeros, and marks its key: in rows that do not see the key, its weight of 0 times such a value would be NaN.
#[cube]
fn zero_non_finite_values(
    shared: &mut Shared<[Vector<u32, Const<4>>]>,
    non_finite: &mut Shared<[u32]>,
    first: u32,
    #[comptime] config: TileConfig,
) {
    let mut at = UNIT_POS_X;
    while at < comptime!(config.keys as u32) {
        non_finite[at as usize] = 0u32;
        at += comptime!(config.units() as u32);
    }
    if comptime!(config.stages == 1) {
        wait_copies();
    }
    sync_cube();
    let vectors = comptime!((config.value_width / 8) as u32);
    // All bits of the exponents.
    let exponent = comptime!(if config.dtype == FloatType::F16 { 0x7c00u32 } else { 0x7f80u32 });
    let mut vector = UNIT_POS_X;
    while vector < comptime!(config.keys as u32) * vectors {
        let key = vector / vectors;
        let at = (first + key * comptime!(config.value_stride() as u32) + vector % vectors) as usize;
        let values = shared[at];
        let mut bad = false.runtime();
        #[unroll]
        for j in 0..4usize {
            let low = values.extract(j) & exponent;
            let high = (values.extract(j) >> 16u32) & exponent;
            bad = bad || low == exponent || high == exponent;
        }
        if bad {
            shared[at] = Vector::<u32, Const<4>>::new(0u32);
            non_finite[key as usize] = 1u32;
        }
        vector += comptime!(config.units() as u32);
    }
    sync_cube();
}

/// Makes the scores of keys that a row does not see -inf, and those of marked keys that it sees NaN.
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
                let seen = key >= bounds.low[r] && key < min(bounds.high[r], end);
                let value = select(bad, f32::reinterpret(0x7fc0_0000u32), score.extract(element));
                score.insert(element, select(seen, value, f32::reinterpret(0xff80_0000u32)));
                scores[i] = score;
            }
        }
    }
}
