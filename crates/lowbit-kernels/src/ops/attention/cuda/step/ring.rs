//! Brings tiles of keys and values to shared memory: every plane has a ring of its own, which it
//! alone fills and reads.

use super::config::StepConfig;
use crate::gpu::cuda::ptx::{copy_from, end_copy_group, pointer, wait_copy_groups};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// A plane's ring, and the tiles that go through it.
#[derive(CubeType)]
pub(super) struct Ring {
    /// Its address in shared memory.
    pub at: u32,
    /// The row of the head's first key.
    pub base: u32,
    /// The end of the cube's keys.
    pub end: u32,
}

#[cube]
impl Ring {
    /// Begins to copy the tile from key `first` on, if there is one, to byte `to` of the ring. It
    /// is a group of copies in any case. For keys past the end it copies the last one.
    pub fn copy(
        &self,
        x: &[Vector<u32, Const<4>>],
        first: u32,
        to: u32,
        #[comptime] width: usize,
        #[comptime] config: StepConfig,
    ) {
        let vectors = comptime!(width / 8);
        // Rows that the plane's units copy at once, a vector each.
        let pass = comptime!(32 / vectors);
        let stride = comptime!(16 * (vectors + 1));
        let lane = UNIT_POS_X % 32u32;
        let (row, column) = (lane / comptime!(vectors as u32), lane % comptime!(vectors as u32));
        if first < self.end {
            let to = self.at + to + row * comptime!(stride as u32) + column * 16u32;
            let row = first + row;
            if first + comptime!(config.keys as u32) <= self.end {
                let from = pointer(x, (self.base + row) * comptime!(vectors as u32) + column, 4usize);
                #[unroll]
                for n in 0..comptime!(config.keys / pass) {
                    copy_from(from, comptime!(n * pass * vectors), to, comptime!(n * pass * stride));
                }
            } else {
                #[unroll]
                for n in 0..comptime!(config.keys / pass) {
                    let key = self.base + min(row + comptime!((n * pass) as u32), self.end - 1u32);
                    let from = pointer(x, key * comptime!(vectors as u32) + column, 4usize);
                    copy_from(from, 0usize, to, comptime!(n * pass * stride));
                }
            }
        }
        end_copy_group();
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
