//! x and the weight on their way to shared memory: through registers, the weight loaded a step
//! ahead and decoded from there.

use super::config::CmmaTile;
use crate::gpu::components::Components;
use crate::gpu::float::rounded;
use crate::gpu::layout::RUN;
use crate::gpu::loaded::{self, Loaded};
use crate::gpu::matrices::{VECTOR, put};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// A cube's part of the product.
#[derive(CubeType)]
pub(super) struct Block {
    /// The first row of the weight over all batches, and how many there are from it to the last of
    /// its batch.
    pub weight_row: usize,
    pub n: usize,
    /// Runs of a row.
    pub runs: usize,
    /// The row of x that each of the unit's loads in a step is of.
    pub x_rows: Array<usize>,
}

/// The rows of a tile.
#[derive(CubeType)]
pub(super) struct Rows {
    /// The first row over all batches, or where the tile's rows are in the list.
    pub first: usize,
    /// The number of rows from it to the last of its batch; with a list, all rows of x.
    pub m: usize,
    /// Listed rows that have the same row of x.
    pub share: u32,
}

#[cube]
impl Rows {
    /// The row of y that row `row` of the tile is, or `u32::MAX`.
    pub fn of_y(&self, list: &[u32], row: usize, #[comptime] config: CmmaTile) -> u32 {
        if comptime!(config.listed) {
            list[self.first + row]
        } else {
            select(row < self.m, (self.first + row) as u32, u32::MAX)
        }
    }

    /// The row of x of row `row` of the tile. Where there is none, one that can be loaded.
    pub fn of_x(&self, list: &[u32], row: usize, #[comptime] config: CmmaTile) -> usize {
        if comptime!(config.listed) {
            let listed = list[self.first + min(row, comptime!(config.cut.m_tile - 1))];
            min((listed / self.share) as usize, self.m - 1)
        } else {
            self.first + min(row, self.m - 1)
        }
    }
}

/// See [`Block::x_rows`].
#[cube]
pub(super) fn x_rows(list: &[u32], rows: &Rows, #[comptime] config: CmmaTile) -> Array<usize> {
    let mut of_loads = Array::<usize>::new(comptime!(config.x_loads()));
    #[unroll]
    for i in 0..comptime!(config.x_loads()) {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        of_loads[i] = rows.of_x(list, at / comptime!(config.x_row()), config);
    }
    of_loads
}

/// A unit's loads of a step.
#[derive(CubeType)]
pub(super) struct Fetched<S: Int, B: Int> {
    x: Array<Vector<u32, Const<4>>>,
    weight: Loaded<S, B>,
}

#[cube]
pub(super) fn none<S: Int, B: Int>(#[comptime] config: CmmaTile) -> Fetched<S, B> {
    Fetched::<S, B> {
        x: Array::new(comptime!(config.x_loads())),
        weight: loaded::none::<S, B>(comptime!(config.runs()), config.layout),
    }
}

/// Loads the unit's part of x in step `step`. Runs past the last are loaded from the last.
#[cube]
pub(super) fn fetch_x<S: Int, B: Int>(
    x: &[Vector<u32, Const<4>>],
    to: &mut Fetched<S, B>,
    block: &Block,
    step: usize,
    #[comptime] config: CmmaTile,
) {
    let (x_row, of_row) = comptime!((config.x_row(), config.runs_of_row()));
    #[unroll]
    for i in 0..comptime!(config.x_loads()) {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        let of_all = block.runs * comptime!(x_row / of_row);
        to.x[i] = x[block.x_rows[i] * of_all + within(step * x_row + at % x_row, of_all, config)];
    }
}

/// Loads the unit's part of the weight in step `step`. Rows and runs past the last are loaded from
/// the last.
#[cube]
pub(super) fn fetch_weight<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    to: &mut Fetched<S, B>,
    block: &Block,
    step: usize,
    #[comptime] config: CmmaTile,
) {
    let of_row = comptime!(config.runs_of_row());
    #[unroll]
    for i in 0..comptime!(config.runs()) {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        let row = block.weight_row + min(at / of_row, block.n - 1);
        let run = row * block.runs + within(step * of_row + at % of_row, block.runs, config);
        loaded::fetch::<S, B, V>(weight, &mut to.weight, run as u32, i, config.layout);
    }
}

/// Place `at` among `all`, or the last where it is past that.
#[cube]
fn within(at: usize, all: usize, #[comptime] config: CmmaTile) -> usize {
    if comptime!(config.ends_early) { min(at, all - 1) } else { at }
}

/// `value`, or 0 where there is none.
#[cube]
fn or_zero<T: Numeric>(value: T, there: bool, #[comptime] config: CmmaTile) -> T {
    if comptime!(config.ends_early) { select(there, value, T::from_int(0)) } else { value }
}

/// Puts what was loaded of step `of.0` into shared memory, the weight decoded and rounded. Beyond
/// the last of `of.1` runs there are zeros.
#[cube]
pub(super) fn stage<S: Int, B: Int, E: Float>(
    from: &Fetched<S, B>,
    xs: &mut Shared<[Vector<E, Const<4>>]>,
    weights: &mut Shared<[Vector<E, Const<4>>]>,
    of: (usize, usize),
    integers: u32,
    #[comptime] config: CmmaTile,
) {
    let (step, runs) = of;
    let (x_row, of_row) = comptime!((config.x_row(), config.runs_of_row()));
    let (m_tile, n_tile, row) = comptime!((config.cut.m_tile, config.cut.n_tile, config.row()));
    let whole = comptime!(!config.ends_early).runtime();
    #[unroll]
    for i in 0..comptime!(config.x_loads()) {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        if at < comptime!(m_tile * x_row) {
            let to = at / x_row * row + at % x_row * 2;
            let there = step * of_row + at % x_row / comptime!(x_row / of_row) < runs;
            put::<E>(from.x[i], xs, to, whole || there);
        }
    }
    #[unroll]
    for i in 0..comptime!(config.runs()) {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        if at < comptime!(n_tile * of_row) {
            let to = at / of_row * row + at % of_row * comptime!(RUN / VECTOR);
            let there = step * of_row + at % of_row < runs;
            stage_run::<S, B, E>(&from.weight, weights, (to, there), integers, i, config);
        }
    }
}

/// Decodes the run in place `place` to shared memory from vector `to.0` on, or writes zeros where
/// it is not there.
#[cube]
fn stage_run<S: Int, B: Int, E: Float>(
    from: &Loaded<S, B>,
    weights: &mut Shared<[Vector<E, Const<4>>]>,
    to: (usize, bool),
    integers: u32,
    #[comptime] place: usize,
    #[comptime] config: CmmaTile,
) {
    let layout = comptime!(config.layout);
    let (to, there) = to;
    #[unroll]
    for group in 0..comptime!(RUN / layout.group()) {
        let scaling = loaded::scaling::<S, B>(from, place, group, layout);
        #[unroll]
        for v in 0..comptime!(layout.group() / VECTOR) {
            let first = comptime!(group * layout.group() + v * VECTOR);
            let mut values = Vector::<E, Const<4>>::new(E::from_int(0));
            #[unroll]
            for j in 0..VECTOR {
                let value =
                    loaded::value::<S, B>(from, scaling, integers, comptime!(first + j), place, layout);
                values.insert(j, rounded::<E>(or_zero::<f32>(value, there, config), config.x_type));
            }
            weights[to + comptime!(first / VECTOR)] = values;
        }
    }
}
