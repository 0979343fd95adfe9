//! The shared memory of a cube's units: x, and the scales of a chunk's runs of the cube's rows.

use super::super::staging::{Chunk, Staged};
use super::config::{MmaVec, RUNS, of_kind};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Room for a chunk of x.
#[cube]
pub(in super::super) fn staged(#[comptime] config: MmaVec) -> Staged {
    let values = Shared::new_aligned_slice(comptime!(config.x_vectors()), 16usize);
    let sums = Shared::new_slice(comptime!(usize::max(1, config.x_sums() * config.chunk)));
    Staged { values, sums }
}

/// The scales and biases of rows of the weight, as they are stored.
#[derive(CubeType)]
pub(in super::super) struct Elements<S: Int, B: Int> {
    pub scales: Shared<[S]>,
    pub biases: Shared<[B]>,
}

/// Room for that of so many rows, to be loaded and copied several at once.
#[cube]
pub(in super::super) fn elements<S: Int, B: Int>(
    #[comptime] rows: usize,
    #[comptime] alignment: usize,
    #[comptime] config: MmaVec,
) -> Elements<S, B> {
    let (scale_row, bias_row) = comptime!(config.element_rows());
    let scales = Shared::new_aligned_slice(comptime!(rows * scale_row), alignment);
    let biases = Shared::new_aligned_slice(comptime!(rows * bias_row), alignment);
    Elements::<S, B> { scales, biases }
}

/// Loads a unit's part of what scales a chunk of the cube's rows, the first of which is `row` of
/// the weight.
#[cube]
pub(in super::super) fn load_elements<E: Int>(
    elements: &[E],
    row: usize,
    rows: usize,
    chunk: &Chunk,
    #[comptime] biases: bool,
    #[comptime] config: MmaVec,
) -> Array<u32> {
    let a_chunk = comptime!(of_kind(config.layout.elements(RUNS * config.chunk), biases));
    // A superblock's runs: a row has a whole number of them where they share anything.
    let a_block = comptime!(of_kind(config.layout.elements(8), biases));
    let a_row = chunk.runs * a_block / 8;
    let skipped = chunk.first * a_block / 8;
    let mut loaded = Array::<u32>::new(comptime!(usize::max(1, config.elements_per_unit(biases))));
    #[unroll]
    for i in 0..comptime!(config.elements_per_unit(biases)) {
        let at = UNIT_POS_X as usize + comptime!(i * 32 * config.planes);
        let (r, element) = (at / a_chunk, skipped + at % a_chunk);
        // Past the last run, too, what x's zeros are multiplied with must be finite.
        loaded[i] = 0u32;
        if r < min(rows, comptime!(16 * config.n_tiles)) && element < a_row {
            loaded[i] = u32::cast_from(elements[(row + r) * a_row + element]);
        }
    }
    loaded
}

/// Puts them where units share them.
#[cube]
pub(in super::super) fn keep_elements<E: Int>(
    loaded: &Array<u32>,
    to: &mut Shared<[E]>,
    #[comptime] biases: bool,
    #[comptime] config: MmaVec,
) {
    let a_chunk = comptime!(of_kind(config.layout.elements(RUNS * config.chunk), biases));
    #[unroll]
    for i in 0..comptime!(config.elements_per_unit(biases)) {
        let at = UNIT_POS_X as usize + comptime!(i * 32 * config.planes);
        if at < comptime!(16 * config.n_tiles * of_kind(config.layout.elements(RUNS * config.chunk), biases))
        {
            to[at / a_chunk * comptime!(of_kind(config.element_rows(), biases)) + at % a_chunk] =
                E::cast_from(loaded[i]);
        }
    }
}
