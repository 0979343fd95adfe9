//! Products of many rows on a unit that multiplies tiles of bf16 ([`tiles`](crate::simd::tiles)),
//! for weights in [panels](crate::panels): x is rounded to bf16 once ([`activations`]), a stretch
//! of two panels is decoded, rounded to bf16 and laid in tiles in the first-level cache
//! ([`weights`]), and all of a task's rows of x pass over it. This is one kernel for all formats.
//!
//! Both operands are rounded to nearest even, each with a relative error of at most 2^-8; sums are
//! f32. Why not tiles of int8, which multiply twice as fast: scales are per 16 or 32 values, and
//! such a product sums up 64, so sums of int32 would leave the tiles after every half product, for
//! a conversion and two fused operations each.
//!
//! Floor: a step of 32 rows of x, 32 rows of the weight and 32 values is four products of 16
//! cycles, and 16 values of the weight cost about 4 operations of a vector, once per
//! [`Method::MAX_M`] rows of x. Sums that do not stay in the first-level cache cost about a quarter
//! more: as many lines go there and back as come of x in two steps.

mod activations;
#[cfg(test)]
mod tests;
mod weights;

use super::panels::{self, Epilogue, Method, Piece, Size, WIDTH, glu};
use crate::Cpu;
use crate::buffer::Buffer;
use crate::ops::glu::{Gate, with_gate};
use crate::panels::{Layout, PANELS, ROWS, Unpack};
use crate::simd::Simd;
use crate::simd::tiles::{Ahead, Block, Pairs, STEP, Start, TILE, TileKernel, TileUnit, Tiles};
use activations::{Activations, Part};
use std::ops::Range;
use std::sync::Arc;
use weights::Stretch;

/// Rows of x whose sums are computed at a time.
const HEIGHT: usize = 2 * TILE;
/// Values of a row that are decoded at a time: two panels' tiles take 32 KiB, which the first-level
/// cache holds.
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
        let Piece { weight, epilogue, x, m, panel, y } = piece;
        self.0.dispatch(cpu.isa(), Product { cpu, weight, x, m, panel, output: Output::Rows(y, epilogue) });
    }
}

