//! Small dense f32 products inside kernels: operands that fit a near cache, any rows, columns in
//! whole vectors.

use crate::simd::Simd;
use bytemuck::{Pod, Zeroable};
use std::ops::{Deref, DerefMut, Range};

/// Terms of a sum that are added together: rows of a right operand that a near cache holds whatever
/// their stride.
pub const DEPTH: usize = 64;

/// Numbers that start at a cache line's start: of rows of whole lines, no vector crosses into the
/// next line, which costs a second access.
#[derive(Clone, Debug, Default)]
pub struct Lines(Vec<Line>);

#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Line([f32; 16]);

impl Lines {
    /// At least `len` zeros.
    pub fn zeros(len: usize) -> Self {
        Self(vec![Line::zeroed(); len.div_ceil(16)])
    }
}

impl Deref for Lines {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        bytemuck::cast_slice(&self.0)
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// A matrix packed for products: blocks of [`DEPTH`] columns, each block row after row, zeros at
/// the end.
#[derive(Clone, Debug, Default)]
pub struct Packed {
    blocks: Vec<Block>,
    rows: usize,
    columns: usize,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Block([f32; DEPTH]);

impl Packed {
    /// Takes `rows`, which have `columns` elements each.
    #[inline(always)]
    pub fn pack<'a>(&mut self, rows: impl ExactSizeIterator<Item = &'a [f32]>, columns: usize) {
        (self.rows, self.columns) = (rows.len(), columns);
        // Rows of nothing are a block of zeros: sums of nothing are zero.
        self.blocks.resize(rows.len() * columns.div_ceil(DEPTH).max(1), Block::zeroed());
        for (i, row) in rows.enumerate() {
            assert_eq!(row.len(), columns);
            let (whole, rest) = row.as_chunks::<DEPTH>();
            for (b, part) in whole.iter().enumerate() {
                self.blocks[b * self.rows + i].0 = *part;
            }
            if !rest.is_empty() {
                let block = &mut self.blocks[whole.len() * self.rows + i].0;
                block[..rest.len()].copy_from_slice(rest);
                block[rest.len()..].fill(0.0);
            }
        }
    }

    /// Columns `b * DEPTH..` of all rows.
    #[inline(always)]
    pub fn block(&self, b: usize) -> &[[f32; DEPTH]] {
        bytemuck::cast_slice(&self.blocks[b * self.rows..][..self.rows])
    }
}

/// `y[j][i] = x[i][j]` for `i < rows` and `j < columns`; the rows of each are a stride apart.
pub fn transpose(
    (x, x_stride): (&[f32], usize),
    (y, y_stride): (&mut [f32], usize),
    (rows, columns): (usize, usize),
) {
    // Squares of a cache line a side: each line of either matrix is touched once.
    const SIDE: usize = 16;
    for first_i in (0..rows).step_by(SIDE) {
        for first_j in (0..columns).step_by(SIDE) {
            for j in first_j..columns.min(first_j + SIDE) {
                let end = rows.min(first_i + SIDE);
                for (i, y) in (first_i..end).zip(&mut y[j * y_stride + first_i..]) {
                    *y = x[i * x_stride + j];
                }
            }
        }
    }
}

/// The transpose of a packed matrix, as a left operand.
#[derive(Clone, Copy, Debug)]
pub struct Transposed<'a>(pub &'a Packed);

/// The left operand of a product.
pub trait Left: Copy {
    /// Rows `first..first + M` of columns `start..`, a multiple of [`DEPTH`].
    fn rows<const M: usize>(self, first: usize, start: usize) -> impl Columns<M>;
}

/// `M` rows of some columns. (Not closures: kernels' vectors may only pass through what is always
/// inlined.)
pub trait Columns<const M: usize> {
    /// Column `p`.
    fn column(&self, p: usize) -> [f32; M];
}

impl Left for &Packed {
    #[inline(always)]
    fn rows<const M: usize>(self, first: usize, start: usize) -> impl Columns<M> {
        self.block(start / DEPTH)[first..].first_chunk::<M>().expect("rows of the left operand")
    }
}

impl<const M: usize, const N: usize> Columns<M> for &[[f32; N]; M] {
    #[inline(always)]
    fn column(&self, p: usize) -> [f32; M] {
        let mut column = [0.0; M];
        for (x, row) in column.iter_mut().zip(*self) {
            *x = row[p];
        }
        column
    }
}

