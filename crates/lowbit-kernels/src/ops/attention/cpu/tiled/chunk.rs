//! Keys and values in tiles.

use super::{KEYS, STEPS};
use crate::{
    ops::{attention::cpu::Task, cache_rows::Stored},
    simd::{
        MAX_LANES, Simd,
        tiles::{Pairs, STEP, TILE},
    },
};
use std::ops::Range;

/// Up to [`KEYS`] keys and values.
pub(super) struct Chunk<'a> {
    pub keys: Range<usize>,
    /// D and Dv.
    widths: [usize; 2],
    /// `[16 keys][step of D]`, of the keys and of zeros.
    k: &'a mut [Pairs],
    /// `[16 values][step of keys]`, an even number of the former.
    v: &'a mut [Pairs],
    /// Key, column and value of what is not finite in v, and 0 in the tiles: a weight of 0 would
    /// not keep it out of the rows that do not see it.
    pub not_finite: Vec<(usize, usize, f32)>,
}

impl<'a> Chunk<'a> {
    /// The numbers of tiles of `k` and `v`.
    pub fn tiles([width, value_width]: [usize; 2]) -> [usize; 2] {
        [KEYS / TILE * width.div_ceil(STEP), 2 * value_width.div_ceil(2 * TILE) * STEPS]
    }

    pub fn new(widths: [usize; 2], k: &'a mut [Pairs], v: &'a mut [Pairs]) -> Self {
        Self { keys: 0..0, widths, k, v, not_finite: vec![] }
    }

    /// Takes the place of what was there.
    #[inline(always)]
    pub fn load<S: Simd, T: Stored>(&mut self, simd: S, task: &Task<'_, T>, keys: Range<usize>) {
        let rows = |x, width: usize| Source { x, width, keys: keys.clone() };
        let [width, value_width] = self.widths;
        rows(task.k, width).to_keys(simd, self.k);
        self.not_finite.clear();
        let values = rows(task.v, value_width);
        for step in 0..keys.len().div_ceil(STEP) {
            if !values.step_to_values(simd, step, self.v) {
                self.take_out(values.not_finite(step));
            }
        }
        self.keys = keys;
    }

    /// The keys of 16 rows.
    pub fn k(&self, tile: usize) -> &[Pairs] {
        let steps = self.widths[0].div_ceil(STEP);
        &self.k[tile * steps..][..steps]
    }

    /// 16 columns of the values of the first `steps` steps.
    pub fn v(&self, tile: usize, steps: usize) -> &[Pairs] {
        &self.v[tile * STEPS..][..steps]
    }

    /// Moves values out of the tiles.
    #[cold]
    fn take_out(&mut self, values: Vec<(usize, usize, f32)>) {
        for &(key, column, _) in &values {
            let tile = &mut self.v[column / TILE * STEPS + key / STEP];
            tile.0[column % TILE][key % STEP / 2][key % 2] = half::bf16::ZERO;
        }
        self.not_finite.extend(values);
    }
}

/// Rows of keys or values in the cache.
struct Source<'a, T> {
    x: &'a [T],
    width: usize,
    keys: Range<usize>,
}

impl<T: Stored> Source<'_, T> {
    /// Key `index` of the chunk.
    #[inline(always)]
    fn row(&self, index: usize) -> Option<&[T]> {
        let row = self.keys.start + index;
        (row < self.keys.end).then(|| &self.x[row * T::row(self.width)..][..T::row(self.width)])
    }

    /// Lays keys in tiles, with rows of zeros after the last.
    #[inline(always)]
    fn to_keys<S: Simd>(&self, simd: S, tiles: &mut [Pairs]) {
        let steps = self.width.div_ceil(STEP);
        for (index, tiles) in tiles.chunks_exact_mut(steps).enumerate() {
            for row in 0..TILE {
                let x = Row::new(self.row(index * TILE + row), self.width);
                round_row(simd, x, simd.splat(1.0), tiles, row);
            }
        }
    }

    /// Lays the values of a step in tiles, transposed, with zeros for keys after the last. Returns
    /// true if they are finite.
    #[inline(always)]
    fn step_to_values<S: Simd>(&self, simd: S, step: usize, tiles: &mut [Pairs]) -> bool {
        let zero = simd.splat(0.0);
        let mut finite = zero;
        for (index, tiles) in tiles.chunks_exact_mut(STEPS).enumerate() {
            let tile = &mut tiles[step];
            for (pair, out) in tile.0.iter_mut().enumerate() {
                let key = step * STEP + 2 * pair;
                let [x, y] = [key, key + 1].map(|key| Row::new(self.row(key), self.width));
                for lane in (0..TILE).step_by(S::LANES) {
                    let column = index * TILE + lane;
                    let (first, second) = (x.load(simd, column), y.load(simd, column));
                    // Infinity and NaN times 0 are NaN.
                    finite = simd.mul_add(second, zero, simd.mul_add(first, zero, finite));
                    simd.store_bf16_pairs(first, second, &mut out[lane..]);
                }
            }
            simd.transpose(bytemuck::cast_mut(tile));
        }
        simd.sum(finite) == 0.0
    }

    /// Key, column and value of all that is not finite in a step.
    fn not_finite(&self, step: usize) -> Vec<(usize, usize, f32)> {
        let mut found = vec![];
        for key in step * STEP..(step + 1) * STEP {
            let row = Row::new(self.row(key), self.width);
            let values = (0..row.width).map(|at| (at, row.value(at)));
            found.extend(values.filter(|(_, x)| !x.is_finite()).map(|(column, x)| (key, column, x)));
        }
        found
    }
}

/// A row of some type.
#[derive(Clone, Copy)]
pub(super) struct Row<'a, T: Stored> {
    stored: &'a [T],
    scales: Option<T::Scales>,
    width: usize,
}

impl<'a, T: Stored> Row<'a, T> {
    /// A row of `width` values; of none without one.
    #[inline(always)]
    pub fn new(stored: Option<&'a [T]>, width: usize) -> Self {
        match stored {
            Some(stored) => Self { stored, scales: Some(T::scales(stored, width)), width },
            None => Self { stored: &[], scales: None, width: 0 },
        }
    }

    /// The values from `at` on, and zeros after the last.
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, at: usize) -> S::V {
        match &self.scales {
            Some(scales) if at + S::LANES <= self.width => T::load(simd, self.stored, at, scales),
            _ => {
                let mut padded = [0.0; MAX_LANES];
                for (y, at) in padded.iter_mut().zip(at..self.width) {
                    *y = self.value(at);
                }
                simd.load(&padded)
            }
        }
    }

    #[inline(always)]
    fn value(&self, at: usize) -> f32 {
        self.scales.as_ref().map_or(0.0, |scales| T::widen(self.stored, at, scales))
    }
}

/// Scales and rounds a row: row `row` of tiles side by side.
#[inline(always)]
pub(super) fn round_row<S: Simd, T: Stored>(
    simd: S,
    x: Row<'_, T>,
    scale: S::V,
    tiles: &mut [Pairs],
    row: usize,
) {
    for (step, tile) in tiles.iter_mut().enumerate() {
        let out = tile.0[row].as_flattened_mut();
        for at in (0..STEP).step_by(S::LANES) {
            simd.store_bf16(simd.mul(x.load(simd, step * STEP + at), scale), &mut out[at..]);
        }
    }
}
