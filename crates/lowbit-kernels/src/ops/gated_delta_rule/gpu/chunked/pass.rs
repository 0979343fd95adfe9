//! The way through a sequence's chunks, in three roles that work at the same time:
//!
//! - A *keeper* warp has 16 columns of a head's state, transposed, in registers. It takes chunk `c` into it, and leaves
//!   what the chunk finds of it, and `delta`, in shared memory, rounded.
//! - An *answerer* warp makes `y` of chunk `c - 1` from that.
//! - *Loaders* fetch operands of the chunks after.
//!
//! All products have a transposed left operand, `[16 columns, depth]`, which is the sum of a product before, rounded;
//! their right operands lie in shared memory.

use super::super::key_head;
use super::super::mma::{
    address, commit, copy, pack, put, tiles, transposed, transposed_tiles, two, wait, words,
};
use super::{CHUNK, GATES, SLICE, Shape, place};
use crate::gpu::CUBES;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::widen;
use crate::gpu::ptx::multiply;
use crate::gpu::sequences::bounds;
use crate::ops::gated_delta_rule::StateLayout;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Keepers, and answerers.
pub(super) const WARPS: usize = 2;
/// Units of either role.
const UNITS: usize = 32 * WARPS;
/// Units that load: so many that each keeps its place in the rows' swizzle.
const LOADERS: usize = 128;
/// Chunks whose operands are in shared memory: one in use, one that has come, one on its way.
const STAGES: usize = 3;

/// Places in shared memory, in bytes.
#[derive(Clone, Copy, Debug)]
struct Places {
    /// Of a keeper's stage: keys first, then `T`, values and gates.
    transform: usize,
    values: usize,
    key_gates: usize,
    key_stage: usize,
    /// Of an answerer's stage, which come after all keepers': queries first, then `P` and the first half of the gates.
    pairs: usize,
    query_gates: usize,
    query_stage: usize,
    /// What a keeper leaves: its state, then `delta`. There are two for each, after all stages.
    delta: usize,
    left: usize,
}

impl Places {
    fn of(shape: Shape) -> Self {
        let (tile, square) = (CHUNK * shape.key_dim * 2, CHUNK * CHUNK * 2);
        let values = tile + square;
        let key_gates = values + CHUNK * SLICE * 2;
        let query_gates = tile + square;
        let delta = 32 * shape.key_dim;
        Self {
            transform: tile,
            values,
            key_gates,
            key_stage: key_gates + GATES * 4,
            pairs: tile,
            query_gates,
            query_stage: query_gates + GATES * 2,
            delta,
            left: delta + 32 * CHUNK,
        }
    }

    fn size(self) -> usize {
        STAGES * (self.key_stage + self.query_stage) + 2 * WARPS * self.left
    }
}

/// A cube's place in the problem.
#[derive(CubeType, Clone, Copy)]
struct Place {
    head: usize,
    key_head: usize,
    key_heads: usize,
    value_heads: usize,
    /// The cube's first column of the state.
    column: usize,
    /// The sequence's first slot, and its tokens.
    slot: usize,
    start: usize,
    end: usize,
}

/// What loaders fetch: keys, queries, values, and what `prepare.rs` has made of them.
#[derive(CubeType)]
struct Operands<'a> {
    q: &'a [Vector<u32, Const<4>>],
    k: &'a [Vector<u32, Const<4>>],
    v: &'a [Vector<u32, Const<4>>],
    transforms: &'a [Vector<u32, Const<4>>],
    pairs: &'a [Vector<u32, Const<4>>],
    gates: &'a [Vector<u32, Const<4>>],
}

#[cube]
impl<'a> Operands<'a> {
    fn new(
        q: &'a [Vector<u32, Const<4>>],
        k: &'a [Vector<u32, Const<4>>],
        v: &'a [Vector<u32, Const<4>>],
        transforms: &'a [Vector<u32, Const<4>>],
        pairs: &'a [Vector<u32, Const<4>>],
        gates: &'a [Vector<u32, Const<4>>],
    ) -> Operands<'a> {
        Operands::<'a> { q, k, v, transforms, pairs, gates }
    }
}