impl<U: TileUnit> Bf16<U> {
    /// `y = glu(x up^T, x gate^T) down^T`, x `[m, K]` and y `[m, N]`; gate and up are one weight of
    /// two. The input of down is written in tiles.
    pub fn gated_mlp(
        &self,
        cpu: &Arc<Cpu>,
        (x, m): (&[f32], usize),
        ([gate_up, down], by): ([Unpack<'_>; 2], Gate),
        y: &mut [f32],
    ) {
        let (k, inner, n) = (gate_up.layout.k(), down.layout.k(), y.len() / m);
        let x = Activations::new(cpu, x, m, k);
        let size = Size { m, n: inner, k, rows: 2 };
        let parts = [size.block::<Self>(), size.strip::<Self>(1, cpu.threads())];
        let hidden = Activations::filled(cpu, [m, inner], parts, |parts| {
            cpu.for_each_of(size.work::<Self>(), parts, |part| {
                let (m, panel) = (part.rows.start, part.columns.start / ROWS * PANELS);
                let output = Output::Tiles(part, by);
                self.0.dispatch(cpu.isa(), Product { cpu, weight: gate_up, x: &x, m, panel, output });
            });
        });
        panels::run_rounded(cpu, self, (down, &hidden), &Size { m, n, k: inner, rows: 1 }, y);
    }
}

/// Strips of panels whose sums a task keeps at a time, for `m` rows of x. Where x stays in the
/// cache: one. Else x comes from the last-level cache once for all of them.
fn side_by_side(m: usize, k: usize) -> usize {
    let m = m.next_multiple_of(HEIGHT);
    match m * k * 2 {
        bytes if bytes <= X_CACHED => 1,
        _ => (SUMS_CACHED / (m * size_of::<f32>()) / WIDTH).max(1),
    }
}

/// The destination of results.
enum Output<'a, 'y> {
    /// Row by row.
    Rows(&'a mut [&'y mut [f32]], Epilogue),
    /// The tiles of another product's x, which a gate makes of the sums.
    Tiles(Part<'y>, Gate),
}

impl Output<'_, '_> {
    /// Rows and columns.
    fn sizes(&self) -> [usize; 2] {
        match self {
            Self::Rows(rows, _) => [rows.len(), rows[0].len()],
            Self::Tiles(part, _) => [part.rows.len(), part.columns.len()],
        }
    }

    fn epilogue(&self) -> Epilogue {
        match *self {
            Self::Rows(_, epilogue) => epilogue,
            Self::Tiles(_, by) => Epilogue::Glu(by),
        }
    }
}

struct Product<'a, 'y> {
    cpu: &'a Arc<Cpu>,
    weight: Unpack<'a>,
    x: &'a Activations,
    /// The first row of x, and the first panel.
    m: usize,
    panel: usize,
    output: Output<'a, 'y>,
}

impl TileKernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, T: Tiles>(mut self, simd: S, tiles: &mut T) {
        let ([m, n], k) = (self.output.sizes(), self.weight.layout.k());
        let epilogue = self.output.epilogue();
        let strips = n.div_ceil(epilogue.columns());
        let (blocks, side) = (m.div_ceil(HEIGHT), side_by_side(m, k).min(strips));
        let bytes = side * blocks * size_of::<Block>();
        let mut sums = Buffer::any_cached(bytes, self.cpu).expect("memory for sums");
        let sums: &mut [Block] = bytemuck::cast_slice_mut(&mut sums.bytes_mut()[..bytes]);
        let mut stretch = Stretch::new();
        let rows = self.m..self.m + m;
        for first in (0..strips).step_by(side) {
            for start in (0..k.max(1)).step_by(DEPTH) {
                // While x is multiplied, its next stretch comes to the second-level cache.
                let next = if start + DEPTH < k { start + DEPTH } else { 0 };
                let mut ahead = self.x.rows(rows.clone(), next);
                for (strip, sums) in (first..strips).zip(sums.chunks_exact_mut(blocks)) {
                    let column = strip * epilogue.columns();
                    let panels = epilogue.panels(column, epilogue.columns().min(n - column));
                    let panels = self.panel + panels.start..self.panel + panels.end;
                    stretch.decode(simd, &self.weight, panels, start);
                    self.multiply(tiles, &stretch, start, sums, &mut ahead);
                }
            }
            self.finish(simd, epilogue, first..strips.min(first + side), sums);
        }
    }
}

impl Product<'_, '_> {
    /// Adds to `sums` the products of all rows of x and a stretch that starts with value `k`. Asks
    /// for tiles of `ahead`, and takes those away.
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
        let [m, _] = self.output.sizes();
        for row in (0..m).step_by(HEIGHT) {
            let c = sums.next().expect("sums for all rows");
            let ask = Ahead { sums: sums.peek().map(|sums| &**sums), operand: ahead.first() };
            *ahead = ahead.get(asked..).unwrap_or_default();
            let x = |row: usize| self.x.tiles(self.m + row, k);
            match (row + TILE < m, stretch.panels()) {
                (true, 2) => tiles.multiply([x(row), x(row + TILE)], [first, second], c, start, ask),
                (false, 2) => tiles.multiply([x(row)], [first, second], c, start, ask),
                (true, _) => tiles.multiply([x(row), x(row + TILE)], [first], c, start, ask),
                (false, _) => tiles.multiply([x(row)], [first], c, start, ask),
            }
        }
    }

    /// Writes the results of these strips of panels. Row by row: what is written lies in few
    /// places.
    #[inline(always)]
    fn finish<S: Simd>(&mut self, simd: S, epilogue: Epilogue, strips: Range<usize>, sums: &[Block]) {
        let [m, _] = self.output.sizes();
        let (blocks, columns) = (m.div_ceil(HEIGHT), epilogue.columns());
        let sums = |strip: usize, row: usize| {
            let [first, second] = &sums[strip * blocks + row / HEIGHT][row % HEIGHT / TILE];
            [&first.0[row % TILE], &second.0[row % TILE]]
        };
        match &mut self.output {
            Output::Rows(rows, _) => {
                for (row, y) in rows.iter_mut().enumerate() {
                    for (strip, at) in strips.clone().enumerate() {
                        let end = y.len().min((at + 1) * columns);
                        epilogue.store(simd, sums(strip, row), &mut y[at * columns..end]);
                    }
                }
            }
            Output::Tiles(part, by) => {
                // The padding of x to whole tiles is zero, and so are its sums.
                for row in 0..m.next_multiple_of(TILE) {
                    for (strip, at) in strips.clone().enumerate() {
                        let sums = sums(strip, row);
                        with_gate!(*by, G => {
                            part.store(simd, row, at * columns, |lane| glu::<S, G>(simd, sums, lane));
                        });
                    }
                }
            }
        }
    }
}