impl Left for Transposed<'_> {
    #[inline(always)]
    fn rows<const M: usize>(self, first: usize, start: usize) -> impl Columns<M> {
        Strip { rows: &self.0.block(first / DEPTH)[start..], first: first % DEPTH }
    }
}

/// A few columns of a block, which are rows of the transpose.
struct Strip<'a> {
    rows: &'a [[f32; DEPTH]],
    first: usize,
}

impl<const M: usize> Columns<M> for Strip<'_> {
    #[inline(always)]
    fn column(&self, p: usize) -> [f32; M] {
        *self.rows[p][self.first..].first_chunk().expect("tiles that do not cross blocks")
    }
}

/// The old values of a product's result.
#[derive(Clone, Copy)]
pub enum Onto {
    /// They are overwritten.
    Nothing,
    /// They are multiplied by this factor, and the product is added.
    Scaled(f32),
}

/// The sizes of a product.
#[derive(Clone)]
pub struct Extent {
    /// Rows of the left operand and of the result.
    pub rows: usize,
    /// Terms of each sum.
    pub depth: usize,
    /// Columns, a multiple of the lanes: the rows of the right operand and of the result lie this
    /// far apart.
    pub columns: usize,
}

/// `c[i][j] = onto + sum over p of a[i][p] * b[p][j]`.
///
/// # Panics
/// When an operand is shorter than `extent`, or has no columns.
#[inline(always)]
pub fn product<S: Simd>(simd: S, a: impl Left, b: &[f32], c: &mut [f32], extent: Extent, onto: Onto) {
    let Extent { rows, depth, columns } = extent;
    assert!(columns.is_multiple_of(S::LANES));
    let mut tile = Tile { simd, a, b, depth: 0..depth.min(DEPTH), columns, onto };
    loop {
        // A tile's sums, a row of `b` and one value of `a` must fit the registers.
        if S::REGISTERS >= 32 {
            tile.all::<8, 2>(c, rows);
        } else {
            tile.all::<4, 2>(c, rows);
        }
        if tile.depth.end == depth {
            return;
        }
        tile.depth = tile.depth.end..depth.min(tile.depth.end + DEPTH);
        tile.onto = Onto::Scaled(1.0);
    }
}

/// Rows of a right operand, from the first column of a tile on.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// The elements, row by row.
    pub rows: &'a [f32],
    /// The distance from one row to the next.
    pub stride: usize,
    /// Their number.
    pub count: usize,
}

/// `sums[i][j] += sum over p of a[i][p] * b[p][j]`, for at most `N` rows of `b`: as many as `a` has
/// columns.
#[inline(always)]
pub fn accumulate<S: Simd, const M: usize, const V: usize, const N: usize>(
    simd: S,
    sums: &mut [[S::V; V]; M],
    a: &impl Columns<M>,
    b: Rows,
) {
    for p in 0..b.count.min(N) {
        let row = &b.rows[p * b.stride..][..V * S::LANES];
        let mut b = [simd.splat(0.0); V];
        for (v, b) in b.iter_mut().enumerate() {
            *b = simd.load(&row[v * S::LANES..]);
        }
        for (sums, a) in sums.iter_mut().zip(a.column(p)) {
            let a = simd.splat(a);
            for (sum, &b) in sums.iter_mut().zip(&b) {
                *sum = simd.mul_add(a, b, *sum);
            }
        }
    }
}

struct Tile<'a, S, A> {
    simd: S,
    a: A,
    b: &'a [f32],
    depth: Range<usize>,
    columns: usize,
    onto: Onto,
}

