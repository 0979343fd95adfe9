//! Attention of one token, or of a few: memory bounds it, so that as many bytes as possible are
//! under way at any time.
//!
//! A cube has at most 16 query rows, which all its planes take, and its part of the keys, with
//! whose tiles the planes take turns. Each plane has some tiles under way in a ring of its own, and
//! waits for no other plane until the end. Keys are the rows of the tensor cores' matrices and
//! query rows the columns: with 8 columns, few of them are empty.
//!
//! Keys and values of 8 bits become floats in registers (`codes.rs`).
//!
//! With keys in pages, a cube has the query rows of one token, and goes through some of the
//! parts of their keys, one after the other.

mod codes;
mod config;
mod pairs;
mod ring;
mod sums;

pub(in super::super) use config::StepConfig;

use super::rows::{Destination, PartPlace, RowBounds, cap_scores, visible_keys, zero_non_finite_values};
use crate::gpu::cuda::ptx::{
    address, copy_vector, end_copy_group, load_tiles, mma, register, wait_copy_groups,
};
use crate::gpu::launch::kernel;
use crate::ops::attention::gpu::operands::{Inputs, InputsArgs, Sizes, VisibleKeys, row_index, seen_keys};
use crate::ops::attention::gpu::parts::PARTS;
use crate::ops::pages::gpu::PoolSizes;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use ring::{Ring, next};
use sums::{Sums, mask, row_bounds};

/// See [`attention`](crate::ops::attention()). `scale` is an f32 and includes the factor log2(e). y
/// holds pairs of q's type, or the bits of f32 where the keys are split. `table` and `pool` are
/// those of pages.
#[kernel]
pub(super) fn attention_step(
    inputs: &Inputs<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
    table: &[u32],
    y: &mut [u32],
    scales: &mut [f32],
    sizes: Sizes,
    pool: PoolSizes,
    scale: u32,
    #[comptime] config: StepConfig,
) {
    let scale = f32::reinterpret(scale);
    let memory =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(config.bytes() / 16), 128usize);
    let memory = register(address(&memory));
    let ring =
        memory + comptime!(config.queries() as u32) + UNIT_POS_X / 32u32 * comptime!(config.ring() as u32);
    let ring = register(ring);
    if comptime!(config.paged) {
        let row0 = CUBE_POS_Y * sizes.group;
        let (group, capacity, window) = (sizes.group, sizes.capacity, sizes.window);
        let own = Sizes { rows: row0 + group, group, capacity, window, ahead: sizes.ahead };
        let seen = seen_keys(&inputs.positions, row0, &own);
        let parts = seen.parts();
        let mut part = CUBE_POS_Z;
        if part < parts {
            copy_queries(&inputs.q, memory, row0, &own, config);
            let mut visible = seen.part(part);
            let mut ring = Ring { at: ring, base: 0u32.runtime(), end: visible.end, pool };
            ring.fill(inputs, table, visible.begin, config);
            let rows = query_rows(&inputs.positions, memory, row0, &own, config);
            while part < parts {
                let mut sums = sum_keys(inputs, table, &ring, &visible, &rows, scale, config);
                let place = PartPlace {
                    index: part,
                    count: comptime!(PARTS as u32).runtime(),
                    rows: CUBE_COUNT_X * sizes.rows,
                };
                let any_keys = true.runtime();
                let out = Destination { own: row0, rows: own.rows, group, scale, any_keys, part: place };
                sums.leave(ring.at, &out, config).store(y, scales, memory, &out, config);
                part += CUBE_COUNT_Z;
                if part < parts {
                    let next = seen.part(part);
                    visible.begin = next.begin;
                    visible.end = next.end;
                    ring.end = next.end;
                    // All units have read what planes left in their rings.
                    sync_cube();
                    ring.fill(inputs, table, next.begin, config);
                }
            }
        }
    } else {
        let row0 = CUBE_POS_Y * comptime!(config.rows() as u32);
        copy_queries(&inputs.q, memory, row0, &sizes, config);
        let visible = visible_keys(&inputs.positions, row0, &sizes, config.cut());
        let ring = Ring { at: ring, base: CUBE_POS_X * sizes.capacity, end: visible.end, pool };
        ring.fill(inputs, table, visible.begin, config);
        let rows = query_rows(&inputs.positions, memory, row0, &sizes, config);
        let mut sums = sum_keys(inputs, table, &ring, &visible, &rows, scale, config);
        let any_keys = visible.begin < visible.end;
        let part = PartPlace::of_cube(sizes.rows);
        let out = Destination { own: row0, rows: sizes.rows, group: sizes.group, scale, any_keys, part };
        sums.leave(ring.at, &out, config).store(y, scales, memory, &out, config);
    }
}

/// A cube's query rows.
#[derive(CubeType)]
struct QueryRows {
    /// See [`load_queries`].
    elements: Array<u32>,
    bounds: RowBounds,
}

/// Waits for the queries, whose copy began before the ring was filled.
#[cube]
fn query_rows(
    positions: &[u32],
    memory: u32,
    row0: u32,
    sizes: &Sizes,
    #[comptime] config: StepConfig,
) -> QueryRows {
    // All but the queries, which were first.
    wait_copy_groups(comptime!(2 * config.stages));
    sync_cube();
    let bounds = row_bounds(positions, row0, sizes, config);
    if comptime!(config.int8) {
        QueryRows { elements: codes::load_queries(memory, config), bounds }
    } else {
        QueryRows { elements: load_queries(memory, config), bounds }
    }
}

