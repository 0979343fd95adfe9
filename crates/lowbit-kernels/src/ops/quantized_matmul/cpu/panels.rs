//! Products of weights in [panels](crate::panels), by one [`Method`] or another: each x is rounded once for all weights that read
//! it, and the results are cut into tasks of whole panels.

use super::{Group, cut};
use crate::Cpu;
use crate::panels::{Layout, PANELS, ROWS, Unpack};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Weight rows that are unpacked side by side: tasks' borders fall on multiples of this.
pub(super) const WIDTH: usize = PANELS * ROWS;

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
    weight: Unpack<'a>,
    operand: usize,
    m: usize,
    panel: usize,
    y: Vec<&'a mut [f32]>,
}

/// Computes all `products`.
pub(super) fn run<M: Method>(cpu: &Arc<Cpu>, method: &M, products: Vec<Product<'_>>) {
    let count = products.iter().map(|product| product.groups.len()).sum();
    let (mut operands, mut tasks, mut work) = (Vec::with_capacity(count), Vec::new(), 0usize);
    // Weights of one layer read the same x, and so do experts that serve one token.
    let mut known = BTreeMap::new();
    for Product { weight, n, groups } in products {
        let layout = weight.layout;
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
        method.multiply(cpu, Piece { weight, x: &operands[operand], m, panel, y: &mut y });
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
