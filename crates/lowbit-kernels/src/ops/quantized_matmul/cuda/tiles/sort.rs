//! Many pairs of a token and an expert: brought together by expert on the device, so that a tile of rows reads its
//! expert's weight once.

#![allow(unsafe_code)] // Launches.

use super::super::super::input::CHECK;
use super::{EMPTY, WRONG};
use crate::gpu::compile::Target;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::{Gpu, Memory};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Units of the one cube: at least one for each expert and one for the ids that are none.
const UNITS: usize = 1024;
const PLANE: u32 = 32;
/// Ids that a unit loads at once.
const TOGETHER: usize = 4;
/// Experts that can be sorted by.
pub(super) const MOST_EXPERTS: usize = UNITS - 1;

/// Writes the list that [`Tiles`](super::Tiles) want: the expert of each tile of `rows` rows, then the pairs of each.
#[kernel]
fn gather_qmm_sort(
    ids: &[u32],
    list: &mut [u32],
    pairs: u32,
    experts: u32,
    tiles: u32,
    #[comptime] rows: u32,
) {
    let unit = UNIT_POS_X;
    let counts = Shared::<[Atomic<u32>]>::new_slice(UNITS);
    let mut starts = Shared::<[u32]>::new_slice(UNITS);
    let mut of_planes = Shared::<[u32]>::new_slice(comptime!(PLANE as usize));
    counts[unit as usize].store(0u32);
    sync_cube();
    let mut pair = unit;
    while pair < pairs {
        let chosen = load(ids, pair, pairs);
        #[unroll]
        for i in 0..TOGETHER {
            if pair + comptime!((i * UNITS) as u32) < pairs {
                counts[min(chosen[i], experts) as usize].fetch_add(1u32);
            }
        }
        pair += comptime!((TOGETHER * UNITS) as u32);
    }
    sync_cube();

    // Each unit has an expert. The tiles of those before it:
    let count = counts[unit as usize].load();
    let own = (count + comptime!(rows - 1)) / rows;
    let before = plane_exclusive_sum(own);
    let plane = unit / PLANE;
    if unit % PLANE == comptime!(PLANE - 1) {
        of_planes[plane as usize] = before + own;
    }
    sync_cube();
    let sums = of_planes[(unit % PLANE) as usize];
    let planes_before = plane_sum(select(unit % PLANE < plane, sums, 0u32));
    let all = plane_sum(sums);
    let first = planes_before + before;
    starts[unit as usize] = tiles + first * rows;
    // From here on, the next place among the expert's rows.
    counts[unit as usize].store(0u32);
    let mut i = 0u32;
    while i < own {
        list[(first + i) as usize] = select(unit < experts, unit, WRONG);
        i += 1u32;
    }
    i = count;
    while i < own * rows {
        list[(tiles + first * rows + i) as usize] = u32::MAX;
        i += 1u32;
    }
    i = all + unit;
    while i < tiles {
        list[i as usize] = EMPTY;
        i += comptime!(UNITS as u32);
    }
    sync_cube();
    pair = unit;
    while pair < pairs {
        let chosen = load(ids, pair, pairs);
        #[unroll]
        for i in 0..TOGETHER {
            let at = pair + comptime!((i * UNITS) as u32);
            if at < pairs {
                let expert = min(chosen[i], experts) as usize;
                let place = starts[expert] + counts[expert].fetch_add(1u32);
                list[place as usize] = at;
            }
        }
        pair += comptime!((TOGETHER * UNITS) as u32);
    }
}

/// The ids of pair `pair` and of those that follow [`UNITS`] apart.
#[cube]
fn load(ids: &[u32], pair: u32, pairs: u32) -> Array<u32> {
    let mut chosen = Array::<u32>::new(TOGETHER);
    #[unroll]
    for i in 0..TOGETHER {
        chosen[i] = ids[min(pair + comptime!((i * UNITS) as u32), pairs - 1u32) as usize];
    }
    chosen
}

fn compiled(target: &Target, m_tile: usize) -> Kernel<GatherQmmSort<'static>> {
    GatherQmmSort::kernel(target, UNITS, m_tile as u32)
}

#[cfg(test)]
pub(super) fn kernels(target: &Target) -> [Box<dyn CubeKernel>; 1] {
    [compiled(target, 32).code()]
}

/// Pairs of a token and an expert, sorted.
pub(super) struct Sorted {
    /// See [`Tiles`](super::Tiles).
    pub list: Memory,
    pub tiles: usize,
}

/// Sorts the pairs of `ids` by expert, into tiles of `m_tile` rows.
pub(super) fn sort(gpu: &Gpu, ids: &Tensor, experts: usize, m_tile: usize) -> Result<Sorted, KernelError> {
    let pairs = ids.len();
    // Each expert that has rows, and the wrong ids, may leave a tile part empty.
    let tiles = pairs / m_tile + pairs.min(experts + 1);
    let list = gpu.allocate(tiles * (1 + m_tile) * size_of::<u32>())?;
    let index = |value: usize| CHECK.index(value);
    let arguments = GatherQmmSort {
        ids: ids.buffer()?,
        list: (&list).into(),
        pairs: index(pairs)?,
        experts: index(experts)?,
        tiles: index(tiles)?,
    };
    // SAFETY: the list holds as many tiles and rows as experts can have.
    unsafe { gpu.launch(compiled(gpu.target(), m_tile), [1, 1, 1], arguments)? };
    Ok(Sorted { list, tiles })
}
