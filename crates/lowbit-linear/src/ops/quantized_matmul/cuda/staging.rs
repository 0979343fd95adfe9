//! The memory that cubes on tensor cores share for few rows of x: a chunk of x in the order that
//! products take it, and sums.

use super::numbers::Numbers;
use crate::gpu::cuda::ptx::{register, shared};
use crate::gpu::float::{narrow, widen};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The layout of a shared chunk of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Staging {
    pub numbers: Numbers,
    /// Rows of x per cube.
    pub m_tile: usize,
    /// Values of a chunk's row.
    pub values: usize,
    /// Vectors of 8 values from one row to the next.
    pub row: usize,
    /// Values that a unit brings at a time: whole pairs of codes.
    pub part: usize,
    /// Values that are added up, a power of two; sums are not needed where it is 0.
    pub group: usize,
    /// Sums from one row to the next.
    pub sums: usize,
    pub order: Order,
    /// Units of a cube.
    pub units: usize,
    /// True if rows of x are [listed](Rows::list).
    pub listed: bool,
}

/// The order of a row's values, in vectors of 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Order {
    /// Spans of so many vectors, one apart, so that four units read different banks; after all rows
    /// as many zeros.
    Spans { vectors: usize },
    /// The first vectors of all quarters of a group of so many vectors, then all second ones; group
    /// after group.
    Quarters { vectors: usize },
}

impl Staging {
    /// Values of all rows that a unit takes at a time, in parts.
    fn batch(self) -> usize {
        // Registers for more would leave a multiprocessor fewer cubes; few rows are listed.
        let values = if self.listed { 32 } else { 64 };
        (values / self.part).min((self.m_tile * self.values / self.part).div_ceil(self.units))
    }

    /// Vectors of zeros after all rows.
    fn zeros(self) -> usize {
        match self.order {
            Order::Spans { vectors } => vectors,
            Order::Quarters { .. } => 0,
        }
    }

    /// Units that have parts of a group.
    fn sharing(self) -> usize {
        (self.group / self.part).max(1)
    }
}

/// The place of vector `at` of a row.
#[cube]
fn swizzled(at: usize, #[comptime] staging: Staging) -> usize {
    match comptime!(staging.order) {
        Order::Spans { vectors } => at + at / vectors,
        Order::Quarters { vectors } => {
            let (within, quarter) = (at % vectors, comptime!(vectors / 4));
            at - within + within % quarter * 4 + within / quarter
        }
    }
}

/// A chunk's first run, and the runs of a row.
#[derive(CubeType)]
pub(super) struct Chunk {
    pub first: usize,
    pub runs: usize,
}

/// The rows that a cube takes: of x, and of y.
#[derive(CubeType)]
pub(super) struct Rows {
    /// Their number.
    pub count: usize,
    /// If they follow each other: the first run of x, and the first row of y.
    pub run: usize,
    pub y: usize,
    /// If they are listed: where the cube's units share a word for each, see [`listed`].
    pub list: u32,
}

/// The list's word for a row: that of y, below 2^16, and that of x.
#[cube]
pub(super) fn listed(y: u32, x: u32) -> u32 {
    y | (x << 16u32)
}

/// The word of the `column`-th of the listed rows.
#[cube]
fn word_of(rows: &Rows, column: usize) -> u32 {
    shared::<u32, Const<1>>(register(rows.list + 4u32 * column as u32), 0usize, 1usize).extract(0usize)
}

/// The first run of x of the `column`-th row, whose rows have `runs`.
#[cube]
fn run_of(rows: &Rows, column: usize, runs: usize, #[comptime] listed: bool) -> usize {
    if comptime!(listed) {
        (word_of(rows, column) >> 16u32) as usize * runs
    } else {
        rows.run + column * runs
    }
}

/// The `column`-th row of y.
#[cube]
fn y_of(rows: &Rows, column: usize, #[comptime] listed: bool) -> usize {
    if comptime!(listed) { (word_of(rows, column) & 0xffffu32) as usize } else { rows.y + column }
}

/// A cube's shared chunk of x: values and sums of groups, as [`Staging`] says.
#[derive(CubeType)]
pub(super) struct Staged {
    pub values: Shared<[Vector<u32, Const<4>>]>,
    pub sums: Shared<[f32]>,
}

