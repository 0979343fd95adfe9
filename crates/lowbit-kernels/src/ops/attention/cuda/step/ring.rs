//! Brings tiles of keys and values to shared memory: every plane has a ring of its own, which it
//! alone fills and reads.

use super::config::StepConfig;
use crate::gpu::cuda::ptx::{copy_from, end_copy_group, pointer, wait_copy_groups};
use crate::ops::attention::gpu::operands::Inputs;
use crate::ops::cache_rows::CacheType;
use crate::ops::pages::gpu::PoolSizes;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// A plane's ring, and the tiles that go through it.
#[derive(CubeType)]
pub(super) struct Ring {
    /// Its address in shared memory.
    pub at: u32,
    /// The row of the head's first key where keys are contiguous.
    pub base: u32,
    /// The end of the cube's keys.
    pub end: u32,
    /// For keys in pages.
    pub pool: PoolSizes,
}

#[cube]
impl Ring {
    /// The row of k and v that holds key `first`, with which a tile begins: tiles lie within pages.
    pub fn row(&self, table: &[u32], first: u32, #[comptime] config: StepConfig) -> u32 {
        if comptime!(config.paged) {
            // Tiles past the end are not copied.
            let key = min(first, self.end - 1u32);
            let page = min(self.pool.page(table, CUBE_POS_Y, key), self.pool.pages - 1u32);
            self.pool.row(page, CUBE_POS_X, key)
        } else {
            self.base + first
        }
    }

    /// Begins to copy the plane's first tiles of the keys from `begin` on, one for each stage.
    pub fn fill(
        &self,
        inputs: &Inputs<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
        table: &[u32],
        begin: u32,
        #[comptime] config: StepConfig,
    ) {
        let to_v = comptime!((16 * config.keys * config.stride()) as u32);
        let mut first = begin + UNIT_POS_X / 32u32 * comptime!(config.keys as u32);
        #[unroll]
        for stage in 0..comptime!(config.stages) {
            let to = comptime!((stage * config.stage()) as u32).runtime();
            let row = self.row(table, first, config);
            self.copy(&inputs.k, (first, row), to, comptime!(config.width), config);
            self.copy(&inputs.v, (first, row), to + to_v, comptime!(config.value_width), config);
            first += comptime!((config.planes * config.keys) as u32);
        }
    }

    /// Begins to copy the tile from key `first` on, which is in row `start`, to byte `to` of the
    /// ring, if there is one. It is a group of copies in any case. For keys past the end it copies
    /// the last one.
    pub fn copy(
        &self,
        x: &[Vector<u32, Const<4>>],
        tile: (u32, u32),
        to: u32,
        #[comptime] width: usize,
        #[comptime] config: StepConfig,
    ) {
        if comptime!(config.int8) {
            self.copy_codes(x, tile, to, comptime!(CacheType::Int8.row(width) / 16), config);
        } else {
            self.copy_floats(x, tile, to, width, config);
        }
        end_copy_group();
    }

    /// The same of rows of codes and scales, `vectors` each, which lie side by side in the ring,
    /// too.
    fn copy_codes(
        &self,
        x: &[Vector<u32, Const<4>>],
        tile: (u32, u32),
        to: u32,
        #[comptime] vectors: usize,
        #[comptime] config: StepConfig,
    ) {
        let lane = UNIT_POS_X % 32u32;
        let (first, start) = tile;
        let vectors = comptime!(vectors as u32);
        let passes = comptime!(config.keys * vectors as usize / 32);
        if first < self.end {
            let to = self.at + to + lane * 16u32;
            if first + comptime!(config.keys as u32) <= self.end {
                let from = pointer(x, start * vectors + lane, 4usize);
                #[unroll]
                for i in 0..passes {
                    copy_from(from, comptime!(32 * i), to, comptime!(512 * i));
                }
            } else {
                #[unroll]
                for i in 0..passes {
                    let vector = lane + comptime!(32 * i as u32);
                    let row = start + min(vector / vectors, self.end - 1u32 - first);
                    let from = pointer(x, row * vectors + vector % vectors, 4usize);
                    copy_from(from, 0usize, to, comptime!(512 * i));
                }
            }
        }
    }

    fn copy_floats(
        &self,
        x: &[Vector<u32, Const<4>>],
        tile: (u32, u32),
        to: u32,
        #[comptime] width: usize,
        #[comptime] config: StepConfig,
    ) {
        let vectors = comptime!(width / 8);
        // Vectors of a row that a unit copies, and rows that the plane's units copy at once.
        let (each, pass) = comptime!((vectors.div_ceil(32), 32 / vectors.min(32)));
        let across = comptime!(vectors.min(32) as u32);
        let stride = comptime!(16 * (vectors + 1));
        let lane = UNIT_POS_X % 32u32;
        let (row, column) = (lane / across, lane % across);
        let (first, start) = tile;
        if first < self.end {
            let to = self.at + to + row * comptime!(stride as u32) + column * 16u32;
            if first + comptime!(config.keys as u32) <= self.end {
                let from = pointer(x, (start + row) * comptime!(vectors as u32) + column, 4usize);
                #[unroll]
                for i in 0..comptime!(config.keys / pass * each) {
                    let (n, part) = comptime!((i / each, i % each));
                    let at = comptime!(n * pass * stride + 512 * part);
                    copy_from(from, comptime!(n * pass * vectors + 32 * part), to, at);
                }
            } else {
                #[unroll]
                for i in 0..comptime!(config.keys / pass * each) {
                    let (n, part) = comptime!((i / each, i % each));
                    let row = start + min(row + comptime!((n * pass) as u32), self.end - 1u32 - first);
                    let from = pointer(x, row * comptime!(vectors as u32) + column, 4usize);
                    let at = comptime!(n * pass * stride + 512 * part);
                    copy_from(from, comptime!(32 * part), to, at);
                }
            }
        }
    }

    /// Waits for the oldest tile under way: there are two groups of copies for each stage.
    pub fn wait(&self, #[comptime] config: StepConfig) {
        wait_copy_groups(comptime!(2 * config.stages - 1));
        sync_plane();
    }
}

/// The stage behind the one at byte `stage` of a ring.
#[cube]
pub(super) fn next(stage: u32, #[comptime] config: StepConfig) -> u32 {
    let next = stage + comptime!(config.stage() as u32);
    select(next == comptime!(config.ring() as u32), 0u32, next)
}