#[cube(launch_unchecked)]
fn pass(
    q: &[Vector<u32, Const<4>>],
    k: &[Vector<u32, Const<4>>],
    v: &[Vector<u32, Const<4>>],
    transforms: &[Vector<u32, Const<4>>],
    pairs: &[Vector<u32, Const<4>>],
    gates: &[Vector<u32, Const<4>>],
    cu_seqlens: &[u32],
    state: &mut [f32],
    y: &mut [u32],
    tokens: u32,
    sequences: u32,
    key_heads: u32,
    value_heads: u32,
    scale: u32,
    #[comptime] shape: Shape,
) {
    let cubes = comptime!(shape.cubes());
    let (key_heads, value_heads) = (key_heads as usize, value_heads as usize);
    let sequence = CUBE_POS_Z as usize * CUBES + CUBE_POS_Y as usize;
    if sequence < sequences as usize {
        let (start, end) = bounds(cu_seqlens, sequence, tokens as usize);
        let head = CUBE_POS_X as usize / cubes;
        let place = Place {
            head,
            key_head: key_head(key_heads, value_heads, head, shape.head_map),
            key_heads,
            value_heads,
            column: CUBE_POS_X as usize % cubes * SLICE,
            slot: start / CHUNK + sequence,
            start,
            end,
        };
        if start < end {
            let shared =
                Shared::<[u32]>::new_aligned_slice(comptime!(Places::of(shape).size() / 4), 128usize);
            let base = address(&shared);
            let matrix = (sequence * value_heads + head) * comptime!(shape.key_dim * shape.value_dim);
            let role = UNIT_POS_X as usize / UNITS;
            let operands = Operands::new(q, k, v, transforms, pairs, gates);
            let mut s = Array::<f32>::new(comptime!(shape.key_dim / 2));
            #[unroll]
            for i in 0..comptime!(shape.key_dim / 2) {
                s[i] = 0.0;
            }
            let chunks = (end - start).div_ceil(CHUNK);
            if role == 0 {
                #[unroll]
                for i in 0..comptime!(shape.key_dim / 2) {
                    s[i] = state[matrix + element(i, place.column, shape)];
                }
            } else if role >= 2 {
                load_keys(&operands, base, &place, 0usize, shape);
                commit();
                load_keys(&operands, base, &place, 1usize, shape);
                load_queries(&operands, base, &place, 0usize, shape);
                commit();
                wait(1usize);
            }
            sync_cube();
            for chunk in 0..chunks + 1usize {
                if role == 0 {
                    if chunk < chunks {
                        keep(&mut s, base, chunk, shape);
                    }
                } else if role == 1 {
                    if chunk > 0 {
                        answer(y, base, &place, chunk - 1usize, f32::reinterpret(scale), shape);
                    }
                } else {
                    load_keys(&operands, base, &place, chunk + 2usize, shape);
                    load_queries(&operands, base, &place, chunk + 1usize, shape);
                    commit();
                    wait(1usize);
                }
                sync_cube();
            }
            if role == 0 {
                #[unroll]
                for i in 0..comptime!(shape.key_dim / 2) {
                    state[matrix + element(i, place.column, shape)] = s[i];
                }
            }
        }
    }
}

/// A keeper's or answerer's warp among its like.
#[cube]
fn warp() -> usize {
    UNIT_POS_X as usize / 32usize % WARPS
}

/// The row and the half of 16 columns that a unit names of a 16 x 16 tile.
#[cube]
fn corner() -> (usize, usize) {
    (UNIT_POS_X as usize % 16usize, UNIT_POS_X as usize / 16usize % 2usize)
}

/// A keeper's or loader's stage.
#[cube]
fn key_stage(base: u32, chunk: usize, #[comptime] shape: Shape) -> u32 {
    base + (chunk % STAGES * comptime!(Places::of(shape).key_stage)) as u32
}

/// An answerer's or loader's stage.
#[cube]
fn query_stage(base: u32, chunk: usize, #[comptime] shape: Shape) -> u32 {
    let first = comptime!((STAGES * Places::of(shape).key_stage) as u32);
    base + first + (chunk % STAGES * comptime!(Places::of(shape).query_stage)) as u32
}

