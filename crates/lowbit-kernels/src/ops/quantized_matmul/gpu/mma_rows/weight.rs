//! What a cube takes of the weight, and its codes on their way to registers: of a step, each unit has its quarters of each
//! group, and what it has of a group is fetched anew as soon as it is multiplied.

use super::super::mat_vec::Place;
use super::super::share::Planes;
use super::shape::{STEP, Shape};
use crate::gpu::layout::RUN;
use crate::gpu::ptx::{global, pointer, register};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// What a cube takes of the weight.
#[derive(CubeType)]
pub(super) struct Weight<'a, S: Int, B: Int, V: Size> {
    pub planes: Planes<'a, S, B, V>,
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
    /// What sums begin with.
    pub initial: f32,
}

#[cube]
impl<'a, S: Int, B: Int, V: Size> Weight<'a, S, B, V> {
    /// A cube's part of the batch at `place`, whose `n` rows have `runs` runs.
    pub fn new(
        planes: Planes<'a, S, B, V>,
        place: &Place,
        n: usize,
        runs: usize,
        #[comptime] shape: Shape,
    ) -> Weight<'a, S, B, V> {
        let row0 = CUBE_POS_X as usize * comptime!(shape.rows());
        let strip = UNIT_POS_X as usize / 32 / shape.splits * comptime!(16 * shape.tiles);
        let loads = comptime!(shape.words() / shape.vector());
        let mut starts = Array::<usize>::new(comptime!(2 * shape.tiles));
        #[unroll]
        for r in 0..comptime!(2 * shape.tiles) {
            // Rows past the last are computed and not stored.
            let row =
                place.batch * n + min(row0 + strip + UNIT_POS_X as usize % 32 / 4 + comptime!(8 * r), n - 1);
            starts[r] = row * (runs * comptime!(RUN) / comptime!(shape.group()) * comptime!(4 * loads))
                + UNIT_POS_X as usize % 4 * loads;
        }
        Weight::<'a, S, B, V> {
            planes,
            first: place.batch * n,
            row0,
            n,
            runs: select(place.known, runs, 0usize),
            strip,
            starts,
            words: Array::new(comptime!(shape.groups() * 2 * shape.tiles * shape.words())),
            initial: place.initial,
        }
    }

    /// Loads a unit's quarters of its plane's first step.
    pub fn fetch_first(&mut self, #[comptime] shape: Shape) {
        #[unroll]
        for group in 0..comptime!(shape.groups()) {
            self.fetch(UNIT_POS_X as usize / 32 % shape.splits, group, shape);
        }
    }

    /// Loads a unit's quarters of group `group` of step `step`.
    pub fn fetch(&mut self, step: usize, #[comptime] group: usize, #[comptime] shape: Shape) {
        let (words, size) = comptime!((shape.words(), shape.vector()));
        let loads = comptime!(words / size);
        let mut first = step * comptime!(shape.groups());
        let skipped = comptime!(if shape.whole { group * 4 * loads } else { 0 });
        if comptime!(!shape.whole) {
            // Groups past the last are multiplied with zeros.
            first = min(first + group, self.runs * comptime!(RUN) / comptime!(shape.group()) - 1);
        }
        #[unroll]
        for r in 0..comptime!(2 * shape.tiles) {
            let row = register((self.starts[r] + first * comptime!(4 * loads)) as u32);
            let pointer = pointer::<V>(self.planes.codes, row, size);
            if step * comptime!(STEP / RUN) < self.runs {
                #[unroll]
                for load in 0..loads {
                    let vector = global::<V>(pointer, comptime!(skipped + load), size);
                    #[unroll]
                    for j in 0..size {
                        let word = comptime!((group * 2 * shape.tiles + r) * words + load * size + j);
                        self.words[word] = vector.extract(j);
                    }
                }
            }
        }
    }
}
