//! Products of weights in [panels](crate::panels), by one [`Method`] or another: each x is rounded
//! once for all weights that read it, and the results are cut into tasks of whole panels.

use super::{Group, PieceRows, cut};
use crate::Cpu;
use crate::ops::glu::cpu::{Formula, Glu};
use crate::ops::glu::{Gate, with_gate};
use crate::panels::{CHUNK, Layout, PANELS, ROWS, Unpack};
use crate::simd::{Kernel, Simd, slices::Map};
use std::collections::BTreeMap;
use std::marker::PhantomData;
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
    /// Rows of x that one task takes at most: what they are rounded to stays in the second-level
    /// cache.
    const MAX_M: usize;
    /// Rows of x in the tallest tile. All others divide it, and it divides [`Self::MAX_M`].
    const HEIGHT: usize;
    /// Multiplications that are worth handing to another thread.
    const GRAIN: usize;
    /// The cost of unpacking a code, in multiplications.
    const UNPACK: usize;
    /// Multiplications that a thread does in a nanosecond, about.
    const RATE: usize;

    /// Rounds `x`, `[m, k]`, for weights of a layout.
    fn round(&self, cpu: &Arc<Cpu>, x: &[f32], m: usize, layout: &Layout) -> Self::X;

    /// The part of a layout that, besides k, decides the rounding of x.
    type Key: Ord;
    fn key(layout: &Layout) -> Self::Key;

    /// Computes a piece of a result.
    fn multiply(&self, cpu: &Arc<Cpu>, piece: Piece<'_, '_, Self::X>);
}

/// A piece of one group's result: `y[m, n] = sum over k of x[m, k] * weight[n, k]`.
pub(super) struct Piece<'a, 'y, X> {
    pub weight: Unpack<'a>,
    pub epilogue: Epilogue,
    pub x: &'a X,
    /// The first row of x, and the first panel, counted over all matrices.
    pub m: usize,
    pub panel: usize,
    /// The piece, row by row.
    pub y: &'a mut [&'y mut [f32]],
}

/// The step that follows the sums of panels that are multiplied side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Epilogue {
    /// Results.
    Store,
    /// Panels are of two weights in turn, and the sums of both become `glu(second, first)`.
    Glu(Gate),
}

impl Epilogue {
    /// Columns of the result that [`PANELS`] panels give.
    pub fn columns(self) -> usize {
        match self {
            Self::Store => WIDTH,
            Self::Glu(_) => ROWS,
        }
    }

    /// The panels that give the columns from `first` on, a multiple of [`Self::columns`], so many
    /// of them.
    #[inline(always)]
    pub fn panels(self, first: usize, columns: usize) -> Range<usize> {
        let first = first / self.columns() * PANELS;
        match self {
            Self::Store => first..first + columns.div_ceil(ROWS),
            Self::Glu(_) => first..first + PANELS,
        }
    }

    /// Writes up to [`Self::columns`] results of a row.
    #[inline(always)]
    pub fn store<S: Simd>(self, simd: S, sums: [&[f32; ROWS]; PANELS], y: &mut [f32]) {
        match self {
            Self::Store => {
                for at in (0..ROWS).step_by(S::LANES) {
                    store_from(simd, simd.load(&sums[0][at..]), at, y);
                    store_from(simd, simd.load(&sums[1][at..]), ROWS + at, y);
                }
            }
            Self::Glu(by) => simd.call(StoreGlu { by, sums, y }),
        }
    }
}

/// Writes up to [`ROWS`] results of a row. Not inlined: all gates' formulas would stand in the
/// kernel of each format.
struct StoreGlu<'a> {
    by: Gate,
    sums: [&'a [f32; ROWS]; PANELS],
    y: &'a mut [f32],
}

impl Kernel for StoreGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { by, sums, y } = self;
        with_gate!(by, G => {
            for at in (0..ROWS).step_by(S::LANES) {
                store_from(simd, glu::<S, G>(simd, sums, at), at, y);
            }
        });
    }
}

