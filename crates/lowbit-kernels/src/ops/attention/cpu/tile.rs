//! Products of matrices that fit the nearest caches.

use crate::simd::Simd;
use std::ops::Range;

/// A matrix whose element `[i][p]` is `values[i * row + p * column]`: one of the two is 1 in a plain matrix, the
/// other in its transpose.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub values: &'a [f32],
    pub row: usize,
    pub column: usize,
}

/// `c[i][j] += sum over p of a[i][p] * b[p][j]` for the rows `i` of `rows` and `p` below `depth`. The rows of `b` and
/// of `c` are `columns` apart, a multiple of the lanes. (Unlike [`crate::gemm`]'s, the left operand is not packed:
/// each is used once.)
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
        // A tile's sums, a row of `b` and one value of `a` fit the registers, and the sums are enough to hide an
        // addition's latency.
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
        let Left { values, row: row_stride, column: column_stride } = self.a;
        let mut sums = [[simd.splat(0.0); V]; M];
        let b = &self.b[..self.depth * self.columns];
        for (p, b) in b.chunks_exact(self.columns).enumerate() {
            let mut vectors = [simd.splat(0.0); V];
            for (v, vector) in vectors.iter_mut().enumerate() {
                *vector = simd.load(&b[column + v * S::LANES..]);
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let a = simd.splat(values[(row + i) * row_stride + p * column_stride]);
                for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                    *sum = simd.mul_add(a, vector, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let c = &mut c[(row + i) * self.columns + column..][..V * S::LANES];
            for (v, &sum) in sums.iter().enumerate() {
                let c = &mut c[v * S::LANES..];
                simd.store(simd.add(sum, simd.load(c)), c);
            }
        }
    }
}
