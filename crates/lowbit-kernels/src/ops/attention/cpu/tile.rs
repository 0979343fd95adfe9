//! Products of matrices that fit the nearest caches.

use crate::{gemm, simd::Simd};
use std::ops::Range;

/// The left operand of a product: rows or columns a stride apart.
#[derive(Clone, Copy)]
pub(super) enum Left<'a> {
    /// Element `[i][p]` is `values[i * stride + p]`.
    Rows { values: &'a [f32], stride: usize },
    /// Element `[i][p]` is `values[p * stride + i]`.
    Columns { values: &'a [f32], stride: usize },
}

/// Rows of as many elements.
struct Rows<'a, const M: usize>([&'a [f32]; M]);

impl<const M: usize> gemm::Columns<M> for Rows<'_, M> {
    #[inline(always)]
    fn column(&self, p: usize) -> [f32; M] {
        let mut column = [0.0; M];
        for (x, row) in column.iter_mut().zip(self.0) {
            *x = row[p];
        }
        column
    }
}

/// Memory that starts with the first row's first element.
struct Columns<'a> {
    values: &'a [f32],
    stride: usize,
}

impl<const M: usize> gemm::Columns<M> for Columns<'_> {
    #[inline(always)]
    fn column(&self, p: usize) -> [f32; M] {
        *self.values[p * self.stride..].first_chunk().expect("rows of the left operand")
    }
}

/// `c[i][j] += sum over p of a[i][p] * b[p][j]` for the rows `i` of `rows` and `p` below `depth`.
/// The rows of `b` and of `c` are `columns` apart, a multiple of the lanes. (Unlike
/// [`crate::gemm`]'s, the left operand is not packed: each is used once.)
pub(super) struct Product<'a> {
    pub a: Left<'a>,
    pub b: &'a [f32],
    pub rows: Range<usize>,
    pub depth: usize,
    pub columns: usize,
}

impl Product<'_> {
    /// # Panics
    /// When an operand is too short.
    #[inline(always)]
    pub fn add_to<S: Simd>(&self, simd: S, c: &mut [f32]) {
        // A tile's sums, a row of `b` and one value of `a` fit the registers, and the sums are
        // enough to hide an addition's latency.
        if S::REGISTERS >= 32 && self.columns > S::LANES {
            self.panels::<S, 6, 4>(simd, c);
        } else if S::REGISTERS >= 32 {
            self.panels::<S, 12, 1>(simd, c);
        } else {
            self.panels::<S, 6, 2>(simd, c);
        }
    }

    #[inline(always)]
    fn panels<S: Simd, const M: usize, const V: usize>(&self, simd: S, c: &mut [f32]) {
        let mut column = 0;
        while column + V * S::LANES <= self.columns {
            self.panel::<S, M, V>(simd, c, column);
            column += V * S::LANES;
        }
        while column < self.columns {
            self.panel::<S, M, 1>(simd, c, column);
            column += S::LANES;
        }
    }

    #[inline(always)]
    fn panel<S: Simd, const M: usize, const V: usize>(&self, simd: S, c: &mut [f32], column: usize) {
        let mut row = self.rows.start;
        while row + M <= self.rows.end {
            self.tile::<S, M, V>(simd, c, row, column);
            row += M;
        }
        while row + 4 <= self.rows.end {
            self.tile::<S, 4, V>(simd, c, row, column);
            row += 4;
        }
        while row < self.rows.end {
            self.tile::<S, 1, V>(simd, c, row, column);
            row += 1;
        }
    }

    /// `M` rows of `V` vectors.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const V: usize>(
        &self,
        simd: S,
        c: &mut [f32],
        row: usize,
        column: usize,
    ) {
        let sums = match self.a {
            Left::Rows { values, stride } => {
                let mut rows = [&values[..0]; M];
                for (i, row_values) in rows.iter_mut().enumerate() {
                    *row_values = &values[(row + i) * stride..][..self.depth];
                }
                self.sums::<S, M, V>(simd, &Rows(rows), column)
            }
            Left::Columns { values, stride } => {
                self.sums::<S, M, V>(simd, &Columns { values: &values[row..], stride }, column)
            }
        };
        for (i, sums) in sums.iter().enumerate() {
            let c = &mut c[(row + i) * self.columns + column..][..V * S::LANES];
            for (v, &sum) in sums.iter().enumerate() {
                let c = &mut c[v * S::LANES..];
                simd.store(simd.add(sum, simd.load(c)), c);
            }
        }
    }

    /// The tile's sums, of which there are as many as registers take.
    #[inline(always)]
    fn sums<S: Simd, const M: usize, const V: usize>(
        &self,
        simd: S,
        a: &impl gemm::Columns<M>,
        column: usize,
    ) -> [[S::V; V]; M] {
        let mut sums = [[simd.splat(0.0); V]; M];
        let b = &self.b[..self.depth * self.columns];
        // `take` says that p is within a row of the left operand, which is this long: its elements
        // need no check then.
        for (p, b) in b.chunks_exact(self.columns).take(self.depth).enumerate() {
            let b = &b[column..][..V * S::LANES];
            let mut vectors = [simd.splat(0.0); V];
            for (v, vector) in vectors.iter_mut().enumerate() {
                *vector = simd.load(&b[v * S::LANES..]);
            }
            for (sums, a) in sums.iter_mut().zip(a.column(p)) {
                let a = simd.splat(a);
                for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                    *sum = simd.mul_add(a, vector, *sum);
                }
            }
        }
        sums
    }
}