/// Writes those lanes of `v` that `y` has elements for from `at` on. (Not by iterators over chunks:
/// a zip of them was not inlined, and took an eighth of a prompt.)
#[inline(always)]
fn store_from<S: Simd>(simd: S, v: S::V, at: usize, y: &mut [f32]) {
    let end = y.len().min(at + S::LANES);
    if at < end {
        simd.store_partial(v, &mut y[at..end]);
    }
}

/// `glu(up, gate)` of the rows from `at` on.
#[inline(always)]
pub(super) fn glu<S: Simd, G: Formula>(simd: S, [gate, up]: [&[f32; ROWS]; PANELS], at: usize) -> S::V {
    Glu::<G>(PhantomData).apply(simd, [simd.load(&up[at..]), simd.load(&gate[at..])])
}

/// A weight and what it multiplies; the results have `n` columns.
pub(super) struct Product<'a> {
    pub weight: Unpack<'a>,
    pub epilogue: Epilogue,
    pub n: usize,
    pub groups: Vec<Group<'a>>,
}

/// The place of a piece.
struct Task<'a> {
    /// The indices among all weights and among all operands.
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
    let weights: Vec<_> = products.iter().map(|product| (product.weight, product.epilogue)).collect();
    // Weights of one layer read the same x, and so do experts that serve one token.
    let mut known = BTreeMap::new();
    for (weight, Product { n, groups, .. }) in products.into_iter().enumerate() {
        let (Unpack { layout, .. }, epilogue) = weights[weight];
        for group in groups {
            let size = Size { m: group.y.len() / n, n, k: layout.k(), rows: WIDTH / epilogue.columns() };
            let operand = *known.entry((group.x.as_ptr(), size.m, M::key(&layout))).or_insert_with(|| {
                operands.push(method.round(cpu, group.x, size.m, &layout));
                operands.len() - 1
            });
            work = work.saturating_add(size.work::<M>());
            let first_panel = group.weight_row / n * layout.panels() * size.rows;
            let (block, strip) = (size.block::<M>(), size.strip::<M>(count, cpu.threads()));
            cut(group.y, n, block, strip, |m, first_n, y| {
                tasks.push(Task { weight, operand, m, panel: first_panel + first_n / ROWS * size.rows, y });
            });
        }
    }
    cpu.for_each_of(work, tasks, |Task { weight, operand, m, panel, mut y }| {
        let ((weight, epilogue), x) = (weights[weight], &operands[operand]);
        method.multiply(cpu, Piece { weight, epilogue, x, m, panel, y: y.each() });
    });
}