/// The unit's place in what a keeper leaves to its answerer.
#[cube]
fn left_at(base: u32, chunk: usize, #[comptime] shape: Shape) -> u32 {
    let places = comptime!(Places::of(shape));
    let first = comptime!((STAGES * (places.key_stage + places.query_stage)) as u32);
    let which = chunk % 2usize * WARPS + warp();
    base + first + (which * comptime!(places.left)) as u32 + UNIT_POS_X % 32u32 * 16u32
}

/// Where the unit's element `i` of the state is in a head's matrix.
#[cube]
fn element(#[comptime] i: usize, column: usize, #[comptime] shape: Shape) -> usize {
    let (warp, lane) = (UNIT_POS_X as usize / 32usize, UNIT_POS_X as usize % 32usize);
    let column = column + warp * 16usize + lane / 4usize + comptime!(i / 2 % 2 * 8);
    let row = lane % 4usize * 2usize + comptime!(i / 4 * 8 + i % 2);
    if comptime!(shape.layout == StateLayout::KeyValue) {
        row * comptime!(shape.value_dim) + column
    } else {
        column * comptime!(shape.key_dim) + row
    }
}

/// Starts loading a chunk's keys, values, `T` and gates.
#[cube]
fn load_keys(of: &Operands<'_>, base: u32, at: &Place, chunk: usize, #[comptime] shape: Shape) {
    let places = comptime!(Places::of(shape));
    let (vectors, values) = comptime!((shape.vectors(), shape.value_dim / 8));
    let first = at.start + chunk * CHUNK;
    if first < at.end {
        let to = key_stage(base, chunk, shape);
        load_rows(of.k, to, first, at.end, at.key_heads * vectors, at.key_head * vectors, vectors);
        let column = at.head * values + at.column / 8usize;
        let to_values = to + comptime!(places.values as u32);
        load_rows(of.v, to_values, first, at.end, at.value_heads * values, column, comptime!(SLICE / 8));
        let index = (at.slot + chunk) * at.value_heads + at.head;
        let to_transform = to + comptime!(places.transform as u32);
        load_triangle(of.transforms, to_transform, index);
        let unit = UNIT_POS_X as usize % LOADERS;
        if unit < comptime!(GATES / 4) {
            let to = to + comptime!(places.key_gates as u32) + (unit * 16usize) as u32;
            copy(to, of.gates, index * comptime!(GATES / 4) + unit, true);
        }
    }
}

/// Starts loading a chunk's queries, `P` and the first half of its gates.
#[cube]
fn load_queries(of: &Operands<'_>, base: u32, at: &Place, chunk: usize, #[comptime] shape: Shape) {
    let places = comptime!(Places::of(shape));
    let vectors = comptime!(shape.vectors());
    let first = at.start + chunk * CHUNK;
    if first < at.end {
        let to = query_stage(base, chunk, shape);
        load_rows(of.q, to, first, at.end, at.key_heads * vectors, at.key_head * vectors, vectors);
        let index = (at.slot + chunk) * at.value_heads + at.head;
        let to_pairs = to + comptime!(places.pairs as u32);
        load_triangle(of.pairs, to_pairs, index);
        let unit = UNIT_POS_X as usize % LOADERS;
        if unit < comptime!(GATES / 8) {
            let to = to + comptime!(places.query_gates as u32) + (unit * 16usize) as u32;
            copy(to, of.gates, index * comptime!(GATES / 4) + unit, true);
        }
    }
}

/// Starts loading a tile of `vectors` vectors a row: rows from `first` on, of `pitch` vectors each, from vector `column`
/// of theirs on; zeros from row `end` on.
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
    let to = to + place(row, vector, vectors);
    #[unroll]
    for i in 0..comptime!(CHUNK * vectors / LOADERS) {
        let row = first + row + comptime!(i * rows);
        let at = min(row, end - 1usize) * pitch + column + vector;
        copy(to + comptime!((i * LOADERS * 16) as u32), x, at, row < end);
    }
}

/// Starts loading a chunk's `T` or `P`: the blocks of 16 x 16 on and below the diagonal, which [`multiply_triangle`] reads;
/// `prepare.rs` need not write the others.
#[cube]
fn load_triangle(x: &[Vector<u32, Const<4>>], to: u32, index: usize) {
    let unit = UNIT_POS_X as usize % LOADERS;
    let (row, vector) = (unit / 8usize, unit % 8usize);
    let to = to + place(row, vector, 8usize);
    #[unroll]
    for sixteen in 0..comptime!(CHUNK / 16) {
        let last = comptime!(2 * sixteen + 1).runtime();
        let at = (index * CHUNK + comptime!(16 * sixteen) + row) * 8usize + min(vector, last);
        copy(to + comptime!((sixteen * LOADERS * 16) as u32), x, at, vector <= last);
    }
}

