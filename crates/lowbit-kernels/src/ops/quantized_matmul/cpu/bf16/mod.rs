//! Products of many rows on a unit that multiplies tiles of bf16 ([`tiles`](crate::simd::tiles)), for weights in
//! [panels](crate::panels): x is rounded to bf16 once ([`activations`]), a stretch of two panels is decoded, rounded to bf16
//! and laid in tiles in the first-level cache ([`weights`]), and all of a task's rows of x pass over it. This is one kernel for
//! all formats.
//!
//! Both operands are rounded to nearest even, each with a relative error of at most 2^-8; sums are f32. Why not tiles of int8,
//! which multiply twice as fast: scales are per 16 or 32 values, and such a product sums up 64, so sums of int32 would leave the
//! tiles after every half product, for a conversion and two fused operations each.
//!
//! Floor: a step of 32 rows of x, 32 rows of the weight and 32 values is four products of 16 cycles, and a value of the
//! weight costs about 5 operations of a vector, once per [`MAX_M`] rows of x.

mod activations;
#[cfg(test)]
mod tests;
mod weights;

use super::{Group, cut};
use crate::Cpu;
use crate::buffer::Buffer;
use crate::panels::{PANELS, ROWS, Unpack};
use crate::simd::Simd;
use crate::simd::tiles::{STEP, Start, Sums, TILE, TileKernel, TileUnit, Tiles};
use activations::Activations;
use std::ops::Range;
use std::sync::Arc;
use weights::Stretch;

/// Weight rows that are decoded side by side: tasks' borders fall on multiples of this.
const WIDTH: usize = PANELS * ROWS;
/// Rows of x whose sums are computed at a time.
const HEIGHT: usize = 2 * TILE;
/// Rows of x that one task takes at most.
const MAX_M: usize = 512;
/// Values of a row that are decoded at a time: two panels' tiles take 32 KiB, which the first-level cache holds.
const DEPTH: usize = 512;
/// Steps of a stretch.
const STEPS: usize = DEPTH / STEP;
/// Bytes of x that stay in the second-level cache while a task goes through all of its weight rows.
const X_CACHED: usize = 768 << 10;
/// Bytes of sums that stay there, where not all of x does.
const SUMS_CACHED: usize = 512 << 10;
/// Multiplications that are worth handing to another thread.
const GRAIN: usize = 1 << 21;
/// What decoding a value costs, in multiplications.
const DECODE: usize = 96;

/// A piece of one group's result.
struct Task<'a> {
    group: usize,
    /// The first row of x, and the first panel, counted over all matrices.
    m: usize,
    panel: usize,
    /// The piece, row by row.
    y: Vec<&'a mut [f32]>,
}

/// `y[m, n] = sum over k of x[m, k] * weight[weight_row + n, k]` in every group, whose weights are whole matrices.
pub(super) fn run<U: TileUnit>(
    cpu: &Arc<Cpu>,
    unit: U,
    weight: Unpack<'_>,
    n: usize,
    groups: Vec<Group<'_>>,
) {
    let layout = weight.layout;
    let (mut operands, mut tasks) = (Vec::with_capacity(groups.len()), Vec::new());
    let count = groups.len();
    for (index, group) in groups.into_iter().enumerate() {
        let m = group.y.len() / n;
        operands.push(Activations::new(cpu, group.x, m, layout.k()));
        let first_panel = group.weight_row / n * layout.panels();
        let size = Size { m, n, k: layout.k() };
        cut(group.y, n, size.block(), size.strip(count, cpu.threads()), |first_m, first_n, y| {
            tasks.push(Task { group: index, m: first_m, panel: first_panel + first_n / ROWS, y });
        });
    }
    cpu.for_each(tasks, |mut task| {
        let x = &operands[task.group];
        let product = Product { cpu, weight, x, m: task.m, panel: task.panel, y: &mut task.y };
        unit.dispatch(cpu.isa(), product);
    });
}

/// The sizes of a product.
struct Size {
    m: usize,
    n: usize,
    k: usize,
}

impl Size {
    /// Rows of x per task: as many in each as possible, in whole tiles.
    fn block(&self) -> usize {
        let blocks = self.m.div_ceil(MAX_M).max(1);
        self.m.div_ceil(blocks).max(1).next_multiple_of(HEIGHT)
    }

