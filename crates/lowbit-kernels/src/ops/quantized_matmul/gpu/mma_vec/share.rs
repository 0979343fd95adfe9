//! What a cube's units share: x, and what scales a chunk's runs of the cube's rows.

use super::super::share::{Chunk, Staged};
use super::shape::{RUNS, Shape, pick};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Room for a chunk of x.
#[cube]
pub(super) fn staged(#[comptime] shape: Shape) -> Staged {
    let values = Shared::new_aligned_slice(comptime!(shape.x_vectors()), 16usize);
    let sums = Shared::new_slice(comptime!(usize::max(1, shape.x_sums() * shape.chunk)));
    Staged { values, sums }
}

/// What scales rows of the weight, as it is stored.
#[derive(CubeType)]
pub(super) struct Elements<S: Int, B: Int> {
    pub scales: Shared<[S]>,
    pub biases: Shared<[B]>,
}

/// Room for that of so many rows, to be loaded and copied several at once.
#[cube]
pub(super) fn elements<S: Int, B: Int>(
    #[comptime] rows: usize,
    #[comptime] alignment: usize,
    #[comptime] shape: Shape,
) -> Elements<S, B> {
    let (scale_row, bias_row) = comptime!(shape.element_rows());
    let scales = Shared::new_aligned_slice(comptime!(rows * scale_row), alignment);
    let biases = Shared::new_aligned_slice(comptime!(rows * bias_row), alignment);
    Elements::<S, B> { scales, biases }
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
