//! Many pairs of a token and an expert: brought together by expert on the device, so that a tile of
//! rows reads its expert's weight once.

#![allow(unsafe_code)] // Launches.

use super::super::input::CHECK;
use super::super::problem::{Operands, Problem, Routing};
use crate::gpu::caps::Caps;
use crate::gpu::compile::Target;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::{Gpu, Memory};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Units of the one cube: at least one for each expert and one for the ids that are none.
const UNITS: usize = 1024;
/// Ids that a unit loads at once.
const TOGETHER: usize = 4;
/// Experts that can be sorted by.
const MOST_EXPERTS: usize = UNITS - 1;

/// Instead of a tile's batch: there is no such batch, and its rows are NaN.
pub(crate) const WRONG: u32 = u32::MAX - 1;
/// Instead of a tile's batch: it has no rows.
const EMPTY: u32 = u32::MAX;

/// Rows of x in tiles.
#[derive(Clone, Copy)]
pub(crate) struct Tiles<'a> {
    /// All tiles.
    pub count: usize,
    /// Rows of x per batch of the weight; with a list, of y.
    pub m: usize,
    /// The batch of the weight of each tile (or [`WRONG`], or above), then the row of y of each row
    /// of each tile (or `u32::MAX`), `share` of which have the same row of x.
    pub list: Option<(&'a Memory, usize)>,
}

impl Tiles<'_> {
    /// Tiles of `m_tile` rows of a problem whose rows of x follow each other.
    pub fn of_rows(problem: &Problem, m_tile: usize) -> Self {
        Self { count: problem.batches * problem.m.div_ceil(m_tile), m: problem.m, list: None }
    }
}

/// The routing of a problem whose pairs the device can sort, where there are enough of them for
/// that to pay.
pub(crate) fn sortable(caps: &Caps, problem: &Problem) -> Option<Routing> {
    let takes = |routing: &Routing| routing.has_many_pairs() && routing.experts <= MOST_EXPERTS;
    problem.routing.filter(takes).filter(|_| caps.units >= UNITS)
}

/// Calls `multiply` for each product of routed experts, with its pairs sorted into tiles of
/// `m_tile` rows.
pub(crate) fn for_each_sorted(
    gpu: &Gpu,
    m_tile: usize,
    problem: &Problem,
    operands: &Operands<'_>,
    multiply: impl Fn(&Tiles<'_>, &Operands<'_>) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let Some(routing) = problem.routing else { return Ok(()) };
    operands.for_each_product(problem, |ids, operands| {
        let (list, count) = (sort(gpu, ids, routing, m_tile)?, routing.most_tiles(m_tile));
        multiply(&Tiles { count, m: routing.pairs, list: Some((&list, routing.share)) }, operands)
    })
}

/// Writes the list that [`Tiles`] want: the expert of each tile of `rows` rows, then the pairs of
/// each.
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
    let (first, all) = sums_before(own, &mut starts);
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

/// The sum of the units' numbers before this one's, and of all. Planes may be of any size.
#[cube]
fn sums_before(own: u32, sums: &mut Shared<[u32]>) -> (u32, u32) {
    let unit = UNIT_POS_X as usize;
    sums[unit] = own;
    sync_cube();
    let mut apart = 1usize;
    while apart < UNITS {
        let mut before = 0u32;
        if unit >= apart {
            before = sums[unit - apart];
        }
        sync_cube();
        sums[unit] += before;
        sync_cube();
        apart *= 2;
    }
    let (before, all) = (sums[unit] - own, sums[comptime!(UNITS - 1)]);
    sync_cube();
    (before, all)
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

/// Sorts the pairs of `ids` by expert, into tiles of `m_tile` rows.
fn sort(gpu: &Gpu, ids: &Tensor, routing: Routing, m_tile: usize) -> Result<Memory, KernelError> {
    let tiles = routing.most_tiles(m_tile);
    let list = gpu.allocate(tiles * (1 + m_tile) * size_of::<u32>())?;
    let index = |value: usize| CHECK.index(value);
    index(tiles * (1 + m_tile))?;
    let arguments = GatherQmmSort {
        ids: ids.buffer()?,
        list: (&list).into(),
        pairs: index(routing.pairs)?,
        experts: index(routing.experts)?,
        tiles: index(tiles)?,
    };
    // SAFETY: the list holds as many tiles and rows as experts can have.
    unsafe { gpu.launch(compiled(gpu.target(), m_tile), [1, 1, 1], arguments)? };
    Ok(list)
}

#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let takes = target.caps().has_matrix_units() && target.caps().units >= UNITS;
    takes.then(|| compiled(target, 32).code()).into_iter().collect()
}
