//! The work of loader planes: copies of a chunk's operands into shared memory. The caller ends a
//! group of copies and waits.

use super::super::config::{CHUNK, COLUMNS, ChunkConfig, GATES, swizzled};
use super::layout::{SharedLayout, key_stage, query_stage};
use crate::gpu::cuda::ptx::copy_vector_or_zeros;
use crate::ops::gated_delta_rule::gpu::operands::Operands;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Units of the loader planes: a multiple of eight rows' vectors, so that a unit's column is
/// swizzled the same way in all its rows.
pub(super) const LOADERS: usize = 128;

/// The heads, columns and tokens of a cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Location {
    pub head: usize,
    pub key_head: usize,
    pub key_heads: usize,
    pub value_heads: usize,
    /// The cube's first column of the state.
    pub column: usize,
    /// The sequence's first slot, and its tokens.
    pub slot: usize,
    pub start: usize,
    pub end: usize,
}

/// The operands that loaders copy, all in vectors.
pub(in super::super) type LoadedOperands = Operands<Vector<u32, Const<4>>, Vector<u32, Const<4>>>;

/// Begins to copy a chunk's keys, values, `T` and gates.
#[cube]
pub(super) fn load_keys(
    of: &LoadedOperands,
    base: u32,
    at: &Location,
    chunk: usize,
    #[comptime] config: ChunkConfig,
) {
    let layout = comptime!(SharedLayout::of(config));
    let (vectors, values) = comptime!((config.vectors(), config.value_dim / 8));
    let first = at.start + chunk * CHUNK;
    if first < at.end {
        let to = key_stage(base, chunk, config);
        load_rows(&of.k, to, first, at.end, at.key_heads * vectors, at.key_head * vectors, vectors);
        let column = at.head * values + at.column / 8usize;
        let to_values = to + comptime!(layout.values as u32);
        load_rows(&of.v, to_values, first, at.end, at.value_heads * values, column, comptime!(COLUMNS / 8));
        let index = (at.slot + chunk) * at.value_heads + at.head;
        if comptime!(config.corrects()) {
            let to_transform = to + comptime!(layout.transform as u32);
            load_triangle(&of.transforms, to_transform, index);
        }
        let unit = UNIT_POS_X as usize % LOADERS;
        if unit < comptime!(GATES / 4) {
            let to = to + comptime!(layout.key_gates as u32) + (unit * 16usize) as u32;
            copy_vector_or_zeros(&of.gates, (index * comptime!(GATES / 4) + unit) as u32, to, true.runtime());
        }
    }
}

/// Begins to copy a chunk's queries, `P` and the first half of its gates.
#[cube]
pub(super) fn load_queries(
    of: &LoadedOperands,
    base: u32,
    at: &Location,
    chunk: usize,
    #[comptime] config: ChunkConfig,
) {
    let layout = comptime!(SharedLayout::of(config));
    let vectors = comptime!(config.vectors());
    let first = at.start + chunk * CHUNK;
    if first < at.end {
        let to = query_stage(base, chunk, config);
        load_rows(&of.q, to, first, at.end, at.key_heads * vectors, at.key_head * vectors, vectors);
        let index = (at.slot + chunk) * at.value_heads + at.head;
        let to_pairs = to + comptime!(layout.pairs as u32);
        load_triangle(&of.pairs, to_pairs, index);
        let unit = UNIT_POS_X as usize % LOADERS;
        if unit < comptime!(GATES / 8) {
            let to = to + comptime!(layout.query_gates as u32) + (unit * 16usize) as u32;
            copy_vector_or_zeros(&of.gates, (index * comptime!(GATES / 4) + unit) as u32, to, true.runtime());
        }
    }
}

/// Begins to copy a tile of `vectors` vectors per row: the rows of x from `first` on, `pitch`
/// vectors apart, from vector `column` of each on; zeros from row `end` on.
#[cube]
fn load_rows(
    x: &[Vector<u32, Const<4>>],
    to: u32,
    first: usize,
    end: usize,
    pitch: usize,
    column: usize,
    #[comptime] vectors: usize,
) {
    let unit = UNIT_POS_X as usize % LOADERS;
    let (row, vector) = (unit / vectors, unit % vectors);
    let rows = comptime!(LOADERS / vectors);
    let to = to + swizzled(row, vector, vectors);
    #[unroll]
    for i in 0..comptime!(CHUNK * vectors / LOADERS) {
        let row = first + row + comptime!(i * rows);
        let at = min(row, end - 1usize) * pitch + column + vector;
        copy_vector_or_zeros(x, at as u32, to + comptime!((i * LOADERS * 16) as u32), row < end);
    }
}

/// Begins to copy a chunk's `T` or `P`: the blocks of 16 by 16 on and below the diagonal, which
/// `multiply_triangle` reads. `prepare.rs` need not write the others.
#[cube]
fn load_triangle(x: &[Vector<u32, Const<4>>], to: u32, index: usize) {
    let unit = UNIT_POS_X as usize % LOADERS;
    let (row, vector) = (unit / 8usize, unit % 8usize);
    let to = to + swizzled(row, vector, 8usize);
    #[unroll]
    for block in 0..comptime!(CHUNK / 16) {
        let last = comptime!(2 * block + 1).runtime();
        let at = (index * CHUNK + comptime!(16 * block) + row) * 8usize + min(vector, last);
        copy_vector_or_zeros(x, at as u32, to + comptime!((block * LOADERS * 16) as u32), vector <= last);
    }
}