/// The sums of this plane's tiles of the keys `visible`, of which the ring has the first.
#[cube]
fn sum_keys(
    inputs: &Inputs<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
    table: &[u32],
    ring: &Ring,
    visible: &VisibleKeys,
    rows: &QueryRows,
    scale: f32,
    #[comptime] config: StepConfig,
) -> Sums {
    let keys = comptime!(config.keys as u32);
    let to_v = comptime!((16 * config.keys * config.stride()) as u32);
    let mut non_finite = Shared::<[u32]>::new_slice(comptime!(config.planes * config.keys));
    let mut at = visible.begin + UNIT_POS_X / 32u32 * keys;
    // The tile to copy next.
    let mut ahead = at + comptime!((config.stages * config.planes * config.keys) as u32);
    let mut sums = Sums::new(config);
    let mut stage = 0u32.runtime();
    while at < ring.end {
        let row = ring.row(table, ahead, config);
        ring.wait(config);
        let mut scores = scores_of_tile(&rows.elements, ring.at + stage, config);
        cap_scores(&mut scores, scale, comptime!(config.blocks * config.keys / 16), config.softcap);
        sync_plane();
        ring.copy(&inputs.k, (ahead, row), stage, comptime!(config.width), config);
        ring.wait(config);
        if at < visible.all_begin || at + keys > min(visible.all_end, ring.end) {
            if comptime!(config.int8) {
                codes::zero_non_finite_scales(ring.at + stage + to_v, &mut non_finite, config);
            } else {
                zero_non_finite_values(ring.at + stage + to_v, &mut non_finite, config.values());
            }
            mask(&mut scores, &non_finite, &rows.bounds, at, ring.end, config);
        }
        let weights = sums.weigh(&mut scores, scale, config);
        if comptime!(config.int8) {
            sums.add_weighted_codes(&weights, ring.at + stage + to_v, config);
        } else {
            sums.add_weighted_values(&weights, ring.at + stage + to_v, config);
        }
        sync_plane();
        ring.copy(&inputs.v, (ahead, row), stage + to_v, comptime!(config.value_width), config);
        at += comptime!((config.planes * config.keys) as u32);
        ahead += comptime!((config.planes * config.keys) as u32);
        stage = next(stage, config);
    }
    sums
}

/// The products of the tile of keys at `k_at`: see [`products`].
#[cube]
fn scores_of_tile(
    queries: &Array<u32>,
    k_at: u32,
    #[comptime] config: StepConfig,
) -> Array<Vector<f32, Const<4>>> {
    if comptime!(config.int8) {
        codes::products(queries, k_at, config)
    } else {
        products(queries, k_at, config)
    }
}

/// Begins to copy the cube's rows of q.
#[cube]
fn copy_queries(
    q: &[Vector<u32, Const<4>>],
    to: u32,
    row0: u32,
    sizes: &Sizes,
    #[comptime] config: StepConfig,
) {
    let vectors = comptime!((config.width / 8) as u32);
    let mut vector = UNIT_POS_X;
    while vector < comptime!((config.rows() * config.width / 8) as u32) {
        let (row, column) = (vector / vectors, vector % vectors);
        // Rows past the last are computed and not stored.
        let from = row_index(min(row0 + row, sizes.rows - 1u32), sizes.group) * vectors + column;
        copy_vector(q, from, to + 16u32 * (row * comptime!(config.query_stride() as u32) + column));
        vector += comptime!(config.units() as u32);
    }
    end_copy_group();
}

/// A unit's elements of the cube's rows of q, as right operands of products: for each block of rows
/// and each 16 elements, unit `l` has elements `2 (l % 4)` and the next, and 8 further, of row
/// `l / 4`.
#[cube]
fn load_queries(q_at: u32, #[comptime] config: StepConfig) -> Array<u32> {
    let stride = comptime!(16 * config.query_stride());
    let lane = UNIT_POS_X % 32u32;
    let q_at = register(q_at + lane % 8u32 * comptime!(stride as u32) + lane / 8u32 * 16u32);
    let mut queries = Array::<u32>::new(comptime!(config.blocks * config.width / 8));
    #[unroll]
    for i in 0..comptime!(config.blocks * config.width / 32) {
        let (block, d) = comptime!((i / (config.width / 32), i % (config.width / 32)));
        let tiles = load_tiles(q_at, comptime!(block * 8 * stride + d * 64), false);
        #[unroll]
        for j in 0..4usize {
            queries[comptime!(4 * i + j)] = tiles.extract(j);
        }
    }
    queries
}

/// The products of the tile of keys at `k_at` with the cube's query rows: for each block of rows
/// and each 16 keys, unit `l` has those of keys `l / 4` and `l / 4 + 8` with rows `2 (l % 4)` and
/// the next.
#[cube]
fn products(queries: &Array<u32>, k_at: u32, #[comptime] config: StepConfig) -> Array<Vector<f32, Const<4>>> {
    let count = comptime!(config.keys / 16);
    let steps = comptime!(config.width / 16);
    let stride = comptime!(16 * config.stride());
    let lane = UNIT_POS_X % 32u32;
    let k_at = register(k_at + lane % 16u32 * comptime!(stride as u32) + lane / 16u32 * 16u32);
    let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(config.blocks * count));
    #[unroll]
    for i in 0..comptime!(config.blocks * count) {
        scores[i] = Vector::<f32, Const<4>>::new(0.0f32);
    }
    #[unroll]
    for d in 0..steps {
        #[unroll]
        for n in 0..count {
            let mut keys = Array::<Vector<u32, Const<4>>>::new(1usize);
            keys[0] = load_tiles(k_at, comptime!(n * 16 * stride + d * 32), false);
            #[unroll]
            for b in 0..comptime!(config.blocks) {
                let i = comptime!(b * count + n);
                let q = comptime!(2 * (b * steps + d));
                scores[i] = mma(keys[0], queries[q], queries[comptime!(q + 1)], scores[i], config.dtype);
            }
        }
    }
    scores
}