/// Takes a chunk into the state.
#[cube]
fn keep(s: &mut Array<f32>, base: u32, chunk: usize, #[comptime] shape: Shape) {
    let places = comptime!(Places::of(shape));
    let from = key_stage(base, chunk, shape);
    let leave = left_at(base, chunk, shape);
    let (row, half) = corner();
    // Of the tokens, eight by eight: what the state predicts, and how far that is off.
    let mut error = zeros(32usize);
    #[unroll]
    for depth in 0..comptime!(shape.key_dim / 16) {
        let mut left = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            let (low, high) = (s[comptime!(depth * 8 + i * 2)], s[comptime!(depth * 8 + i * 2 + 1)]);
            left[i] = pack(low, high, shape.dtype);
        }
        put(leave + comptime!((depth * 512) as u32), &left, 0usize);
        multiply_rows(&left, 0usize, from, depth, &mut error, shape);
    }
    let before = from + comptime!(places.key_gates as u32);
    subtract(&mut error, from + comptime!(places.values as u32), before, shape);

    let mut left = Array::<u32>::new(16usize);
    round(&error, &mut left, shape);
    let mut delta = zeros(32usize);
    multiply_triangle(&left, from + comptime!(places.transform as u32), &mut delta, shape);
    round(&delta, &mut left, shape);
    #[unroll]
    for i in 0..4usize {
        put(leave + comptime!((places.delta + i * 512) as u32), &left, comptime!(4 * i));
    }

    scale_by_token(&mut delta, before + comptime!((CHUNK * 4) as u32));
    round(&delta, &mut left, shape);
    let decay = two(before + comptime!((CHUNK * 4 - 8) as u32)).extract(1usize);
    #[unroll]
    for i in 0..comptime!(shape.key_dim / 2) {
        s[i] *= decay;
    }
    #[unroll]
    for depth in 0..4usize {
        #[unroll]
        for block in 0..comptime!(shape.key_dim / 16) {
            let at =
                place(comptime!(depth * 16) + row, comptime!(2 * block) + half, comptime!(shape.vectors()));
            let keys = transposed_tiles(from + at);
            #[unroll]
            for side in 0..2usize {
                let (b0, b1) = (keys.extract(comptime!(2 * side)), keys.extract(comptime!(2 * side + 1)));
                multiply(
                    &left,
                    comptime!(depth * 4),
                    b0,
                    b1,
                    s,
                    comptime!(block * 8 + side * 4),
                    shape.dtype,
                );
            }
        }
    }
}

/// Writes a chunk's `y`.
#[cube]
fn answer(y: &mut [u32], base: u32, at: &Place, chunk: usize, scale: f32, #[comptime] shape: Shape) {
    let places = comptime!(Places::of(shape));
    let from = query_stage(base, chunk, shape);
    let found = left_at(base, chunk, shape);
    let mut answer = zeros(32usize);
    let mut left = Array::<u32>::new(16usize);
    #[unroll]
    for depth in 0..comptime!(shape.key_dim / 16) {
        take(found + comptime!((depth * 512) as u32), &mut left, 0usize);
        multiply_rows(&left, 0usize, from, depth, &mut answer, shape);
    }
    scale_by_token(&mut answer, from + comptime!(places.query_gates as u32));
    #[unroll]
    for i in 0..4usize {
        take(found + comptime!((places.delta + i * 512) as u32), &mut left, comptime!(4 * i));
    }
    multiply_triangle(&left, from + comptime!(places.pairs as u32), &mut answer, shape);

    let lane = UNIT_POS_X as usize % 32usize;
    #[unroll]
    for eight in 0..8usize {
        let token = at.start + chunk * CHUNK + comptime!(eight * 8) + lane / 4usize;
        let row = (token * at.value_heads + at.head) * comptime!(shape.value_dim / 2);
        let to = row + at.column / 2usize + warp() * 8usize + lane % 4usize;
        #[unroll]
        for half in 0..2usize {
            let i = comptime!(eight * 4 + half * 2);
            let word = transposed(pack(answer[i] * scale, answer[comptime!(i + 1)] * scale, shape.dtype));
            if token < at.end {
                y[to + comptime!(half * 4)] = word;
            }
        }
    }
}

