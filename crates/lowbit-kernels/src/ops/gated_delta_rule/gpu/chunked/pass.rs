//! The way through a sequence's chunks: a warp has 16 columns of a head's state, transposed, in registers.
//!
//! All products have a transposed left operand, `[16 columns, depth]`, which is the sum of a product before, rounded;
//! their right operands lie in shared memory, and the next chunk's come while one is worked on.

use super::super::mma::{
    address, commit, copy, multiply, pack, tiles, transposed, transposed_tiles, two, wait,
};
use super::super::{CUBES, key_head};
use super::{CHUNK, GATES, SLICE, Shape, Stage, WARPS, place};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::widen;
use crate::gpu::sequences::bounds;
use crate::ops::gated_delta_rule::StateLayout;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

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
    let stage = comptime!(Stage::of(shape));
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
            let shared = Shared::<[u32]>::new_aligned_slice(comptime!(stage.size / 2), 128usize);
            let base = address(&shared);
            let matrix = (sequence * value_heads + head) * comptime!(shape.key_dim * shape.value_dim);
            let mut s = Array::<f32>::new(comptime!(shape.key_dim / 2));
            #[unroll]
            for i in 0..comptime!(shape.key_dim / 2) {
                s[i] = state[matrix + element(i, place.column, shape)];
            }
            let chunks = (end - start).div_ceil(CHUNK);
            load(q, k, v, base, &place, 0usize, shape);
            load_made(transforms, pairs, gates, base, &place, 0usize, shape);
            for chunk in 0..chunks {
                if chunk + 1usize < chunks {
                    let to = base + ((chunk + 1usize) % 2usize * stage.size) as u32;
                    load(q, k, v, to, &place, chunk + 1usize, shape);
                    load_made(transforms, pairs, gates, to, &place, chunk + 1usize, shape);
                    wait(1usize);
                } else {
                    wait(0usize);
                }
                sync_cube();
                let from = base + (chunk % 2usize * stage.size) as u32;
                step(&mut s, y, from, &place, chunk, f32::reinterpret(scale), shape);
                sync_cube();
            }
            #[unroll]
            for i in 0..comptime!(shape.key_dim / 2) {
                state[matrix + element(i, place.column, shape)] = s[i];
            }
        }
    }
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

/// Starts loading a chunk's keys, queries and values.
#[cube]
fn load(
    q: &[Vector<u32, Const<4>>],
    k: &[Vector<u32, Const<4>>],
    v: &[Vector<u32, Const<4>>],
    to: u32,
    at: &Place,
    chunk: usize,
    #[comptime] shape: Shape,
) {
    let stage = comptime!(Stage::of(shape));
    let units = comptime!(32 * WARPS);
    let vectors = comptime!(shape.vectors());
    let first = at.start + chunk * CHUNK;
    let unit = UNIT_POS_X as usize;
    for i in 0..comptime!(CHUNK * shape.vectors() / units) {
        let (row, column) = ((i * units + unit) / vectors, (i * units + unit) % vectors);
        let there = first + row < at.end;
        let token = min(first + row, at.end - 1usize);
        let from = (token * at.key_heads + at.key_head) * vectors + column;
        let to = to + place(row, column, vectors);
        copy(to, k, from, there);
        copy(to + comptime!(stage.queries as u32), q, from, there);
    }
    let vectors = comptime!(SLICE / 8);
    for i in 0..comptime!(CHUNK * SLICE / 8 / units) {
        let (row, column) = ((i * units + unit) / vectors, (i * units + unit) % vectors);
        let there = first + row < at.end;
        let token = min(first + row, at.end - 1usize);
        let from =
            ((token * at.value_heads + at.head) * comptime!(shape.value_dim) + at.column) / 8usize + column;
        copy(to + comptime!(stage.values as u32) + place(row, column, vectors), v, from, there);
    }
}

/// Starts loading what was prepared of a chunk, and ends the group.
#[cube]
fn load_made(
    transforms: &[Vector<u32, Const<4>>],
    pairs: &[Vector<u32, Const<4>>],
    gates: &[Vector<u32, Const<4>>],
    to: u32,
    at: &Place,
    chunk: usize,
    #[comptime] shape: Shape,
) {
    let stage = comptime!(Stage::of(shape));
    let units = comptime!(32 * WARPS);
    let unit = UNIT_POS_X as usize;
    let index = (at.slot + chunk) * at.value_heads + at.head;
    for i in 0..comptime!(CHUNK * CHUNK / 8 / units) {
        let vector = i * units + unit;
        let from = index * comptime!(CHUNK * CHUNK / 8) + vector;
        let to = to + place(vector / 8usize, vector % 8usize, 8usize);
        copy(to + comptime!(stage.transform as u32), transforms, from, true);
        copy(to + comptime!(stage.pairs as u32), pairs, from, true);
    }
    if unit < comptime!(GATES / 4) {
        let to = to + comptime!(stage.gates as u32) + (unit * 16usize) as u32;
        copy(to, gates, index * comptime!(GATES / 4) + unit, true);
    }
    commit();
}

