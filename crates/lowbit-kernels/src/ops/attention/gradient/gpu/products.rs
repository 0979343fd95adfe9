//! The five products of tiles. A unit computes [`EACH_ROWS`] rows of 4 columns, four terms at a
//! time, which it loads in vectors of four: either four terms of a row, or one term of four rows.

use super::{SPAN, Sizes, Widths, row_of_token};
use crate::gpu::launch::kernel;
use crate::gpu::rows::VECTOR;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The sides of the square of units that is a cube.
const SIDE: usize = 8;
/// Units of a cube.
pub(super) const CUBE: usize = SIDE * SIDE;
/// Rows of a unit: whole vectors, and a divisor of a span.
pub(super) const EACH_ROWS: usize = 2 * VECTOR;
/// Rows and columns of a cube.
pub(super) const CUBE_ROWS: usize = SIDE * EACH_ROWS;
pub(super) const CUBE_COLUMNS: usize = SIDE * VECTOR;

/// A unit's results: from this row and column of a product on.
#[derive(CubeType)]
struct Place {
    product: usize,
    row: usize,
    column: usize,
}

/// This unit's, of products of `rows` and `columns`. Neighbours have neighbouring columns.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn place(rows: usize, columns: usize) -> Place {
    let across = (columns + comptime!(CUBE_COLUMNS - 1)) / CUBE_COLUMNS;
    let down = (rows + comptime!(CUBE_ROWS - 1)) / CUBE_ROWS;
    let (unit, tile) = (UNIT_POS_X as usize, CUBE_POS % (across * down));
    Place {
        product: CUBE_POS / (across * down),
        row: tile / across * CUBE_ROWS + unit / SIDE * EACH_ROWS,
        column: tile % across * CUBE_COLUMNS + unit % SIDE * VECTOR,
    }
}

/// Four terms of a unit's rows or columns: [`VECTOR`] squares of 4 x 4.
#[cube]
fn put(values: &mut Array<f32>, vector: Vector<f32, Const<4>>, #[comptime] at: usize) {
    #[unroll]
    for i in 0..VECTOR {
        values[at * VECTOR + i] = vector.extract(i);
    }
}

/// The terms of a unit that are in one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Vectors {
    /// Four terms of a row: row `i` is vector `i`.
    Row,
    /// A term of four rows: term `k` of rows `4 i..4 i + 4` is vector `4 i + k`.
    Term,
}

impl Vectors {
    /// The place of term `k` of row `i`.
    fn at(self, i: usize, k: usize) -> usize {
        match self {
            Self::Row => i * VECTOR + k,
            Self::Term => (i / VECTOR * VECTOR + k) * VECTOR + i % VECTOR,
        }
    }
}

/// Adds four terms to each of the sums.
#[cube]
fn add_products(
    left: &Array<f32>,
    right: &Array<f32>,
    sums: &mut Array<f32>,
    #[comptime] lefts: Vectors,
    #[comptime] rights: Vectors,
) {
    #[unroll]
    for k in 0..VECTOR {
        #[unroll]
        for i in 0..EACH_ROWS {
            #[unroll]
            for j in 0..VECTOR {
                let (a, b) = (left[comptime!(lefts.at(i, k))], right[comptime!(rights.at(j, k))]);
                sums[i * VECTOR + j] = fma(a, b, sums[i * VECTOR + j]);
            }
        }
    }
}

#[cube]
fn no_sums() -> Array<f32> {
    let mut sums = Array::<f32>::new(comptime!(EACH_ROWS * VECTOR));
    #[unroll]
    for i in 0..comptime!(EACH_ROWS * VECTOR) {
        sums[i] = 0.0;
    }
    sums
}