#[cube]
fn zeros(#[comptime] count: usize) -> Array<f32> {
    let mut zeros = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        zeros[i] = 0.0;
    }
    zeros
}

/// Reads `left[first..first + 4]` from shared memory.
#[cube]
fn take(at: u32, left: &mut Array<u32>, #[comptime] first: usize) {
    let words = words(at);
    #[unroll]
    for i in 0..4usize {
        left[comptime!(first + i)] = words.extract(i);
    }
}

/// `sums += left rows^T`, of 16 columns of the chunk's keys or queries.
#[cube]
fn multiply_rows(
    left: &Array<u32>,
    #[comptime] tile: usize,
    rows: u32,
    #[comptime] depth: usize,
    sums: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let (row, half) = corner();
    #[unroll]
    for block in 0..4usize {
        let at = place(comptime!(block * 16) + row, comptime!(2 * depth) + half, comptime!(shape.vectors()));
        let right = tiles(rows + at);
        #[unroll]
        for side in 0..2usize {
            let (b0, b1) = (right.extract(side), right.extract(comptime!(side + 2)));
            multiply(left, tile, b0, b1, sums, comptime!(block * 8 + side * 4), shape.dtype);
        }
    }
}

/// Multiplies each token's sums with its gate.
#[cube]
fn scale_by_token(sums: &mut Array<f32>, gates: u32) {
    #[unroll]
    for eight in 0..8usize {
        let gate = two(gates + comptime!((eight * 32) as u32) + UNIT_POS_X % 4u32 * 8u32);
        #[unroll]
        for i in 0..4usize {
            sums[comptime!(eight * 4 + i)] *= gate.extract(comptime!(i % 2));
        }
    }
}

/// `v - g S^T k`, of `S^T k`.
#[cube]
fn subtract(error: &mut Array<f32>, values: u32, before: u32, #[comptime] shape: Shape) {
    let (row, half) = corner();
    scale_by_token(error, before);
    #[unroll]
    for block in 0..4usize {
        let at = place(comptime!(block * 16) + row, warp() * 2usize + half, comptime!(SLICE / 8));
        let v = transposed_tiles(values + at);
        #[unroll]
        for i in 0..8usize {
            let word = v.extract(comptime!(i / 4 + i / 2 % 2 * 2));
            let bits = if comptime!(i % 2 == 0) { word & 0xffffu32 } else { word >> 16u32 };
            error[comptime!(block * 8 + i)] = widen(bits, shape.dtype) - error[comptime!(block * 8 + i)];
        }
    }
}

/// Sums, `[16, 64]`, as a left operand.
#[cube]
fn round(sums: &Array<f32>, left: &mut Array<u32>, #[comptime] shape: Shape) {
    #[unroll]
    for i in 0..16usize {
        left[i] = pack(sums[comptime!(2 * i)], sums[comptime!(2 * i + 1)], shape.dtype);
    }
}

/// `sums += left matrix^T`, of a lower triangular matrix, `[64, 64]`.
#[cube]
fn multiply_triangle(left: &Array<u32>, matrix: u32, sums: &mut Array<f32>, #[comptime] shape: Shape) {
    let (row, half) = corner();
    #[unroll]
    for block in 0..4usize {
        #[unroll]
        for depth in 0..comptime!(block + 1) {
            let right =
                tiles(matrix + place(comptime!(block * 16) + row, comptime!(2 * depth) + half, 8usize));
            #[unroll]
            for side in 0..2usize {
                let (b0, b1) = (right.extract(side), right.extract(comptime!(side + 2)));
                let at = comptime!(block * 8 + side * 4);
                multiply(left, comptime!(depth * 4), b0, b1, sums, at, shape.dtype);
            }
        }
    }
}

pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start((2 * UNITS + LOADERS) as u32);
    Box::new(pass::Pass::new(
        settings,
        properties,
        registers,
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        (),
        (),
        (),
        shape,
    ))
}
