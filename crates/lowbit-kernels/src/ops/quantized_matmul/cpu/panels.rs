//! Products of weights in [panels](crate::panels), by one [`Method`] or another: each x is rounded once for all weights that read
//! it, and the results are cut into tasks of whole panels.

use super::{Group, PieceRows, cut};
use crate::Cpu;
use crate::panels::{CHUNK, Layout, PANELS, ROWS, Unpack};
use crate::simd::{Isa, Kernel, Simd};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Weight rows that are unpacked side by side: tasks' borders fall on multiples of this.
pub(super) const WIDTH: usize = PANELS * ROWS;
/// Rows of x in the tallest tile of any instruction set.
pub(super) const TALLEST: usize = 8;
/// Strips of panels that one row of x reads side by side.
pub(super) const STRIPS: usize = 2;

/// A way to multiply.
pub(super) trait Method: Sync {
    /// x `[m, k]` as it is multiplied.
    type X: Sync;
    /// Rows of x that one task takes at most: what they are rounded to stays in the second-level cache.
    const MAX_M: usize;
    /// Rows of x in the tallest tile. All others divide it, and it divides [`Self::MAX_M`].
    const HEIGHT: usize;
    /// Multiplications that are worth handing to another thread.
    const GRAIN: usize;
    /// What unpacking a code costs, in multiplications.
    const UNPACK: usize;
    /// Multiplications that a thread does in a nanosecond, about.
    const RATE: usize;

    /// Rounds `x`, `[m, k]`, for weights of a layout.
    fn round(&self, cpu: &Arc<Cpu>, x: &[f32], m: usize, layout: &Layout) -> Self::X;

    /// What of a layout, besides k, says how x is rounded.
    type Key: Ord;
    fn key(layout: &Layout) -> Self::Key;

    /// Computes a piece of a result.
    fn multiply(&self, cpu: &Arc<Cpu>, piece: Piece<'_, '_, Self::X>);
}

/// A piece of one group's result: `y[m, n] = sum over k of x[m, k] * weight[n, k]`.
pub(super) struct Piece<'a, 'y, X> {
    pub weight: Unpack<'a>,
    pub x: &'a X,
    /// The first row of x, and the first panel, counted over all matrices.
    pub m: usize,
    pub panel: usize,
    /// The piece, row by row.
    pub y: &'a mut [&'y mut [f32]],
}

/// A weight and what it multiplies; the weight's matrices have `n` rows.
pub(super) struct Product<'a> {
    pub weight: Unpack<'a>,
    pub n: usize,
    pub groups: Vec<Group<'a>>,
}

/// Where a piece lies.
struct Task<'a> {
    /// Which of all weights, and which of all operands.
    weight: usize,
    operand: usize,
    m: usize,
    panel: usize,
    y: PieceRows<'a>,
}

/// Computes all `products`.
pub(super) fn run<M: Method>(cpu: &Arc<Cpu>, method: &M, products: Vec<Product<'_>>) {
    let count = products.iter().map(|product| product.groups.len()).sum();
    let (mut operands, mut tasks, mut work) = (Vec::with_capacity(count), Vec::new(), 0usize);
    let weights: Vec<_> = products.iter().map(|product| product.weight).collect();
    // Weights of one layer read the same x, and so do experts that serve one token.
    let mut known = BTreeMap::new();
    for (weight, Product { n, groups, .. }) in products.into_iter().enumerate() {
        let layout = weights[weight].layout;
        for group in groups {
            let size = Size { m: group.y.len() / n, n, k: layout.k() };
            let operand = *known.entry((group.x.as_ptr(), size.m, M::key(&layout))).or_insert_with(|| {
                operands.push(method.round(cpu, group.x, size.m, &layout));
                operands.len() - 1
            });
            work = work.saturating_add(size.work::<M>());
            let first_panel = group.weight_row / n * layout.panels();
            let (block, strip) = (size.block::<M>(), size.strip::<M>(count, cpu.threads()));
            cut(group.y, n, block, strip, |m, first_n, y| {
                tasks.push(Task { weight, operand, m, panel: first_panel + first_n / ROWS, y });
            });
        }
    }
    cpu.for_each_of(work, tasks, |Task { weight, operand, m, panel, mut y }| {
        method.multiply(cpu, Piece { weight: weights[weight], x: &operands[operand], m, panel, y: y.each() });
    });
}

/// The sizes of a product.
pub(super) struct Size {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl Size {
    /// Rows of x per task: as many in each as possible, in whole tiles.
    pub fn block<M: Method>(&self) -> usize {
        let blocks = self.m.div_ceil(M::MAX_M).max(1);
        self.m.div_ceil(blocks).max(1).next_multiple_of(M::HEIGHT)
    }

    /// Nanoseconds that one thread takes, about.
    fn work<M: Method>(&self) -> usize {
        self.k.saturating_mul(self.n).saturating_mul(self.m + M::UNPACK) / M::RATE
    }

    /// Weight rows per task, for a product that is one of `groups` equal ones.
    pub fn strip<M: Method>(&self, groups: usize, threads: usize) -> usize {
        let block = self.block::<M>();
        let row = self.k.saturating_mul(self.m.min(block) + M::UNPACK).max(1);
        let tasks = (threads * 4).div_ceil(groups * self.m.div_ceil(block).max(1));
        let balanced = if threads == 1 { self.n } else { self.n.div_ceil(tasks) };
        balanced.max(M::GRAIN / row).next_multiple_of(WIDTH)
    }
}

/// The sums of a row of x times the rows of [`PANELS`] panels.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Sums(pub [f32; WIDTH]);

/// What multiplies many rows of x: a chunk of a few panels is unpacked to the first-level cache, and tiles of x pass over it.
pub(super) trait Chunks {
    /// Unpacks the values from `k` on, a multiple of [`CHUNK`], of a strip's panels.
    fn unpack<S: Simd>(&mut self, simd: S, panels: Range<usize>, k: usize);

