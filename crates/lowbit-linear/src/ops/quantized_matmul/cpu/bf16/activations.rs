//! Rows of x, rounded to bf16.

use super::{DEPTH, STEPS};
use crate::Cpu;
use crate::buffer::Buffer;
use crate::cast::Float;
use crate::simd::tiles::{Pairs, STEP, TILE};
use crate::simd::{Kernel, Simd};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

/// x `[m, k]` in tiles of bf16: `[stretch of k][16 rows][step][row][pair]`, so that what a task
/// multiplies with one stretch of the weight lies in one piece. Rows are padded with zeros to whole
/// steps, and their number to whole tiles.
pub(in super::super) struct Activations {
    tiles: Buffer,
    /// Tiles above each other, and side by side.
    rows: usize,
    steps: usize,
}

impl Activations {
    /// With anything in them.
    fn any(cpu: &Arc<Cpu>, m: usize, k: usize) -> Self {
        let (rows, steps) = (m.div_ceil(TILE), k.div_ceil(STEP));
        let bytes = rows * steps * size_of::<Pairs>();
        Self { tiles: Buffer::any_cached(bytes, cpu).expect("memory for x in bf16"), rows, steps }
    }

    fn all_mut(&mut self) -> &mut [Pairs] {
        let bytes = self.rows * self.steps * size_of::<Pairs>();
        bytemuck::cast_slice_mut(&mut self.tiles.bytes_mut()[..bytes])
    }

    /// Rounds `x`. A number that is too large for bf16 becomes infinite, a subnormal one zero.
    pub fn new(cpu: &Arc<Cpu>, x: &[f32], m: usize, k: usize) -> Self {
        let mut all = Self::any(cpu, m, k);
        if k == 0 {
            return all;
        }
        let rows = all.rows;
        let tiles = all.all_mut();
        let mut tasks = Vec::new();
        for (stretch, tiles) in tiles.chunks_mut(rows * STEPS).enumerate() {
            let steps = tiles.len() / rows;
            for (row, tiles) in tiles.chunks_exact_mut(steps).enumerate() {
                let last = k.min(stretch * DEPTH + DEPTH);
                tasks.push(Round { x: &x[row * TILE * k..], k, columns: stretch * DEPTH..last, tiles });
            }
        }
        cpu.for_each_of(rows * TILE * k / VALUES, tasks, |task| cpu.isa().dispatch(task));
        all
    }

    /// The tiles that `fill` writes to parts of x `[m, k]`, of at most `height` rows and `width`
    /// columns, whole tiles and steps.
    pub(super) fn filled(
        cpu: &Arc<Cpu>,
        [m, k]: [usize; 2],
        [height, width]: [usize; 2],
        fill: impl FnOnce(Vec<Part<'_>>),
    ) -> Self {
        let mut all = Self::any(cpu, m, k);
        let (rows, steps, height, width) = (all.rows, all.steps, height / TILE, width / STEP);
        let mut parts = Vec::new();
        for row in (0..rows).step_by(height) {
            for step in (0..steps).step_by(width) {
                let rows = row * TILE..m.min((row + height) * TILE);
                let columns = step * STEP..k.min((step + width) * STEP);
                parts.push(Part { rows, columns, tiles: Vec::new() });
            }
        }
        let across = steps.div_ceil(width);
        for (stretch, tiles) in all.all_mut().chunks_mut((rows * STEPS).max(1)).enumerate() {
            let steps = tiles.len() / rows;
            for (row, mut tiles) in tiles.chunks_exact_mut(steps).enumerate() {
                let mut step = stretch * STEPS;
                while !tiles.is_empty() {
                    let count = tiles.len().min(width - step % width);
                    let piece = tiles.split_off_mut(..count).expect("so many are left");
                    parts[row / height * across + step / width].tiles.push(piece);
                    step += count;
                }
            }
        }
        fill(parts);
        all
    }

    /// The tiles of the 16 rows from `row` on, of the stretch that starts with value `k`.
    #[inline(always)]
    pub fn tiles(&self, row: usize, k: usize) -> &[Pairs] {
        self.rows(row..row + TILE, k)
    }

    /// The tiles of `rows`, of which the first is the first of a tile, of the stretch that starts
    /// with value `k`.
    #[inline(always)]
    pub fn rows(&self, rows: Range<usize>, k: usize) -> &[Pairs] {
        let (first, len) = (k / STEP, STEPS.min(self.steps - k / STEP));
        let tiles: &[Pairs] = bytemuck::cast_slice(self.tiles.bytes());
        &tiles[first * self.rows + rows.start / TILE * len..][..rows.len().div_ceil(TILE) * len]
    }
}

/// A part of [`Activations`] that is to be written.
pub(super) struct Part<'a> {
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    /// `[stretch][16 rows]`, each the steps of the stretch that the columns have.
    tiles: Vec<&'a mut [Pairs]>,
}

impl Part<'_> {
    /// Rounds half a step of a row, from `column` on; row and column are counted from the part's
    /// first. `x` is from a lane on.
    #[inline(always)]
    pub fn store<S: Simd>(&mut self, simd: S, row: usize, column: usize, x: impl Fn(usize) -> S::V) {
        let first = self.columns.start / STEP;
        let step = first + column / STEP;
        let (stretch, rows) = (step / STEPS - first / STEPS, self.rows.len().div_ceil(TILE));
        let tile = &mut self.tiles[stretch * rows + row / TILE][step - first.max(step / STEPS * STEPS)];
        let out = &mut tile.0[row % TILE].as_flattened_mut()[column % STEP..];
        for at in (0..STEP / 2).step_by(S::LANES) {
            simd.store_bf16(x(at), &mut out[at..]);
        }
        if column + STEP / 2 >= self.columns.len() {
            out[STEP / 2..].fill(bf16::ZERO);
        }
    }
}

/// Values that a thread rounds in a nanosecond, about.
const VALUES: usize = 4;

/// Rounds some values of up to 16 rows.
struct Round<'a> {
    /// Rows of `k` values, the first ones of them of these tiles.
    x: &'a [f32],
    k: usize,
    columns: Range<usize>,
    tiles: &'a mut [Pairs],
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let mut rows = self.x.chunks_exact(self.k).map(|x| &x[self.columns.clone()]);
        for row in 0..TILE {
            let x = rows.next().unwrap_or_default();
            let mut x = x.chunks(STEP);
            for tile in self.tiles.iter_mut() {
                let out = tile.0[row].as_flattened_mut().first_chunk_mut::<STEP>().expect("a row of a tile");
                let x = x.next().unwrap_or_default();
                match x.first_chunk::<STEP>() {
                    Some(x) => round(x, out),
                    None => {
                        let mut padded = [0.0; STEP];
                        padded[..x.len()].copy_from_slice(x);
                        round(&padded, out);
                    }
                }
            }
        }
    }
}

/// To the nearest, ties to even.
#[inline(always)]
fn round(x: &[f32; STEP], out: &mut [bf16; STEP]) {
    for (&x, out) in x.iter().zip(out) {
        *out = bf16::narrow(x);
    }
}