/// `out[g, row, j] = x[row] . k[g, j]`, where any row of the span sees a key of the unit; the
/// others are not written.
#[kernel]
pub(super) fn attention_backward_scores(
    x: &[Vector<f32, Const<4>>],
    k: &[Vector<f32, Const<4>>],
    spans: &[Vector<u32, Const<4>>],
    out: &mut [Vector<f32, Const<4>>],
    sizes: Sizes,
    vectors: u32,
    #[comptime] group: usize,
) {
    let (rows, capacity, vectors) = (sizes.rows as usize, sizes.capacity as usize, vectors as usize);
    let place = place(rows, capacity);
    if place.product < sizes.heads as usize && place.row < rows && place.column < capacity {
        let span = spans[place.row / SPAN];
        if place.column as u32 + 4u32 > span.extract(0usize) && (place.column as u32) < span.extract(1usize) {
            let mut xs = Array::<u32>::new(EACH_ROWS);
            #[unroll]
            for i in 0..EACH_ROWS {
                // Rows and keys past the last are computed and not used.
                let row = row_of_token(&sizes, place.product, min(place.row + i, rows - 1), group);
                xs[i] = (row * vectors) as u32;
            }
            let mut ks = Array::<u32>::new(VECTOR);
            #[unroll]
            for j in 0..VECTOR {
                let key = place.product * capacity + min(place.column + j, capacity - 1);
                ks[j] = (key * vectors) as u32;
            }
            let mut sums = no_sums();
            let mut left = Array::<f32>::new(comptime!(EACH_ROWS * VECTOR));
            let mut right = Array::<f32>::new(comptime!(VECTOR * VECTOR));
            let mut term = 0usize;
            while term < vectors {
                #[unroll]
                for i in 0..EACH_ROWS {
                    put(&mut left, x[xs[i] as usize + term], i);
                }
                #[unroll]
                for j in 0..VECTOR {
                    put(&mut right, k[ks[j] as usize + term], j);
                }
                add_products(&left, &right, &mut sums, Vectors::Row, Vectors::Row);
                term += 1;
            }
            let first = (place.product * sizes.padded as usize + place.row) * sizes.columns as usize;
            #[unroll]
            for i in 0..EACH_ROWS {
                let mut row = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for j in 0..VECTOR {
                    row.insert(j, sums[i * VECTOR + j]);
                }
                out[first + i * sizes.columns as usize + place.column / VECTOR] = row;
            }
        }
    }
}

/// `dq[row] = sum over the j that any row of the span sees of gradients[g, row, j] * k[g, j]`; NaN
/// where a position is beyond the capacity.
#[kernel]
pub(super) fn attention_backward_queries(
    gradients: &[Vector<f32, Const<4>>],
    k: &[Vector<f32, Const<4>>],
    spans: &[Vector<u32, Const<4>>],
    positions: &[u32],
    dq: &mut [f32],
    sizes: Sizes,
    widths: Widths,
    #[comptime] group: usize,
) {
    let (rows, width, columns) = (sizes.rows as usize, widths.elements as usize, sizes.columns as usize);
    let place = place(rows, width);
    let (head, capacity) = (place.product, sizes.capacity as usize);
    if head < sizes.heads as usize && place.row < rows && place.column < width {
        let span = spans[place.row / SPAN];
        let first = (head * sizes.padded as usize + place.row) * columns;
        let mut sums = no_sums();
        let mut left = Array::<f32>::new(comptime!(EACH_ROWS * VECTOR));
        let mut right = Array::<f32>::new(comptime!(VECTOR * VECTOR));
        let mut vector = span.extract(0usize) as usize / VECTOR;
        while vector * VECTOR < span.extract(1usize) as usize {
            #[unroll]
            for i in 0..EACH_ROWS {
                put(&mut left, gradients[first + i * columns + vector], i);
            }
            #[unroll]
            for j in 0..VECTOR {
                // Keys past the last have a gradient of 0.
                let key = head * capacity + min(vector * VECTOR + j, capacity - 1);
                put(&mut right, k[key * widths.vectors as usize + place.column / VECTOR], j);
            }
            let key = (vector * VECTOR) as u32;
            if key < span.extract(2usize) || key + 4u32 > span.extract(3usize) {
                finite_or_zero(&mut right);
            }
            add_products(&left, &right, &mut sums, Vectors::Row, Vectors::Term);
            vector += 1;
        }
        #[unroll]
        for i in 0..EACH_ROWS {
            if place.row + i < rows {
                let position = positions[sizes.first as usize + (place.row + i) / group];
                let at = row_of_token(&sizes, head, place.row + i, group) * width + place.column;
                #[unroll]
                for j in 0..VECTOR {
                    if place.column + j < width {
                        let nan = f32::reinterpret(0x7fc0_0000u32);
                        dq[at + j] = select(position < sizes.capacity, sums[i * VECTOR + j], nan);
                    }
                }
            }
        }
    }
}