impl<S: Simd, A: Left> Tile<'_, S, A> {
    /// A few columns of the right operand stay in the nearest cache while all rows pass.
    #[inline(always)]
    fn all<const M: usize, const V: usize>(&self, c: &mut [f32], rows: usize) {
        let mut column = 0;
        while column + V * S::LANES <= self.columns {
            self.panel::<M, V>(c, rows, column);
            column += V * S::LANES;
        }
        while column < self.columns {
            self.panel::<M, 1>(c, rows, column);
            column += S::LANES;
        }
    }

    /// `V` vectors of columns of the result, `M` rows at a time.
    #[inline(always)]
    fn panel<const M: usize, const V: usize>(&self, c: &mut [f32], rows: usize, column: usize) {
        let mut first = 0;
        while first + M <= rows {
            self.tile::<M, V>(c, first, column);
            first += M;
        }
        while first + 2 <= rows {
            self.tile::<2, V>(c, first, column);
            first += 2;
        }
        if first < rows {
            self.tile::<1, V>(c, first, column);
        }
    }

    #[inline(always)]
    fn tile<const M: usize, const V: usize>(&self, c: &mut [f32], first: usize, column: usize) {
        let Self { simd, a, b, columns, onto, .. } = *self;
        let mut sums = [[simd.splat(0.0); V]; M];
        if let Onto::Scaled(factor) = onto {
            for (i, sums) in sums.iter_mut().enumerate() {
                let c = &c[(first + i) * columns + column..][..V * S::LANES];
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.mul(simd.splat(factor), simd.load(&c[v * S::LANES..]));
                }
            }
        }
        let rows = a.rows::<M>(first, self.depth.start);
        let right = Rows {
            // A sum of nothing has no rows.
            rows: b.get(self.depth.start * columns + column..).unwrap_or_default(),
            stride: columns,
            count: self.depth.len(),
        };
        accumulate::<S, M, V, DEPTH>(simd, &mut sums, &rows, right);
        for (i, sums) in sums.iter().enumerate() {
            let c = &mut c[(first + i) * columns + column..][..V * S::LANES];
            for (v, sum) in sums.iter().enumerate() {
                simd.store(*sum, &mut c[v * S::LANES..]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, Kernel};
    use numcheck::{Random, assert_bits, assert_within, gamma};

    struct Product<'a, A>(A, &'a [f32], &'a mut [f32], Extent, Onto);

    impl<A: Left> Kernel for Product<'_, A> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            product(simd, self.0, self.1, self.2, self.3, self.4);
        }
    }

    #[test]
    fn rows_depth_and_columns_below_at_and_above_each_tile() {
        let mut random = Random::new(1);
        for (m, depth, columns) in
            [(1, 1, 16), (3, 5, 48), (4, 64, 64), (9, 65, 80), (13, 129, 128), (139, 7, 16), (9, 0, 48)]
        {
            let (a, b) = (random.normal(m * depth, 1.0), random.normal(depth * columns, 1.0));
            let (mut packed, mut transposed) = (Packed::default(), Packed::default());
            packed.pack((0..m).map(|i| &a[i * depth..][..depth]), depth);
            let mut rows = vec![f32::NAN; depth * m];
            transpose((&a, depth), (&mut rows, m), (m, depth));
            let want: Vec<f32> = (0..depth * m).map(|at| a[at % m * depth + at / m]).collect();
            assert_bits("transpose", &rows, &want);
            transposed.pack((0..depth).map(|p| &rows[p * m..][..m]), m);
            let start = random.normal(m * columns, 1.0);
            for (onto, factor) in [(Onto::Nothing, 0.0), (Onto::Scaled(0.75), 0.75)] {
                let term = |at: usize, p: usize| {
                    f64::from(a[at / columns * depth + p]) * f64::from(b[p * columns + at % columns])
                };
                let old = |at: usize| factor * f64::from(start[at]);
                let cells = || 0..m * columns;
                let want: Vec<f64> =
                    cells().map(|at| old(at) + (0..depth).map(|p| term(at, p)).sum::<f64>()).collect();
                let bound: Vec<f64> = cells()
                    .map(|at| old(at).abs() + (0..depth).map(|p| term(at, p).abs()).sum::<f64>())
                    .map(|sum| gamma(depth + 1) * sum)
                    .collect();
                let extent = || Extent { rows: m, depth, columns };
                for isa in Isa::all() {
                    let fresh = || match onto {
                        Onto::Nothing => vec![f32::NAN; m * columns],
                        Onto::Scaled(_) => start.clone(),
                    };
                    let (mut c, mut d) = (fresh(), fresh());
                    isa.dispatch(Product(&packed, &b, &mut c, extent(), onto));
                    let left = Transposed(&transposed);
                    isa.dispatch(Product(left, &b, &mut d, extent(), onto));
                    assert_within(&c, &want, |i| bound[i]);
                    assert_bits("transposed", &d, &c);
                }
            }
        }
    }
}