/// Brings a chunk of rows of x to where the cube's units share it, with zeros up to whole chunks,
/// and the sums of its groups. Of listed rows, those past every 8 that there are rows among are
/// left out.
#[cube]
pub(super) fn stage(
    x: &[Vector<u32, Const<4>>],
    rows: &Rows,
    chunk: &Chunk,
    to: &mut Staged,
    #[comptime] staging: Staging,
) {
    let (units, batch) = comptime!((staging.units, staging.batch()));
    let (vectors, parts) = comptime!((staging.part / 8, staging.values / staging.part));
    let a_run = comptime!(32 / staging.part);
    let whole = comptime!((staging.m_tile * parts).is_multiple_of(batch * units) && !staging.listed);
    let mut columns = staging.m_tile.runtime();
    if comptime!(staging.listed) {
        columns = rows.count.div_ceil(8usize) * 8;
    }
    let mut first = UNIT_POS_X as usize;
    if first < comptime!(staging.zeros()) {
        to.values[comptime!(staging.m_tile * staging.row) + first] = Vector::new(0u32);
    }
    while first < columns * parts {
        let mut words = Array::<u32>::new(comptime!(batch * 4 * vectors));
        // All loads of a batch are under way at a time.
        #[unroll]
        for i in 0..batch {
            let (column, at) = column_and_part(first, i, staging);
            let part = chunk.first * a_run + at;
            #[unroll]
            for j in 0..comptime!(4 * vectors) {
                words[i * 4 * vectors + j] = 0u32;
            }
            if column < rows.count && part < chunk.runs * a_run {
                let run = run_of(rows, column, chunk.runs, staging.listed);
                #[unroll]
                for v in 0..vectors {
                    let vector = x[(run * a_run + part) * vectors + v];
                    #[unroll]
                    for j in 0..4usize {
                        words[(i * vectors + v) * 4 + j] = vector.extract(j);
                    }
                }
            }
        }
        #[unroll]
        for i in 0..batch {
            let (column, at) = column_and_part(first, i, staging);
            let mut there = true;
            if comptime!(!whole) {
                // All of a plane's units or none.
                there = column < columns;
            }
            if there {
                keep(&words, comptime!(i * 4 * vectors), column, at, to, staging);
            }
        }
        first += comptime!(batch * units);
    }
}

/// The row of x and the part of it that a unit brings as the `i`-th of a batch, its first the
/// `first`-th of the chunk.
#[cube]
fn column_and_part(first: usize, #[comptime] i: usize, #[comptime] staging: Staging) -> (usize, usize) {
    let parts = comptime!(staging.values / staging.part);
    if comptime!(staging.units.is_multiple_of(parts)) {
        // The same part of other rows: what follows from it is computed once.
        (first / parts + comptime!(i * staging.units / parts), first % parts)
    } else {
        let at = first + comptime!(i * staging.units);
        (at / parts, at % parts)
    }
}

/// Puts a part of a row of x, its words from `from` on, to what units share. A plane's units have
/// parts in order.
#[cube]
fn keep(
    words: &Array<u32>,
    #[comptime] from: usize,
    column: usize,
    part: usize,
    to: &mut Staged,
    #[comptime] staging: Staging,
) {
    let vectors = comptime!(staging.part / 8);
    #[unroll]
    for v in 0..vectors {
        let mut vector = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for j in 0..4usize {
            vector.insert(j, x_pair(words, from, comptime!(4 * v + j), staging.numbers));
        }
        to.values[column * comptime!(staging.row) + swizzled(part * vectors + v, staging)] = vector;
    }
    if comptime!(staging.group > 0) {
        let groups = comptime!(usize::max(1, staging.part / staging.group));
        #[unroll]
        for group in 0..groups {
            let mut sum = 0.0f32;
            #[unroll]
            for j in 0..comptime!(4 * vectors / groups) {
                let word = words[comptime!(from + 4 * vectors / groups * group + j)];
                let low = widen(word & 0xffffu32, staging.numbers.dtype);
                sum += low + widen(word >> 16u32, staging.numbers.dtype);
            }
            #[unroll]
            for step in 0..comptime!(staging.sharing().ilog2()) {
                sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
            }
            let at = column * comptime!(staging.sums) + part / comptime!(staging.sharing()) * groups + group;
            to.sums[at] = sum;
        }
    }
}

/// Pair `q` of the values of x whose words begin at `from`.
#[cube]
pub(super) fn x_pair(
    words: &Array<u32>,
    #[comptime] from: usize,
    #[comptime] q: usize,
    #[comptime] numbers: Numbers,
) -> u32 {
    let low = words[comptime!(from + numbers.pair(q).0 / 2)];
    let high = words[comptime!(from + numbers.pair(q).1 / 2)];
    if comptime!(numbers.pair(q).0.is_multiple_of(2)) {
        (low & 0xffffu32) | (high << 16u32)
    } else {
        (low >> 16u32) | (high & 0xffff_0000u32)
    }
}

/// The sums that a cube stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sums {
    /// Rows of the weight and of x per cube.
    pub n_tile: usize,
    pub m_tile: usize,
    /// The number of parts that each of them was cut into.
    pub parts: usize,
    /// Units of a cube.
    pub units: usize,
    pub y_type: FloatType,
    /// True if rows of y are [listed](Rows::list).
    pub listed: bool,
}

/// Adds up the parts of each sum, `[parts, columns, rows]`, and stores those that there are rows
/// for.
#[cube]
pub(super) fn store_sums<Y: Int>(
    partial: &Shared<[f32]>,
    y: &mut [Y],
    n: usize,
    row0: usize,
    of: &Rows,
    #[comptime] sums: Sums,
) {
    let (n_tile, m_tile) = comptime!((sums.n_tile, sums.m_tile));
    let mut i = UNIT_POS_X as usize;
    while i < n_tile * of.count {
        let (column, row) = (i / n_tile, row0 + i % n_tile);
        if row < n {
            let mut sum = 0.0f32;
            #[unroll]
            for part in 0..comptime!(sums.parts) {
                sum += partial[i + part * n_tile * m_tile];
            }
            y[y_of(of, column, sums.listed) * n + row] = Y::cast_from(narrow(sum, sums.y_type));
        }
        i += comptime!(sums.units);
    }
}
