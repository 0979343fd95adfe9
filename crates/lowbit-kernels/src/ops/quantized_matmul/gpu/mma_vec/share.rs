//! What scales a chunk's runs of the cube's rows, which its units share.

use super::super::share::Chunk;
use super::shape::{RUNS, Shape, pick};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

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
    let a_chunk = comptime!(pick(shape.layout.elements(RUNS * shape.chunk), biases));
    // A superblock's runs: a row has a whole number of them where they share anything.
    let a_block = comptime!(pick(shape.layout.elements(8), biases));
    let a_row = chunk.runs * a_block / 8;
    let skipped = chunk.first * a_block / 8;
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
    let a_chunk = comptime!(pick(shape.layout.elements(RUNS * shape.chunk), biases));
    #[unroll]
    for i in 0..comptime!(shape.elements_a_unit(biases)) {
        let at = UNIT_POS_X as usize + comptime!(i * 32 * shape.planes);
        if at < comptime!(16 * shape.tiles * pick(shape.layout.elements(RUNS * shape.chunk), biases)) {
            to[at / a_chunk * comptime!(pick(shape.element_rows(), biases)) + at % a_chunk] =
                E::cast_from(loaded[i]);
        }
    }
}
