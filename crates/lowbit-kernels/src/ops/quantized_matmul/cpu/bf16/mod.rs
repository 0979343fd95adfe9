//! Products of many rows on a unit that multiplies tiles of bf16 ([`tiles`](crate::simd::tiles)), for weights in
//! [panels](crate::panels): x is rounded to bf16 once ([`activations`]), a stretch of two panels is decoded, rounded to bf16
//! and laid in tiles in the first-level cache ([`weights`]), and all of a task's rows of x pass over it. This is one kernel for
//! all formats.
//!
//! Both operands are rounded to nearest even, each with a relative error of at most 2^-8; sums are f32. Why not tiles of int8,
//! which multiply twice as fast: scales are per 16 or 32 values, and such a product sums up 64, so sums of int32 would leave the
//! tiles after every half product, for a conversion and two fused operations each.
//!
//! Floor: a step of 32 rows of x, 32 rows of the weight and 32 values is four products of 16 cycles, and 16 values of the
//! weight cost about 4 operations of a vector, once per [`Method::MAX_M`] rows of x. Sums that do not stay in the first-level
//! cache cost about a quarter more: as many lines go there and back as come of x in two steps.

mod activations;
#[cfg(test)]
mod tests;
mod weights;

use super::panels::{Method, Piece, WIDTH};
use crate::Cpu;
use crate::buffer::Buffer;
use crate::panels::{Layout, ROWS};
use crate::simd::Simd;
use crate::simd::tiles::{Ahead, Block, Pairs, STEP, Start, TILE, TileKernel, TileUnit, Tiles};
use activations::Activations;
use std::ops::Range;
use std::sync::Arc;
use weights::Stretch;

/// Rows of x whose sums are computed at a time.
const HEIGHT: usize = 2 * TILE;
/// Values of a row that are decoded at a time: two panels' tiles take 32 KiB, which the first-level cache holds.
const DEPTH: usize = 512;
/// Steps of a stretch.
const STEPS: usize = DEPTH / STEP;
/// Bytes of x that stay in the second-level cache while a task goes through all of its weight rows.
const X_CACHED: usize = 768 << 10;
/// Bytes of sums that stay there, where not all of x does.
const SUMS_CACHED: usize = 1 << 20;

/// By tiles of a unit.
pub(super) struct Bf16<U>(pub U);

impl<U: TileUnit> Method for Bf16<U> {
    type X = Activations;
    const MAX_M: usize = 512;
    const HEIGHT: usize = HEIGHT;
    const GRAIN: usize = 1 << 21;
    const UNPACK: usize = 96;
    const RATE: usize = 1200;

    fn round(&self, cpu: &Arc<Cpu>, x: &[f32], m: usize, layout: &Layout) -> Activations {
        Activations::new(cpu, x, m, layout.k())
    }

    type Key = ();
    fn key(_: &Layout) {}

    fn multiply(&self, cpu: &Arc<Cpu>, piece: Piece<'_, '_, Activations>) {
        self.0.dispatch(cpu.isa(), Product { cpu, piece });
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

struct Product<'a, 'y> {
    cpu: &'a Arc<Cpu>,
    piece: Piece<'a, 'y, Activations>,
}

impl TileKernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, T: Tiles>(mut self, simd: S, tiles: &mut T) {
        let (m, n, k) = (self.piece.y.len(), self.piece.y[0].len(), self.piece.weight.layout.k());
        let (blocks, width) = (m.div_ceil(HEIGHT), width(m, k).min(n.next_multiple_of(WIDTH)));
        let bytes = width / WIDTH * blocks * size_of::<Block>();
        let mut sums = Buffer::any(bytes, self.cpu).expect("memory for sums");
        let sums: &mut [Block] = bytemuck::cast_slice_mut(&mut sums.bytes_mut()[..bytes]);
        let mut stretch = Stretch::new();
        let rows = self.piece.m..self.piece.m + m;
        for first in (0..n).step_by(width) {
            let width = width.min(n - first);
            for start in (0..k.max(1)).step_by(DEPTH) {
                // While x is multiplied, its next stretch comes to the second-level cache.
                let next = if start + DEPTH < k { start + DEPTH } else { 0 };
                let mut ahead = self.piece.x.rows(rows.clone(), next);
                for (strip, sums) in (0..width).step_by(WIDTH).zip(sums.chunks_exact_mut(blocks)) {
                    let panels = WIDTH.min(width - strip).div_ceil(ROWS);
                    let panel = self.piece.panel + (first + strip) / ROWS;
                    stretch.decode(simd, &self.piece.weight, panel..panel + panels, start);
                    self.multiply(tiles, &stretch, start, sums, &mut ahead);
                }
            }
            self.finish(simd, first..first + width, sums);
        }
    }
}

impl Product<'_, '_> {
    /// Adds to `sums` the products of all rows of x and a stretch that starts with value `k`. Asks for tiles of `ahead`, and takes
    /// those away.
    #[inline(always)]
    fn multiply<T: Tiles>(
        &self,
        tiles: &mut T,
        stretch: &Stretch,
        k: usize,
        sums: &mut [Block],
        ahead: &mut &[Pairs],
    ) {
        let start = if k == 0 { Start::Zero } else { Start::Sums };
        let (first, second) = (stretch.tiles(0), stretch.tiles(1));
        let asked = first.len() * Ahead::OPERAND / size_of::<Pairs>();
        let mut sums = sums.iter_mut().peekable();
        for row in (0..self.piece.y.len()).step_by(HEIGHT) {
            let c = sums.next().expect("sums for all rows");
            let ask = Ahead { sums: sums.peek().map(|sums| &**sums), operand: ahead.first() };
            *ahead = ahead.get(asked..).unwrap_or_default();
            let x = |row: usize| self.piece.x.tiles(self.piece.m + row, k);
            match (row + TILE < self.piece.y.len(), stretch.panels()) {
                (true, 2) => tiles.multiply([x(row), x(row + TILE)], [first, second], c, start, ask),
                (false, 2) => tiles.multiply([x(row)], [first, second], c, start, ask),
                (true, _) => tiles.multiply([x(row), x(row + TILE)], [first], c, start, ask),
                (false, _) => tiles.multiply([x(row)], [first], c, start, ask),
            }
        }
    }

    /// Writes the sums of weight rows `columns` to the result; `sums` are of [`WIDTH`] of them after the other.
    #[inline(always)]
    fn finish<S: Simd>(&mut self, simd: S, columns: Range<usize>, sums: &[Block]) {
        let blocks = self.piece.y.len().div_ceil(HEIGHT);
        for (row, y) in self.piece.y.iter_mut().enumerate() {
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
