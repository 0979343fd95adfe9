//! The online softmax of a plane's query rows, and their sums of weighted values.
//!
//! Elements of a cooperative matrix are in places that nobody knows, so scores go through shared
//! memory, where each lane of the plane has a row, or a part of one. The sums of weighted values
//! stay in matrices. They must shrink when a row's greatest score grows, which takes another way
//! through shared memory: it is done only once the score has grown by so much that weights could
//! overflow. Until then weights refer to an earlier greatest score, and exceed 1.

use super::config::CmmaTile;
use super::stage::KeyRange;
use super::{Memory, SharedScores};
use crate::gpu::float::{narrow, rounded};
use crate::gpu::matrices::VECTOR;
use crate::ops::attention::gpu::combine::NO_SCORE;
use crate::ops::attention::gpu::operands::{Sizes, capped, reciprocal, row_index, seen_keys};
use cubecl_core as cubecl;
use cubecl_core::cmma::{self, Matrix, MatrixLayout};
use cubecl_core::prelude::*;

/// The greatest score with which rows start: more than [`NO_SCORE`], so that a key which is not
/// seen weighs nothing.
const LOWEST_SCORE: f32 = -1.0e38;
/// The most by which a score may exceed the one that weights refer to: a weight is then 400, which
/// every type has room for.
const SLACK: f32 = 6.0;

/// The running softmax of a lane's rows over the keys that they have met, and which keys they see:
/// those from `low` to `high`.
#[derive(CubeType)]
pub(super) struct RowSums {
    low: Array<u32>,
    high: Array<u32>,
    /// The score that weights refer to: a weight is `exp(score - greatest)`.
    greatest: Array<f32>,
    /// The sum of the weights of the lane's keys.
    weights: Array<f32>,
}

/// A tile of keys.
#[derive(CubeType)]
pub(super) struct Tile {
    pub first: u32,
    /// True if it is the cube's first: there are no sums yet.
    pub is_first: bool,
    /// True if some row does not see all of it.
    pub masked: bool,
}

/// The `i`-th row of a lane, among its plane's.
#[cube]
fn row_of_lane(#[comptime] i: usize, #[comptime] config: CmmaTile) -> u32 {
    UNIT_POS_PLANE % comptime!(config.lanes as u32) / comptime!(config.lanes_of_row() as u32)
        + comptime!((i * config.lanes) as u32)
}

/// The `i`-th vector of a row that falls to a lane. Neighbours take turns, so that they read
/// different banks.
#[cube]
fn vector_of_lane(#[comptime] i: usize, #[comptime] config: CmmaTile) -> u32 {
    UNIT_POS_PLANE % comptime!(config.lanes_of_row() as u32) + comptime!((i * config.lanes_of_row()) as u32)
}

/// True if a lane has that vector of a row of `columns`.
#[cube]
fn has_vector(vector: u32, #[comptime] columns: usize, #[comptime] config: CmmaTile) -> bool {
    let whole = comptime!((columns / VECTOR).is_multiple_of(config.lanes_of_row()));
    whole.runtime() || vector < comptime!((columns / VECTOR) as u32)
}

/// The first vector of a row of the plane's scores, or of its weights.
#[cube]
fn row_at(row: u32, #[comptime] config: CmmaTile) -> usize {
    (PLANE_POS * comptime!(config.cut.rows as u32) + row) as usize * comptime!(config.score_pitch() / VECTOR)
}

#[cube]
impl RowSums {
    /// Of the plane's rows from row `own` on.
    pub fn new(positions: &[u32], own: u32, sizes: &Sizes, #[comptime] config: CmmaTile) -> RowSums {
        let count = comptime!(config.rows_of_lane());
        let mut low = Array::<u32>::new(count);
        let mut high = Array::<u32>::new(count);
        let mut greatest = Array::<f32>::new(count);
        let mut weights = Array::<f32>::new(count);
        #[unroll]
        for i in 0..count {
            let seen = seen_keys(positions, own + row_of_lane(i, config), sizes);
            low[i] = seen.low;
            high[i] = seen.high;
            greatest[i] = LOWEST_SCORE;
            weights[i] = 0.0;
        }
        RowSums { low, high, greatest, weights }
    }