    /// Weight rows per task, for a product that is one of `groups` equal ones.
    fn strip(&self, groups: usize, threads: usize) -> usize {
        let row = self.k.saturating_mul(self.m.min(self.block()) + DECODE).max(1);
        let tasks = (threads * 4).div_ceil(groups * self.m.div_ceil(self.block()).max(1));
        let balanced = if threads == 1 { self.n } else { self.n.div_ceil(tasks) };
        balanced.max(GRAIN / row).next_multiple_of(WIDTH)
    }
}

/// Weight rows whose sums a task keeps at a time, for `m` rows of x. Where x stays in the cache: those that are decoded side by
/// side. Else x comes from the last-level cache once for all of them.
fn width(m: usize, k: usize) -> usize {
    let m = m.next_multiple_of(HEIGHT);
    match m * k * 2 {
        bytes if bytes <= X_CACHED => WIDTH,
        _ => (SUMS_CACHED / (m * size_of::<f32>()) / WIDTH).max(1) * WIDTH,
    }
}

/// Sums of [`HEIGHT`] rows of x and [`WIDTH`] weight rows.
type Block = [[Sums; 2]; 2];

/// One task's product.
struct Product<'a, 'y> {
    cpu: &'a Arc<Cpu>,
    weight: Unpack<'a>,
    x: &'a Activations,
    m: usize,
    panel: usize,
    y: &'a mut [&'y mut [f32]],
}

impl TileKernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, T: Tiles>(mut self, simd: S, tiles: &mut T) {
        let (m, n, k) = (self.y.len(), self.y[0].len(), self.weight.layout.k());
        let (blocks, width) = (m.div_ceil(HEIGHT), width(m, k).min(n.next_multiple_of(WIDTH)));
        let bytes = width / WIDTH * blocks * size_of::<Block>();
        let mut sums = Buffer::any(bytes, self.cpu).expect("memory for sums");
        let sums: &mut [Block] = bytemuck::cast_slice_mut(&mut sums.bytes_mut()[..bytes]);
        let mut stretch = Stretch::new();
        for first in (0..n).step_by(width) {
            let width = width.min(n - first);
            for start in (0..k.max(1)).step_by(DEPTH) {
                for (strip, sums) in (0..width).step_by(WIDTH).zip(sums.chunks_exact_mut(blocks)) {
                    let panels = WIDTH.min(width - strip).div_ceil(ROWS);
                    let panel = self.panel + (first + strip) / ROWS;
                    stretch.decode(simd, &self.weight, panel..panel + panels, start);
                    self.multiply(tiles, &stretch, start, sums);
                }
            }
            self.finish(simd, first..first + width, sums);
        }
    }
}

impl Product<'_, '_> {
    /// Adds to `sums` the products of all rows of x and a stretch that starts with value `k`.
    #[inline(always)]
    fn multiply<T: Tiles>(&self, tiles: &mut T, stretch: &Stretch, k: usize, sums: &mut [Block]) {
        let start = if k == 0 { Start::Zero } else { Start::Sums };
        let weight = |panel: usize| stretch.tiles(panel);
        for (row, sums) in (0..self.y.len()).step_by(HEIGHT).zip(sums) {
            let x = |row: usize| self.x.tiles(self.m + row, k);
            match (row + TILE < self.y.len(), stretch.panels()) {
                (true, 2) => tiles.multiply([x(row), x(row + TILE)], [weight(0), weight(1)], sums, start),
                (false, 2) => tiles.multiply([x(row)], [weight(0), weight(1)], sums, start),
                (true, _) => tiles.multiply([x(row), x(row + TILE)], [weight(0)], sums, start),
                (false, _) => tiles.multiply([x(row)], [weight(0)], sums, start),
            }
        }
    }

    /// Writes the sums of weight rows `columns` to the result; `sums` are of [`WIDTH`] of them after the other.
    #[inline(always)]
    fn finish<S: Simd>(&mut self, simd: S, columns: Range<usize>, sums: &[Block]) {
        let blocks = self.y.len().div_ceil(HEIGHT);
        for (row, y) in self.y.iter_mut().enumerate() {
            let y = &mut y[columns.clone()];
            for (strip, y) in y.chunks_mut(WIDTH).enumerate() {
                let sums = &sums[strip * blocks + row / HEIGHT][row % HEIGHT / TILE];
                for (sums, y) in sums.iter().zip(y.chunks_mut(TILE)) {
                    let sums = &sums.0[row % TILE];
                    for (sums, y) in sums.chunks_exact(S::LANES).zip(y.chunks_mut(S::LANES)) {
                        simd.store_partial(simd.load(sums), y);
                    }
                }
            }
        }
    }
}