/// The chunk whose operands are at `from`.
#[cube]
fn step(
    s: &mut Array<f32>,
    y: &mut [u32],
    from: u32,
    at: &Place,
    chunk: usize,
    scale: f32,
    #[comptime] shape: Shape,
) {
    let stage = comptime!(Stage::of(shape));
    let dtype = comptime!(shape.dtype);
    // Of the tokens, eight by eight: what the state predicts, and what it answers.
    let mut error = Array::<f32>::new(32usize);
    let mut answer = Array::<f32>::new(32usize);
    read_state(&*s, from, &mut error, &mut answer, shape);
    let before = from + comptime!(stage.gates as u32);
    let after = before + comptime!((CHUNK * 4) as u32);
    subtract(&mut error, &mut answer, from + comptime!(stage.values as u32), before, shape);

    let mut left = Array::<u32>::new(16usize);
    round(&error, &mut left, shape);
    let mut delta = Array::<f32>::new(32usize);
    #[unroll]
    for i in 0..32usize {
        delta[i] = 0.0;
    }
    multiply_triangle(&left, from + comptime!(stage.transform as u32), &mut delta, shape);
    round(&delta, &mut left, shape);
    multiply_triangle(&left, from + comptime!(stage.pairs as u32), &mut answer, shape);
    store(&answer, y, at, chunk, scale, shape);

    #[unroll]
    for eight in 0..8usize {
        let gate = two(after + comptime!((eight * 32) as u32) + UNIT_POS_X % 4u32 * 8u32);
        #[unroll]
        for i in 0..4usize {
            delta[comptime!(eight * 4 + i)] *= gate.extract(comptime!(i % 2));
        }
    }
    round(&delta, &mut left, shape);
    let decay = two(before + comptime!((CHUNK * 4 - 8) as u32)).extract(1usize);
    #[unroll]
    for i in 0..comptime!(shape.key_dim / 2) {
        s[i] *= decay;
    }
    let (row, half) = (UNIT_POS_X as usize % 16usize, UNIT_POS_X as usize / 16usize % 2usize);
    #[unroll]
    for depth in 0..4usize {
        #[unroll]
        for block in 0..comptime!(shape.key_dim / 16) {
            let column = comptime!(2 * block) + half;
            let keys = transposed_tiles(
                from + place(comptime!(depth * 16) + row, column, comptime!(shape.vectors())),
            );
            #[unroll]
            for side in 0..2usize {
                let (b0, b1) = (keys.extract(comptime!(2 * side)), keys.extract(comptime!(2 * side + 1)));
                multiply(&left, comptime!(depth * 4), b0, b1, s, comptime!(block * 8 + side * 4), dtype);
            }
        }
    }
}

/// `S^T k` and `S^T q` of all tokens.
#[cube]
fn read_state(
    s: &Array<f32>,
    from: u32,
    of_keys: &mut Array<f32>,
    of_queries: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let stage = comptime!(Stage::of(shape));
    let (row, half) = (UNIT_POS_X as usize % 16usize, UNIT_POS_X as usize / 16usize % 2usize);
    #[unroll]
    for i in 0..32usize {
        of_keys[i] = 0.0;
        of_queries[i] = 0.0;
    }
    #[unroll]
    for depth in 0..comptime!(shape.key_dim / 16) {
        let mut left = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            let (low, high) = (s[comptime!(depth * 8 + i * 2)], s[comptime!(depth * 8 + i * 2 + 1)]);
            left[i] = pack(low, high, shape.dtype);
        }
        #[unroll]
        for block in 0..4usize {
            let place =
                place(comptime!(block * 16) + row, comptime!(2 * depth) + half, comptime!(shape.vectors()));
            let keys = tiles(from + place);
            let queries = tiles(from + comptime!(stage.queries as u32) + place);
            #[unroll]
            for side in 0..2usize {
                let at = comptime!(block * 8 + side * 4);
                let (b0, b1) = (keys.extract(side), keys.extract(comptime!(side + 2)));
                multiply(&left, 0usize, b0, b1, of_keys, at, shape.dtype);
                let (b0, b1) = (queries.extract(side), queries.extract(comptime!(side + 2)));
                multiply(&left, 0usize, b0, b1, of_queries, at, shape.dtype);
            }
        }
    }
}

/// `v - g S^T k` and `g S^T q`, of `S^T k` and `S^T q`.
#[cube]
fn subtract(
    error: &mut Array<f32>,
    answer: &mut Array<f32>,
    values: u32,
    before: u32,
    #[comptime] shape: Shape,
) {
    let warp = UNIT_POS_X as usize / 32usize;
    let (row, half) = (UNIT_POS_X as usize % 16usize, UNIT_POS_X as usize / 16usize % 2usize);
    #[unroll]
    for block in 0..4usize {
        let place = place(comptime!(block * 16) + row, warp * 2usize + half, comptime!(SLICE / 8));
        let v = transposed_tiles(values + place);
        #[unroll]
        for side in 0..2usize {
            let eight = comptime!(block * 2 + side);
            let gate = two(before + comptime!((eight * 32) as u32) + UNIT_POS_X % 4u32 * 8u32);
            #[unroll]
            for i in 0..4usize {
                let at = comptime!(eight * 4 + i);
                let word = v.extract(comptime!(side + i / 2 * 2));
                let bits = if comptime!(i % 2 == 0) { word & 0xffffu32 } else { word >> 16u32 };
                let g = gate.extract(comptime!(i % 2));
                error[at] = widen(bits, shape.dtype) - g * error[at];
                answer[at] *= g;
            }
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
    let (row, half) = (UNIT_POS_X as usize % 16usize, UNIT_POS_X as usize / 16usize % 2usize);
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

/// Writes the answers of tokens that there are.
#[cube]
fn store(answer: &Array<f32>, y: &mut [u32], at: &Place, chunk: usize, scale: f32, #[comptime] shape: Shape) {
    let (warp, lane) = (UNIT_POS_X as usize / 32usize, UNIT_POS_X as usize % 32usize);
    #[unroll]
    for eight in 0..8usize {
        let token = at.start + chunk * CHUNK + comptime!(eight * 8) + lane / 4usize;
        let row = (token * at.value_heads + at.head) * comptime!(shape.value_dim / 2);
        let to = row + at.column / 2usize + warp * 8usize + lane % 4usize;
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

pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(32 * WARPS as u32);
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