    /// The online softmax: takes the scores of a tile, which are in shared memory, into the
    /// weights' sum, and leaves the weights there, rounded.
    pub fn weigh<E: Float>(
        &mut self,
        memory: &mut Memory<E>,
        values: &mut Sequence<Matrix<f32>>,
        of: (&Tile, &KeyRange),
        scale: f32,
        #[comptime] config: CmmaTile,
    ) {
        let vectors = comptime!(config.vectors_of_lane(config.cut.keys));
        let count = comptime!(vectors * VECTOR);
        let mut scores = Array::<f32>::new(comptime!(config.rows_of_lane() * count));
        let mut grown = Array::<f32>::new(comptime!(config.rows_of_lane()));
        let mut shrinks = false.runtime();
        #[unroll]
        for r in 0..comptime!(config.rows_of_lane()) {
            self.read::<E>(&*memory, &mut scores, of, scale, r, config);
            let mut greatest = scores[r * count];
            #[unroll]
            for i in 1..count {
                greatest = max(greatest, scores[r * count + i]);
            }
            #[unroll]
            for i in 0..comptime!(config.lanes_of_row().trailing_zeros()) {
                greatest = max(greatest, plane_shuffle_xor(greatest, comptime!(1u32 << i)));
            }
            grown[r] = max(greatest, self.greatest[r]);
            shrinks = shrinks || grown[r] > self.greatest[r] + SLACK;
        }
        if plane_any(shrinks) {
            self.shrink(&mut memory.scores, values, &grown, of.0.is_first, config);
        }
        #[unroll]
        for r in 0..comptime!(config.rows_of_lane()) {
            let at = row_at(row_of_lane(r, config), config);
            let mut sum = 0.0f32;
            #[unroll]
            for v in 0..vectors {
                let vector = vector_of_lane(v, config);
                let mut weights = Vector::<E, Const<4>>::new(E::from_int(0));
                let mut of_vector = 0.0f32;
                #[unroll]
                for j in 0..VECTOR {
                    let weight = (scores[comptime!(r * count + v * VECTOR + j)] - self.greatest[r]).exp();
                    of_vector += weight;
                    weights.insert(j, rounded::<E>(weight, config.dtype));
                }
                if has_vector(vector, config.cut.keys, config) {
                    sum += of_vector;
                    memory.weights[at + vector as usize] = weights;
                }
            }
            self.weights[r] += sum;
        }
    }

    /// Reads the scores of the lane's `r`-th row, and scales and masks them: [`NO_SCORE`] for a key
    /// that the row does not see, NaN for one that it sees and whose value is not finite.
    fn read<E: Float>(
        &self,
        memory: &Memory<E>,
        scores: &mut Array<f32>,
        of: (&Tile, &KeyRange),
        scale: f32,
        #[comptime] r: usize,
        #[comptime] config: CmmaTile,
    ) {
        let vectors = comptime!(config.vectors_of_lane(config.cut.keys));
        let at = row_at(row_of_lane(r, config), config);
        #[unroll]
        for v in 0..vectors {
            let vector = vector_of_lane(v, config);
            let within = min(vector, comptime!((config.cut.keys / VECTOR - 1) as u32));
            let loaded = memory.scores[at + within as usize];
            #[unroll]
            for j in 0..VECTOR {
                let score = capped(loaded.extract(j) * scale, config.softcap);
                scores[comptime!((r * vectors + v) * VECTOR + j)] = score;
            }
        }
        let (tile, keys) = of;
        if tile.masked {
            let high = min(self.high[r], keys.end);
            #[unroll]
            for v in 0..vectors {
                let first = vector_of_lane(v, config) * comptime!(VECTOR as u32);
                let first = min(first, comptime!((config.cut.keys - VECTOR) as u32));
                #[unroll]
                for j in 0..VECTOR {
                    let i = comptime!((r * vectors + v) * VECTOR + j);
                    let place = first + comptime!(j as u32);
                    let key = tile.first + place;
                    let bad = memory.non_finite[place as usize] != 0u32;
                    let score = select(bad, f32::reinterpret(0x7fc0_0000u32), scores[i]);
                    scores[i] = select(key >= self.low[r] && key < high, score, NO_SCORE);
                }
            }
        }
    }

