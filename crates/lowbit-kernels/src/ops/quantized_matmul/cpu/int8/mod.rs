//! Products in integers, for weights in [panels](crate::panels): x is rounded to 8 bits per group ([`activations`]), a
//! chunk of a few panels is unpacked to bytes in the first-level cache, and all rows of x pass over it, a few at a time
//! ([`tile`]). This is one kernel for all formats and numbers of rows.

mod activations;
mod tile;

use super::{Group, cut};
use crate::Cpu;
use crate::panels::{CHUNK, Chunk, PANELS, ROWS, Unpack};
use crate::simd::{Kernel, Simd};
use activations::Activations;
use std::sync::Arc;

/// Weight rows that are unpacked side by side: tasks' borders fall on multiples of this.
const WIDTH: usize = PANELS * ROWS;
/// Rows of x that one task takes at most: their bytes stay in the second-level cache. Every tile's height divides it.
const MAX_M: usize = 256;
/// Multiplications that are worth handing to another thread.
const GRAIN: usize = 1 << 19;
/// What unpacking a code costs, in multiplications.
const UNPACK: usize = 4;

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
pub(super) fn run(cpu: &Arc<Cpu>, weight: Unpack<'_>, n: usize, groups: Vec<Group<'_>>) {
    let (isa, layout) = (cpu.isa(), weight.layout);
    let (mut operands, mut tasks) = (Vec::with_capacity(groups.len()), Vec::new());
    let count = groups.len();
    for (index, group) in groups.into_iter().enumerate() {
        let m = group.y.len() / n;
        operands.push(Activations::new(cpu, group.x, m, &layout));
        let first_panel = group.weight_row / n * layout.panels();
        let size = Size { m, n, k: layout.k() };
        cut(group.y, n, size.block(), size.strip(count, cpu.threads()), |first_m, first_n, y| {
            tasks.push(Task { group: index, m: first_m, panel: first_panel + first_n / ROWS, y });
        });
    }
    cpu.for_each(tasks, |mut task| {
        let x = &operands[task.group];
        isa.dispatch(Product { weight, x, m: task.m, panel: task.panel, y: &mut task.y });
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
        self.m.div_ceil(blocks).max(1).next_multiple_of(tile::TALLEST)
    }

    /// Weight rows per task, for a product that is one of `groups` equal ones.
    fn strip(&self, groups: usize, threads: usize) -> usize {
        let row = self.k.saturating_mul(self.m.min(self.block()) + UNPACK).max(1);
        let tasks = (threads * 4).div_ceil(groups * self.m.div_ceil(self.block()).max(1));
        let balanced = if threads == 1 { self.n } else { self.n.div_ceil(tasks) };
        balanced.max(GRAIN / row).next_multiple_of(WIDTH)
    }
}

/// A row of x times the rows of [`PANELS`] panels.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sums([f32; WIDTH]);

/// One task's product.
struct Product<'a, 'y> {
    weight: Unpack<'a>,
    x: &'a Activations,
    m: usize,
    panel: usize,
    y: &'a mut [&'y mut [f32]],
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { weight, x, y, .. } = self;
        let (m, n, k) = (y.len(), y[0].len(), weight.layout.k());
        let mut chunk = Chunk::new();
        let mut sums = vec![Sums([0.0; WIDTH]); m];
        for first in (0..n).step_by(WIDTH) {
            let width = WIDTH.min(n - first);
            let panels = width.div_ceil(ROWS);
            sums.fill(Sums([0.0; WIDTH]));
            for start in (0..k).step_by(CHUNK) {
                weight.unpack(simd, self.panel + first / ROWS, panels, start, &mut chunk);
                if weight.layout.long_scales() {
                    weight.cut_scales(&mut chunk);
                }
                for tile in x.tiles(simd, self.m..self.m + m, start) {
                    let at = tile.row - self.m;
                    tile::multiply(simd, &weight.layout, &chunk, panels, tile, &mut sums[at..]);
                }
            }
            for (y, sums) in y.iter_mut().zip(&sums) {
                let y = &mut y[first..][..width];
                for (y, sums) in y.chunks_mut(S::LANES).zip(sums.0.chunks_exact(S::LANES)) {
                    simd.store_partial(simd.load(sums), y);
                }
            }
        }
    }
}