/// Computes `y`, `[m, n]`, of an x that is rounded already.
#[cfg(any(test, target_arch = "x86_64"))]
pub(super) fn run_rounded<M: Method>(
    cpu: &Arc<Cpu>,
    method: &M,
    (weight, x): (Unpack<'_>, &M::X),
    size: &Size,
    y: &mut [f32],
) {
    let mut tasks = Vec::new();
    cut(y, size.n, size.block::<M>(), size.strip::<M>(1, cpu.threads()), |m, first_n, y| {
        tasks.push((m, first_n / ROWS * size.rows, y));
    });
    cpu.for_each_of(size.work::<M>(), tasks, |(m, panel, mut y)| {
        method.multiply(cpu, Piece { weight, epilogue: Epilogue::Store, x, m, panel, y: y.each() });
    });
}

/// The sizes of a product.
pub(super) struct Size {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Weight rows for each of the n columns: 1 or 2.
    pub rows: usize,
}

impl Size {
    /// Rows of x per task: as many in each as possible, in whole tiles.
    pub fn block<M: Method>(&self) -> usize {
        let blocks = self.m.div_ceil(M::MAX_M).max(1);
        self.m.div_ceil(blocks).max(1).next_multiple_of(M::HEIGHT)
    }

    /// Nanoseconds that one thread takes, about.
    pub fn work<M: Method>(&self) -> usize {
        self.k.saturating_mul(self.rows * self.n).saturating_mul(self.m + M::UNPACK) / M::RATE
    }

    /// Columns per task, for a product that is one of `groups` equal ones.
    pub fn strip<M: Method>(&self, groups: usize, threads: usize) -> usize {
        let block = self.block::<M>();
        let row = (self.rows * self.k).saturating_mul(self.m.min(block) + M::UNPACK).max(1);
        let tasks = (threads * 4).div_ceil(groups * self.m.div_ceil(block).max(1));
        let balanced = if threads == 1 { self.n } else { self.n.div_ceil(tasks) };
        balanced.max(M::GRAIN / row).next_multiple_of(WIDTH)
    }
}

/// The sums of a row of x times the rows of [`PANELS`] panels.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Sums(pub [f32; WIDTH]);

impl Sums {
    #[inline(always)]
    fn panels(&self) -> [&[f32; ROWS]; PANELS] {
        let panels = self.0.as_chunks().0;
        std::array::from_fn(|panel| &panels[panel])
    }
}

/// A method for many rows of x: a chunk of a few panels is unpacked to the first-level cache, and
/// tiles of x pass over it.
pub(super) trait Chunks {
    /// Unpacks the values from `k` on, a multiple of [`CHUNK`], of a strip's panels.
    fn unpack<S: Simd>(&mut self, simd: S, panels: Range<usize>, k: usize);

    /// `sums[m][n] += sum over k of x[row + m, k] * weight[n, k]` for the tile of `height` rows
    /// that starts with `row`, and the values from `k` on, which are unpacked.
    fn multiply<S: Simd>(&self, simd: S, tile: (usize, usize), k: usize, sums: &mut [Sums]);
}

/// Computes `y`, which begins with row `first_m` of x and with panel `first_panel` of the weight.
#[inline(always)]
pub(super) fn by_chunks<S: Simd>(
    simd: S,
    chunks: &mut impl Chunks,
    (first_m, first_panel): (usize, usize),
    (k, epilogue): (usize, Epilogue),
    y: &mut [&mut [f32]],
) {
    if k == 0 {
        return y.iter_mut().for_each(|y| y.fill(0.0));
    }
    let (m, n) = (y.len(), y[0].len());
    let mut sums = vec![Sums([0.0; WIDTH]); m];
    for first in (0..n).step_by(epilogue.columns()) {
        let columns = epilogue.columns().min(n - first);
        let panels = epilogue.panels(first, columns);
        let panels = first_panel + panels.start..first_panel + panels.end;
        sums.fill(Sums([0.0; WIDTH]));
        for start in (0..k).step_by(CHUNK) {
            let last = start + CHUNK >= k;
            if last {
                prefetch(simd, y, 0..TALLEST, first);
            }
            chunks.unpack(simd, panels.clone(), start);
            for (row, height) in heights(first_m..first_m + m, tallest(S::REGISTERS)) {
                let rows = row - first_m..row - first_m + height;
                if last {
                    prefetch(simd, y, rows.end..rows.end + TALLEST, first);
                }
                chunks.multiply(simd, (row, height), start, &mut sums[rows.clone()]);
                if last {
                    for (y, sums) in y[rows.clone()].iter_mut().zip(&sums[rows]) {
                        epilogue.store(simd, sums.panels(), &mut y[first..][..columns]);
                    }
                }
            }
        }
    }
}

/// Asks for the results of `rows` from column `first` on: a processor that writes to what is not in
/// a cache waits for it, and rows are far from each other.
#[inline(always)]
fn prefetch<S: Simd>(simd: S, y: &[&mut [f32]], rows: Range<usize>, first: usize) {
    for y in &y[rows.start.min(y.len())..rows.end.min(y.len())] {
        for line in (0..WIDTH * size_of::<f32>()).step_by(64) {
            simd.prefetch(bytemuck::cast_slice(&y[first..]), line);
        }
    }
}

/// A method for `M` rows, one or a few: it is bound by memory, and codes are multiplied as soon as
/// they are read.
pub(super) trait Strips<const M: usize> {
    /// The results of some panels, by vectors of their rows. (A method, since a closure might not
    /// be inlined, and then knows no vectors.)
    fn sums<S: Simd, const PARTS: usize>(
        &mut self,
        simd: S,
        panels: [usize; STRIPS],
    ) -> [[[S::V; M]; PARTS]; STRIPS];
}

/// Computes the rows `y`, of as many rows of x. The panels are cut into strips that are read at the
/// same time, unless they are of two weights: memory is read faster from two places than from one
/// or four.
#[inline(always)]
pub(super) fn by_strips<S: Simd, const M: usize>(
    simd: S,
    strips: impl Strips<M>,
    epilogue: Epilogue,
    y: &mut [&mut [f32]],
) {
    // Each panel's rows are in one vector or two.
    if S::LANES == ROWS {
        in_parts::<S, 1, M>(simd, strips, epilogue, y);
    } else {
        in_parts::<S, 2, M>(simd, strips, epilogue, y);
    }
}

#[inline(always)]
fn in_parts<S: Simd, const PARTS: usize, const M: usize>(
    simd: S,
    mut strips: impl Strips<M>,
    epilogue: Epilogue,
    y: &mut [&mut [f32]],
) {
    assert_eq!(PARTS * S::LANES, ROWS, "a panel's rows in whole vectors");
    let count = y[0].len().div_ceil(ROWS);
    // Panels that are read at the same time are `apart`, the next ones are `step` on.
    let (strip, step, apart, panels) = match epilogue {
        Epilogue::Store => (count.div_ceil(STRIPS), 1, count.div_ceil(STRIPS), count),
        Epilogue::Glu(_) => (count, PANELS, 1, PANELS * count),
    };
    for first in 0..strip {
        // For the shorter strips the last panel stands in for the one that is missing.
        let panels: [usize; STRIPS] = std::array::from_fn(|i| (first * step + i * apart).min(panels - 1));
        let mut stored = [[[0.0; ROWS]; STRIPS]; M];
        for (strip, sums) in strips.sums::<S, PARTS>(simd, panels).iter().enumerate() {
            for (part, sums) in sums.iter().enumerate() {
                for (&sum, stored) in sums.iter().zip(&mut stored) {
                    simd.store(sum, &mut stored[strip][part * S::LANES..]);
                }
            }
        }
        for (sums, y) in stored.iter().zip(&mut *y) {
            simd.call(StoreRow { epilogue, panels, sums, y });
        }
    }
}

/// Writes a row of the results of [`Strips::sums`]. Not inlined, and nothing before it depends on
/// the epilogue: LLVM would make two loops of the kernel of each format.
struct StoreRow<'a> {
    epilogue: Epilogue,
    panels: [usize; STRIPS],
    sums: &'a [[f32; ROWS]; STRIPS],
    y: &'a mut [f32],
}

impl Kernel for StoreRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { epilogue, panels, sums, y } = self;
        match epilogue {
            Epilogue::Store => {
                for (panel, sums) in panels.into_iter().zip(sums) {
                    for at in (0..ROWS).step_by(S::LANES) {
                        store_from(simd, simd.load(&sums[at..]), panel * ROWS + at, y);
                    }
                }
            }
            Epilogue::Glu(by) => {
                let first = panels[0] / PANELS * ROWS;
                let end = y.len().min(first + ROWS);
                StoreGlu { by, sums: sums.each_ref(), y: &mut y[first..end] }.run(simd);
            }
        }
    }
}

/// Rows of x in a tile: their sums, a few vectors of weights and one of x fit the registers.
pub(super) const fn tallest(registers: usize) -> usize {
    if registers >= 32 { TALLEST } else { 4 }
}

/// The tiles that `rows` are cut into: first row and height.
pub(super) fn heights(rows: Range<usize>, tallest: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    let mut row = rows.start;
    std::iter::from_fn(move || {
        let left = rows.end - row;
        let height = [8, 4, 2, 1].into_iter().find(|&height| height <= left.min(tallest))?;
        row += height;
        Some((row - height, height))
    })
}
