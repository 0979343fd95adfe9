//! A cube's part of the weight, and its codes on their way to registers: of a step, each unit has
//! its quarters of each group, and fetches its words of a group anew as soon as they are
//! multiplied.

use super::super::super::gpu::cube_rows::CubeRows;
use super::config::{MmaRows, STEP};
use crate::gpu::components::Components;
use crate::gpu::cuda::ptx::{global, pointer, register};
use crate::gpu::layout::RUN;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// A cube's part of the weight.
#[derive(CubeType)]
pub(super) struct Weight<'a, S: Int, B: Int, V: Size> {
    pub components: &'a Components<S, B, V>,
    /// The first row of the cube's batch; the cube's first row in it, and the batch's rows.
    pub first: usize,
    pub row0: usize,
    pub n: usize,
    /// Runs of a row; none where the batch is not known.
    pub runs: usize,
    /// The first of a plane's rows among the cube's.
    pub strip: usize,
    /// The first vectors of the unit's parts of rows.
    starts: Array<usize>,
    /// The unit's words of the step that is next.
    pub words: Array<u32>,
    /// The initial value of sums.
    pub initial: f32,
}

#[cube]
impl<'a, S: Int, B: Int, V: Size> Weight<'a, S, B, V> {
    /// A cube's part of its batch, whose `n` rows have `runs` runs.
    pub fn new(
        components: &'a Components<S, B, V>,
        rows: &CubeRows,
        n: usize,
        runs: usize,
        #[comptime] config: MmaRows,
    ) -> Weight<'a, S, B, V> {
        let row0 = CUBE_POS_X as usize * comptime!(config.n_tile());
        let strip = UNIT_POS_X as usize / 32 / config.splits * comptime!(16 * config.n_tiles);
        let loads = comptime!(config.words() / config.vector());
        let mut starts = Array::<usize>::new(comptime!(2 * config.n_tiles));
        #[unroll]
        for r in 0..comptime!(2 * config.n_tiles) {
            // Rows past the last are computed and not stored.
            let row =
                rows.batch * n + min(row0 + strip + UNIT_POS_X as usize % 32 / 4 + comptime!(8 * r), n - 1);
            starts[r] = row * (runs * comptime!(RUN) / comptime!(config.group()) * comptime!(4 * loads))
                + UNIT_POS_X as usize % 4 * loads;
        }
        Weight::<'a, S, B, V> {
            components,
            first: rows.batch * n,
            row0,
            n,
            runs: select(rows.known, runs, 0usize),
            strip,
            starts,
            words: Array::new(comptime!(config.groups() * 2 * config.n_tiles * config.words())),
            initial: rows.initial,
        }
    }

    /// Loads a unit's quarters of its plane's first step.
    pub fn fetch_first(&mut self, #[comptime] config: MmaRows) {
        #[unroll]
        for group in 0..comptime!(config.groups()) {
            self.fetch(UNIT_POS_X as usize / 32 % config.splits, group, config);
        }
    }

    /// Loads a unit's quarters of group `group` of step `step`.
    pub fn fetch(&mut self, step: usize, #[comptime] group: usize, #[comptime] config: MmaRows) {
        let (words, size) = comptime!((config.words(), config.vector()));
        let loads = comptime!(words / size);
        let mut first = step * comptime!(config.groups());
        let skipped = comptime!(if config.whole { group * 4 * loads } else { 0 });
        if comptime!(!config.whole) {
            // Groups past the last are multiplied with zeros.
            first = min(first + group, self.runs * comptime!(RUN) / comptime!(config.group()) - 1);
        }
        #[unroll]
        for r in 0..comptime!(2 * config.n_tiles) {
            let row = register((self.starts[r] + first * comptime!(4 * loads)) as u32);
            let pointer = pointer::<V>(&self.components.codes, row, size);
            if step * comptime!(STEP / RUN) < self.runs {
                #[unroll]
                for load in 0..loads {
                    let vector = global::<V>(pointer, comptime!(skipped + load), size);
                    #[unroll]
                    for j in 0..size {
                        let word = comptime!((group * 2 * config.n_tiles + r) * words + load * size + j);
                        self.words[word] = vector.extract(j);
                    }
                }
            }
        }
    }
}