    /// Lets the sums refer to the scores `grown`.
    fn shrink(
        &mut self,
        scores: &mut SharedScores,
        values: &mut Sequence<Matrix<f32>>,
        grown: &Array<f32>,
        is_first: bool,
        #[comptime] config: CmmaTile,
    ) {
        let mut factors = Array::<f32>::new(comptime!(config.rows_of_lane()));
        #[unroll]
        for r in 0..comptime!(config.rows_of_lane()) {
            factors[r] = (self.greatest[r] - grown[r]).exp();
            self.greatest[r] = grown[r];
            self.weights[r] *= factors[r];
        }
        if !is_first {
            // All lanes have read their scores.
            sync_plane();
            #[unroll]
            for chunk in 0..comptime!(config.value_width.div_ceil(config.cut.keys)) {
                multiply_rows(scores, values, &factors, chunk, config);
            }
        }
    }

    /// Stores the rows, from row `own` on: as the result, or as parts for `combine.rs`.
    pub fn store<N: Size>(
        &self,
        scores: &mut SharedScores,
        values: &Sequence<Matrix<f32>>,
        y: &mut [Vector<u32, N>],
        scales: &mut [f32],
        out: &Destination,
        #[comptime] config: CmmaTile,
    ) {
        let mut factors = Array::<f32>::new(comptime!(config.rows_of_lane()));
        #[unroll]
        for r in 0..comptime!(config.rows_of_lane()) {
            let mut weights = self.weights[r];
            #[unroll]
            for i in 0..comptime!(config.lanes_of_row().trailing_zeros()) {
                weights += plane_shuffle_xor(weights, comptime!(1u32 << i));
            }
            factors[r] = 1.0;
            if comptime!(config.split) {
                let row = out.own + row_of_lane(r, config);
                if row < out.rows {
                    let at = row_index(row, out.group) * CUBE_COUNT_Z + CUBE_POS_Z;
                    scales[(2u32 * at) as usize] = self.greatest[r];
                    scales[(2u32 * at + 1u32) as usize] = weights;
                }
            } else {
                factors[r] = reciprocal(weights);
            }
        }
        if !comptime!(config.split) || out.any_keys {
            #[unroll]
            for chunk in 0..comptime!(config.value_width.div_ceil(config.cut.keys)) {
                pass_on(scores, values, chunk, config);
                sync_plane();
                #[unroll]
                for r in 0..comptime!(config.rows_of_lane()) {
                    store_columns::<N>(&*scores, y, factors[r], out, (r, chunk), config);
                }
                sync_plane();
            }
        }
    }
}

/// The destination of a plane's rows.
#[derive(CubeType)]
pub(super) struct Destination {
    /// The first of them.
    pub own: u32,
    pub rows: u32,
    pub group: u32,
    /// True if the cube had keys at all.
    pub any_keys: bool,
}

/// Columns of the `chunk`-th part of the sums: as many as the memory of the scores has room for.
fn columns(chunk: usize, config: CmmaTile) -> usize {
    config.cut.keys.min(config.value_width - chunk * config.cut.keys)
}

/// Writes columns of the plane's sums to the memory of its scores.
#[cube]
fn pass_on(
    scores: &mut SharedScores,
    values: &Sequence<Matrix<f32>>,
    #[comptime] chunk: usize,
    #[comptime] config: CmmaTile,
) {
    let (m, n, pitch) = comptime!((config.matrices.m, config.matrices.n, config.score_pitch()));
    let of_row = comptime!(config.value_width / n);
    #[unroll]
    for i in 0..comptime!(config.cut.rows / m) {
        #[unroll]
        for j in 0..comptime!(columns(chunk, config) / n) {
            let at = row_at(comptime!((i * m) as u32).runtime(), config) + comptime!(j * n / VECTOR);
            let value = values.index(comptime!(i * of_row + chunk * config.cut.keys / n + j));
            let to = &mut scores[at..at + comptime!(m * pitch / VECTOR)];
            cmma::store(to, value, comptime!(pitch as u32), MatrixLayout::RowMajor);
        }
    }
}

