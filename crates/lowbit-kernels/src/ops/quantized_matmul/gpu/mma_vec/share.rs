//! What the units of a cube share: a chunk of x, and what scales the same runs of the cube's rows.

use super::shape::{RUNS, SPAN, Shape, pick};
use crate::gpu::float::widen;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// A chunk's first span, and the runs of a row.
#[derive(CubeType)]
pub(super) struct Chunk {
    pub first: usize,
    pub runs: usize,
}

/// Brings a chunk of x to where the cube's units share it, in the order that products take it, with zeros up to whole
/// steps, and the sums of its groups.
#[cube]
pub(super) fn stage(
    x: &[Vector<u32, Const<4>>],
    row: usize,
    chunk: &Chunk,
    count: usize,
    xs: &mut Shared<[Vector<u32, Const<4>>]>,
    x_sums: &mut Shared<[f32]>,
    #[comptime] shape: Shape,
) {
    let (units, runs) = comptime!((32 * shape.planes, RUNS * shape.chunk));
    // Two runs' loads are under way at a time.
    let batch = comptime!(usize::min(2, (shape.columns * runs).div_ceil(units)));
    let mut first = UNIT_POS_X as usize;
    while first < comptime!(shape.columns * runs) {
        let mut words = Array::<u32>::new(comptime!(16 * batch));
        #[unroll]
        for i in 0..batch {
            let at = first + i * units;
            let run = chunk.first * RUNS + at % runs;
            #[unroll]
            for j in 0..16usize {
                words[16 * i + j] = 0u32;
            }
            if at / runs < count && run < chunk.runs {
                #[unroll]
                for v in 0..4usize {
                    let vector = x[(row + at / runs * chunk.runs + run) * 4 + v];
                    #[unroll]
                    for j in 0..4usize {
                        words[16 * i + v * 4 + j] = vector.extract(j);
                    }
                }
            }
        }
        #[unroll]
        for i in 0..batch {
            let at = first + i * units;
            // All of a plane's units or none.
            if at < comptime!(shape.columns * runs) {
                keep(&words, i, at, xs, x_sums, shape);
            }
        }
        first += comptime!(batch * units);
    }
}

/// Puts a run of x, its words the `i`-th 16, in place `at` of what units share. A plane's units have runs in order.
#[cube]
fn keep(
    words: &Array<u32>,
    #[comptime] i: usize,
    at: usize,
    xs: &mut Shared<[Vector<u32, Const<4>>]>,
    x_sums: &mut Shared<[f32]>,
    #[comptime] shape: Shape,
) {
    let chunk = comptime!(shape.chunk);
    let (column, span, run) = (at / comptime!(RUNS * chunk), at / RUNS % chunk, at % RUNS);
    #[unroll]
    for v in 0..4usize {
        let mut vector = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for j in 0..4usize {
            vector.insert(j, x_pair(words, i, comptime!(4 * v + j), shape));
        }
        xs[column * comptime!(shape.x_row()) + (run * 4 + v) * chunk + span] = vector;
    }
    if comptime!(shape.sums()) {
        let groups = comptime!(usize::max(1, shape.groups() / RUNS));
        #[unroll]
        for group in 0..groups {
            let mut sum = 0.0f32;
            #[unroll]
            for j in 0..comptime!(16 / groups) {
                let word = words[comptime!(16 * i + 16 / groups * group + j)];
                sum += widen(word & 0xffffu32, shape.dtype) + widen(word >> 16u32, shape.dtype);
            }
            if comptime!(shape.group() == SPAN) {
                sum += plane_shuffle_xor(sum, 1u32);
                x_sums[at / RUNS] = sum;
            } else {
                x_sums[at * groups + group] = sum;
            }
        }
    }
}

/// Pair `q` of values of a run of x, its words the `i`-th 16.
#[cube]
fn x_pair(words: &Array<u32>, #[comptime] i: usize, #[comptime] q: usize, #[comptime] shape: Shape) -> u32 {
    let low = words[comptime!(16 * i + shape.pair(q).0 / 2)];
    let high = words[comptime!(16 * i + shape.pair(q).1 / 2)];
    if comptime!(shape.pair(q).0.is_multiple_of(2)) {
        (low & 0xffffu32) | (high << 16u32)
    } else {
        (low >> 16u32) | (high & 0xffff_0000u32)
    }
}

/// Loads a unit's part of what scales a chunk of the cube's rows, the first of which is `row` of the weight.
#[cube]
pub(super) fn load_elements<E: Int>(
    elements: &[E],
    row: usize,
    rows: usize,
    chunk: &Chunk,
    #[comptime] biases: bool,
    #[comptime] shape: Shape,
) -> Array<u32> {
    let a_chunk = comptime!(pick(shape.elements(RUNS * shape.chunk), biases));
    // A superblock's runs: a row has a whole number of them where they share anything.
    let a_block = comptime!(pick(shape.elements(8), biases));
    let a_row = chunk.runs * a_block / 8;
    let skipped = chunk.first * RUNS * a_block / 8;
    let mut loaded = Array::<u32>::new(comptime!(usize::max(1, shape.elements_a_unit(biases))));
    #[unroll]
    for i in 0..comptime!(shape.elements_a_unit(biases)) {
        let at = UNIT_POS_X as usize + comptime!(i * 32 * shape.planes);
        let (r, element) = (at / a_chunk, skipped + at % a_chunk);
        // Past the last run, too, what x's zeros are multiplied with must be finite.
        loaded[i] = 0u32;
        if r < min(rows, comptime!(16 * shape.tiles)) && element < a_row {
            loaded[i] = u32::cast_from(elements[(row + r) * a_row + element]);
        }
    }
    loaded
}

/// Puts them where units share them.
#[cube]
pub(super) fn keep_elements<E: Int>(
    loaded: &Array<u32>,
    to: &mut Shared<[E]>,
    #[comptime] biases: bool,
    #[comptime] shape: Shape,
) {
    let a_chunk = comptime!(pick(shape.elements(RUNS * shape.chunk), biases));
    #[unroll]
    for i in 0..comptime!(shape.elements_a_unit(biases)) {
        let at = UNIT_POS_X as usize + comptime!(i * 32 * shape.planes);
        if at < comptime!(16 * shape.tiles * pick(shape.elements(RUNS * shape.chunk), biases)) {
            to[at / a_chunk * comptime!(pick(shape.element_rows(), biases)) + at % a_chunk] =
                E::cast_from(loaded[i]);
        }
    }
}