    /// `sums[m][n] += sum over k of x[row + m, k] * weight[n, k]` for the tile of `height` rows that starts with `row`, and the
    /// values from `k` on, which are unpacked.
    fn multiply<S: Simd>(&self, simd: S, tile: (usize, usize), k: usize, sums: &mut [Sums]);
}

/// Computes `y`, which begins with row `first_m` of x and with panel `first_panel`, of a weight of rows of `k` values.
#[inline(always)]
pub(super) fn by_chunks<S: Simd>(
    simd: S,
    chunks: &mut impl Chunks,
    (first_m, first_panel): (usize, usize),
    k: usize,
    y: &mut [&mut [f32]],
) {
    if k == 0 {
        return y.iter_mut().for_each(|y| y.fill(0.0));
    }
    let (m, n) = (y.len(), y[0].len());
    let mut sums = vec![Sums([0.0; WIDTH]); m];
    for first in (0..n).step_by(WIDTH) {
        let width = WIDTH.min(n - first);
        let panel = first_panel + first / ROWS;
        sums.fill(Sums([0.0; WIDTH]));
        for start in (0..k).step_by(CHUNK) {
            let last = start + CHUNK >= k;
            if last {
                prefetch(simd, y, 0..TALLEST, first);
            }
            chunks.unpack(simd, panel..panel + width.div_ceil(ROWS), start);
            for (row, height) in heights(first_m..first_m + m, tallest::<S>()) {
                let rows = row - first_m..row - first_m + height;
                if last {
                    prefetch(simd, y, rows.end..rows.end + TALLEST, first);
                }
                chunks.multiply(simd, (row, height), start, &mut sums[rows.clone()]);
                if last {
                    for (y, sums) in y[rows.clone()].iter_mut().zip(&sums[rows]) {
                        store(simd, sums, &mut y[first..][..width]);
                    }
                }
            }
        }
    }
}

/// Asks for the results of `rows` from column `first` on: a processor that writes to what is not in a cache waits for it, and rows are
/// far from each other.
#[inline(always)]
fn prefetch<S: Simd>(simd: S, y: &[&mut [f32]], rows: Range<usize>, first: usize) {
    for y in &y[rows.start.min(y.len())..rows.end.min(y.len())] {
        for line in (0..WIDTH * size_of::<f32>()).step_by(64) {
            simd.prefetch(bytemuck::cast_slice(&y[first..]), line);
        }
    }
}

#[inline(always)]
fn store<S: Simd>(simd: S, sums: &Sums, y: &mut [f32]) {
    for (y, sums) in y.chunks_mut(S::LANES).zip(sums.0.chunks_exact(S::LANES)) {
        simd.store_partial(simd.load(sums), y);
    }
}

/// What multiplies one row: it is bound by memory, and what is read is multiplied at once.
pub(super) trait Strips {
    /// The results of some panels, each panel's in vectors. (A method, since a closure might not be inlined, and then knows no vectors.)
    fn sums<S: Simd, const PARTS: usize>(
        &mut self,
        simd: S,
        panels: [usize; STRIPS],
    ) -> [[S::V; PARTS]; STRIPS];
}

/// Computes `y` for one row of x. The panels are cut into strips that are read at the same time: memory is read faster from two places
/// than from one or four.
#[inline(always)]
pub(super) fn by_strips<S: Simd>(simd: S, strips: impl Strips, y: &mut [f32]) {
    // Each panel's rows are in one vector or two.
    if S::LANES == ROWS {
        in_parts::<S, 1>(simd, strips, y);
    } else {
        in_parts::<S, 2>(simd, strips, y);
    }
}

#[inline(always)]
fn in_parts<S: Simd, const PARTS: usize>(simd: S, mut strips: impl Strips, y: &mut [f32]) {
    assert_eq!(PARTS * S::LANES, ROWS, "a panel's rows in whole vectors");
    let count = y.len().div_ceil(ROWS);
    let strip = count.div_ceil(STRIPS);
    for first in 0..strip {
        // Where strips are shorter the last panel stands in for the one that is not there.
        let panels: [usize; STRIPS] = std::array::from_fn(|i| (i * strip + first).min(count - 1));
        for (panel, sums) in panels.into_iter().zip(strips.sums::<S, PARTS>(simd, panels)) {
            for (sum, y) in sums.into_iter().zip(y[panel * ROWS..].chunks_mut(S::LANES)) {
                simd.store_partial(sum, y);
            }
        }
    }
}

/// Rows of x in a tile: their sums, a few vectors of weights and one of x fit the registers.
pub(super) const fn tallest<S: Simd>() -> usize {
    if S::REGISTERS >= 32 { TALLEST } else { 4 }
}

/// [`tallest`] of an instruction set.
pub(super) fn tallest_of(isa: Isa) -> usize {
    struct Tallest;
    impl Kernel for Tallest {
        type Output = usize;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> usize {
            tallest::<S>()
        }
    }
    isa.dispatch(Tallest)
}

/// The tiles that `rows` are cut into: first row and height.
pub(super) fn heights(rows: Range<usize>, tallest: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut row = rows.start;
    std::iter::from_fn(move || {
        let left = rows.end - row;
        let height = [8, 4, 2, 1].into_iter().find(|&height| height <= left.min(tallest))?;
        row += height;
        Some((row - height, height))
    })
}