/// Multiplies columns of the plane's sums by its rows' factors.
#[cube]
fn multiply_rows(
    scores: &mut SharedScores,
    values: &mut Sequence<Matrix<f32>>,
    factors: &Array<f32>,
    #[comptime] chunk: usize,
    #[comptime] config: CmmaTile,
) {
    let (m, n, pitch) = comptime!((config.matrices.m, config.matrices.n, config.score_pitch()));
    let of_row = comptime!(config.value_width / n);
    let columns = comptime!(columns(chunk, config));
    pass_on(scores, &*values, chunk, config);
    sync_plane();
    if comptime!(config.planes_alike()).runtime() || UNIT_POS_PLANE < comptime!(config.lanes as u32) {
        #[unroll]
        for r in 0..comptime!(config.rows_of_lane()) {
            let at = row_at(row_of_lane(r, config), config);
            #[unroll]
            for v in 0..comptime!(config.vectors_of_lane(columns)) {
                let vector = vector_of_lane(v, config);
                if has_vector(vector, columns, config) {
                    let at = at + vector as usize;
                    scores[at] *= Vector::new(factors[r]);
                }
            }
        }
    }
    sync_plane();
    #[unroll]
    for i in 0..comptime!(config.cut.rows / m) {
        #[unroll]
        for j in 0..comptime!(columns / n) {
            let at = row_at(comptime!((i * m) as u32).runtime(), config) + comptime!(j * n / VECTOR);
            let value = values.index_mut(comptime!(i * of_row + chunk * config.cut.keys / n + j));
            let from = &scores[at..at + comptime!(m * pitch / VECTOR)];
            cmma::load_with_layout(value, from, comptime!(pitch as u32), MatrixLayout::RowMajor);
        }
    }
    sync_plane();
}

/// Stores some columns of the lane's row of the sums, times `factor`. `of` is which of its rows,
/// and which columns.
#[cube]
fn store_columns<N: Size>(
    scores: &SharedScores,
    y: &mut [Vector<u32, N>],
    factor: f32,
    out: &Destination,
    #[comptime] of: (usize, usize),
    #[comptime] config: CmmaTile,
) {
    let (r, chunk) = comptime!(of);
    let columns = comptime!(columns(chunk, config));
    let row = row_of_lane(r, config);
    let from = row_at(row, config);
    let row = out.own + row;
    if row < out.rows {
        let mut to = row_index(row, out.group);
        if comptime!(config.split) {
            to += CUBE_POS_Z * CUBE_COUNT_X * out.rows;
        }
        let to = to * comptime!((config.value_width / VECTOR) as u32)
            + comptime!((chunk * config.cut.keys / VECTOR) as u32);
        #[unroll]
        for v in 0..comptime!(config.vectors_of_lane(columns)) {
            let vector = vector_of_lane(v, config);
            if has_vector(vector, columns, config) {
                let values = scores[from + vector as usize] * Vector::new(factor);
                let mut words = Vector::<u32, N>::new(0u32);
                if comptime!(config.split) {
                    #[unroll]
                    for j in 0..VECTOR {
                        words.insert(j, u32::reinterpret(values.extract(j)));
                    }
                } else {
                    #[unroll]
                    for j in 0..comptime!(VECTOR / 2) {
                        let low = narrow(values.extract(comptime!(2 * j)), config.dtype);
                        let high = narrow(values.extract(comptime!(2 * j + 1)), config.dtype);
                        words.insert(j, low | high << 16u32);
                    }
                }
                y[(to + vector) as usize] = words;
            }
        }
    }
}
