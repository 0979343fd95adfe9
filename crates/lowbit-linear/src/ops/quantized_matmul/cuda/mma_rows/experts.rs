//! Rows of x that choose their batch of the weight, several to most batches: experts of many
//! tokens. Each cube has a batch, and looks through all ids for the rows that chose it: that takes
//! a trip to the cache, where sorting them first would take a launch, and its first step of the
//! weight is on its way before the ids are there.

use super::super::super::gpu::cube_rows::CubeRows;
use super::super::staging::{Rows, listed};
use super::config::MmaRows;
use crate::gpu::cuda::ptx::address;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The most ids that cubes look through: what they keep of each has 16 bits.
pub(super) const MOST_IDS: usize = 4096;
/// Ids that a unit loads at once, at the most.
const TOGETHER: usize = 16;

/// This cube's batch, whose rows are still to be found. The cube past the last of `experts` batches
/// takes what chose none of them.
#[cube]
pub(super) fn batch_of_cube(experts: u32) -> CubeRows {
    let batch = CUBE_POS_Y as usize;
    let known = batch < experts as usize;
    let initial = select(known, 0.0f32, f32::reinterpret(0x7fc0_0000u32));
    CubeRows { t0: 0usize.runtime(), count: 0usize.runtime(), x_row: 0usize.runtime(), batch, known, initial }
}

/// Finds the rows of y that chose this cube's batch, in any order, and says how many there are.
#[cube]
pub(super) fn find_rows(
    ids: &[u32],
    len: u32,
    experts: u32,
    found: &mut Shared<[u16]>,
    #[comptime] config: MmaRows,
) -> usize {
    let units = comptime!(config.units());
    let together = comptime!(config.ids.div_ceil(config.units()).min(TOGETHER));
    let count = Shared::<[Atomic<u32>]>::new_slice(1usize);
    if UNIT_POS_X == 0 {
        count[0].store(0u32);
    }
    sync_cube();
    let mut first = UNIT_POS_X;
    while first < len {
        let mut batches = Array::<u32>::new(together);
        #[unroll]
        for i in 0..together {
            batches[i] = ids[min(first + comptime!((i * units) as u32), len - 1u32) as usize];
        }
        #[unroll]
        for i in 0..together {
            let at = first + comptime!((i * units) as u32);
            if at < len && min(batches[i], experts) == CUBE_POS_Y {
                found[count[0].fetch_add(1u32) as usize] = u16::cast_from(at);
            }
        }
        first += comptime!((together * units) as u32);
    }
    sync_cube();
    count[0].load() as usize
}

/// The rows from the `first`-th of `all` that were found on, as many as a cube takes. `share` rows
/// of y have the same row of x.
#[cube]
pub(super) fn next_rows(
    found: &Shared<[u16]>,
    first: usize,
    all: usize,
    share: u32,
    list: &mut Shared<[u32]>,
    #[comptime] config: MmaRows,
) -> Rows {
    let count = min(all - first, config.m_tile);
    let unit = UNIT_POS_X as usize;
    if unit < count {
        let row = u32::cast_from(found[first + unit]);
        list[unit] = listed(row, row / share);
    }
    sync_cube();
    Rows { count, run: 0usize.runtime(), y: 0usize.runtime(), list: address(&*list) }
}