/// Keys that no query sees may hold anything, and what is not finite times their gradient of 0 is
/// NaN. A query that sees such a key has gradients that are NaN.
#[cube]
fn finite_or_zero(values: &mut Array<f32>) {
    #[unroll]
    for i in 0..comptime!(VECTOR * VECTOR) {
        let finite = (u32::reinterpret(values[i]) & 0x7f80_0000u32) != 0x7f80_0000u32;
        values[i] = select(finite, values[i], 0.0f32.runtime());
    }
}

/// `parts[split, g, j] = sum over rows of pairs[g, row, j] * x[row]`, over the rows of `per_split`
/// spans.
#[kernel]
pub(super) fn attention_backward_keys(
    pairs: &[Vector<f32, Const<4>>],
    x: &[Vector<f32, Const<4>>],
    spans: &[Vector<u32, Const<4>>],
    parts: &mut [f32],
    sizes: Sizes,
    widths: Widths,
    splits: u32,
    per_split: u32,
    #[comptime] group: usize,
) {
    let (capacity, width, columns) =
        (sizes.capacity as usize, widths.elements as usize, sizes.columns as usize);
    let place = place(capacity, width);
    let (split, head) = (place.product / sizes.heads as usize, place.product % sizes.heads as usize);
    if split < splits as usize && place.row < capacity && place.column < width {
        let mut sums = no_sums();
        let mut left = Array::<f32>::new(comptime!(EACH_ROWS * VECTOR));
        let mut right = Array::<f32>::new(comptime!(VECTOR * VECTOR));
        let key = place.row as u32;
        let mut span = split * per_split as usize;
        let end = min(span + per_split as usize, sizes.padded as usize / SPAN);
        while span < end {
            let seen = spans[span];
            let mut row = span * SPAN;
            let mut row_end = row;
            if key + comptime!(EACH_ROWS as u32) > seen.extract(0usize) && key < seen.extract(1usize) {
                row_end = row + SPAN;
            }
            while row < row_end {
                #[unroll]
                for k in 0..VECTOR {
                    let first = (head * sizes.padded as usize + row + k) * columns + place.row / VECTOR;
                    #[unroll]
                    for i in 0..comptime!(EACH_ROWS / VECTOR) {
                        put(&mut left, pairs[first + i], comptime!(i * VECTOR + k));
                    }
                    // The pairs of rows past the last are 0.
                    let from = row_of_token(&sizes, head, min(row + k, sizes.rows as usize - 1), group);
                    put(&mut right, x[from * widths.vectors as usize + place.column / VECTOR], k);
                }
                add_products(&left, &right, &mut sums, Vectors::Term, Vectors::Term);
                row += VECTOR;
            }
            span += 1;
        }
        #[unroll]
        for i in 0..EACH_ROWS {
            #[unroll]
            for j in 0..VECTOR {
                if place.row + i < capacity && place.column + j < width {
                    let at = (place.product * capacity + place.row + i) * width + place.column + j;
                    parts[at] = sums[i * VECTOR + j];
                }
            }
        }
    }
}

/// Adds to `out` the sum of `splits` parts.
#[kernel]
pub(super) fn attention_backward_sum(parts: &[f32], out: &mut [f32], len: u32, splits: u32) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        let mut sum = out[i];
        for part in 0..splits as usize {
            sum += parts[part * len as usize + i];
        }
        out[i] = sum;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}
