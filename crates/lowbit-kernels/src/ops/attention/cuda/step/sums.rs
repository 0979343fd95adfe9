//! The online softmax and the sums of weighted values, which a plane keeps in registers for all of
//! the cube's query rows, and how the planes' sums become one.
//!
//! Query rows are the columns of the products: unit `l` of a plane has rows `2 (l % 4)` and the
//! next of each block of 8, and of each 16 keys or columns of values `l / 4` and `l / 4 + 8`
//! (`codes.rs`: of values of 8 bits `2 (l / 4)` and the next).

use super::super::rows::{Destination, LOWEST_SCORE, RowBounds, begin_row};
use super::config::StepConfig;
use crate::gpu::cuda::ptx::{
    exp2, load_tiles, mma, pack, register, shared_words, store_word, transpose_tile,
};
use crate::ops::attention::gpu::operands::{Sizes, seen_keys};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The running softmax of a unit's query rows, two of each block, over the keys that its plane has
/// met.
#[derive(CubeType)]
pub(super) struct Sums {
    /// Sums of weighted values: columns `l / 4` of both rows, then columns `l / 4 + 8`.
    pub values: Array<Vector<f32, Const<4>>>,
    /// The greatest score, not scaled.
    greatest: Array<f32>,
    /// The sum of the weights of the unit's keys.
    weights: Array<f32>,
}

/// The keys that this unit's rows see.
#[cube]
pub(super) fn row_bounds(
    positions: &[u32],
    row0: u32,
    sizes: &Sizes,
    #[comptime] config: StepConfig,
) -> RowBounds {
    let count = comptime!(2 * config.blocks);
    let mut low = Array::<u32>::new(count);
    let mut high = Array::<u32>::new(count);
    #[unroll]
    for r in 0..count {
        let row = row0 + UNIT_POS_X % 4u32 * 2u32 + comptime!((r / 2 * 8 + r % 2) as u32);
        let seen = seen_keys(positions, row, sizes);
        low[r] = seen.low;
        high[r] = seen.high;
    }
    RowBounds { low, high }
}

/// Makes the scores of keys that a row does not see -inf, and those of marked keys that it sees
/// NaN.
#[cube]
pub(super) fn mask(
    scores: &mut Array<Vector<f32, Const<4>>>,
    non_finite: &Shared<[u32]>,
    bounds: &RowBounds,
    first: u32,
    end: u32,
    #[comptime] config: StepConfig,
) {
    let count = comptime!(config.keys / 16);
    let marks = UNIT_POS_X / 32u32 * comptime!(config.keys as u32);
    #[unroll]
    for i in 0..comptime!(2 * count) {
        let key = UNIT_POS_X % 32u32 / 4u32 + comptime!((8 * i) as u32);
        let bad = non_finite[(marks + key) as usize] != 0u32;
        #[unroll]
        for r in 0..comptime!(2 * config.blocks) {
            let at = comptime!(r / 2 * count + i / 2);
            let element = comptime!(i % 2 * 2 + r % 2);
            let mut score = scores[at];
            score.insert(element, bounds.masked(score.extract(element), r, first + key, end, bad));
            scores[at] = score;
        }
    }
}

#[cube]
impl Sums {
    pub fn new(#[comptime] config: StepConfig) -> Sums {
        let count = comptime!(config.blocks * config.value_width / 16);
        let mut values = Array::<Vector<f32, Const<4>>>::new(count);
        let mut greatest = Array::<f32>::new(comptime!(2 * config.blocks));
        let mut weights = Array::<f32>::new(comptime!(2 * config.blocks));
        #[unroll]
        for i in 0..count {
            values[i] = Vector::<f32, Const<4>>::new(0.0f32);
        }
        #[unroll]
        for r in 0..comptime!(2 * config.blocks) {
            greatest[r] = LOWEST_SCORE;
            weights[r] = 0.0;
        }
        Sums { values, greatest, weights }
    }

    /// The online softmax: takes a tile's scores into the greatest score and the weights' sum,
    /// rescales the sums, and gives the weights `2^((score - greatest) scale)`, rounded, as right
    /// operands of products with the values: two words for each 16 keys.
    pub fn weigh(
        &mut self,
        scores: &mut Array<Vector<f32, Const<4>>>,
        scale: f32,
        #[comptime] config: StepConfig,
    ) -> Array<u32> {
        let count = comptime!(config.keys / 16);
        #[unroll]
        for r in 0..comptime!(2 * config.blocks) {
            let (first, row) = comptime!((r / 2 * count, r % 2));
            let mut greatest = self.greatest[r];
            #[unroll]
            for n in 0..count {
                let score = scores[comptime!(first + n)];
                greatest = max(greatest, max(score.extract(row), score.extract(comptime!(row + 2))));
            }
            greatest = greatest_of_row(greatest);
            let shrink = exp2((self.greatest[r] - greatest) * scale);
            let shift = greatest * scale;
            self.greatest[r] = greatest;
            let mut sum = 0.0f32;
            #[unroll]
            for n in 0..count {
                let mut score = scores[comptime!(first + n)];
                let upper = exp2(fma(score.extract(row), scale, -shift));
                let lower = exp2(fma(score.extract(comptime!(row + 2)), scale, -shift));
                sum += upper + lower;
                score.insert(row, upper);
                score.insert(comptime!(row + 2), lower);
                scores[comptime!(first + n)] = score;
            }
            self.weights[r] = fma(self.weights[r], shrink, sum);
            self.scale_row(r, shrink, config);
        }
        let mut weights = Array::<u32>::new(comptime!(2 * config.blocks * count));
        #[unroll]
        for i in 0..comptime!(config.blocks * count) {
            let weight = scores[i];
            let upper = pack(weight.extract(0usize), weight.extract(1usize), config.dtype);
            let lower = pack(weight.extract(2usize), weight.extract(3usize), config.dtype);
            weights[comptime!(2 * i)] = transpose_tile(upper);
            weights[comptime!(2 * i + 1)] = transpose_tile(lower);
        }
        weights
    }

    /// Multiplies the sums of values of row `r` of this unit's.
    fn scale_row(&mut self, #[comptime] r: usize, by: f32, #[comptime] config: StepConfig) {
        let count = comptime!(config.value_width / 16);
        let row = comptime!(r % 2);
        #[unroll]
        for n in 0..count {
            let i = comptime!(r / 2 * count + n);
            let mut value = self.values[i];
            value.insert(row, value.extract(row) * by);
            value.insert(comptime!(row + 2), value.extract(comptime!(row + 2)) * by);
            self.values[i] = value;
        }
    }

    /// Adds the weighted values of a tile.
    pub fn add_weighted_values(&mut self, weights: &Array<u32>, v_at: u32, #[comptime] config: StepConfig) {
        let count = comptime!(config.keys / 16);
        let columns = comptime!(config.value_width / 16);
        let stride = comptime!(16 * config.value_stride());
        let lane = UNIT_POS_X % 32u32;
        let key = lane / 16u32 * 8u32 + lane % 8u32;
        let v_at = register(v_at + key * comptime!(stride as u32) + lane / 8u32 % 2u32 * 16u32);
        #[unroll]
        for n in 0..count {
            #[unroll]
            for d in 0..columns {
                let mut values = Array::<Vector<u32, Const<4>>>::new(1usize);
                values[0] = load_tiles(v_at, comptime!(n * 16 * stride + d * 32), true);
                #[unroll]
                for b in 0..comptime!(config.blocks) {
                    let w = comptime!(2 * (b * count + n));
                    let i = comptime!(b * columns + d);
                    self.values[i] =
                        mma(values[0], weights[w], weights[comptime!(w + 1)], self.values[i], config.dtype);
                }
            }
        }
    }

    /// Leaves the plane's sums of values in its ring at `ring`, all planes' in relation to the
    /// row's greatest score of all planes.
    pub fn leave(&mut self, ring: u32, out: &Destination, #[comptime] config: StepConfig) -> Shares {
        let mut found = Shared::<[f32]>::new_slice(comptime!(2 * config.planes * config.rows()));
        let lane = UNIT_POS_X % 32u32;
        let own = UNIT_POS_X / 32u32 * comptime!(config.rows() as u32) + lane % 4u32 * 2u32;
        #[unroll]
        for r in 0..comptime!(2 * config.blocks) {
            let weights = sum_of_row(self.weights[r]);
            if lane < 4u32 {
                let at = 2u32 * (own + comptime!((r / 2 * 8 + r % 2) as u32));
                found[at as usize] = self.greatest[r];
                found[(at + 1u32) as usize] = weights;
            }
        }
        sync_cube();
        let shares = Shares { found };
        // Bytes from a unit's column to the next unit's, and to its own second one.
        let (across, next) = comptime!(if config.int8 { (8, 4) } else { (4, 32) });
        let to = ring + lane % 4u32 * comptime!(2 * config.sums_stride() as u32);
        let to = register(to + lane / 4u32 * comptime!(across as u32));
        #[unroll]
        for r in 0..comptime!(2 * config.blocks) {
            let row = comptime!(r / 2 * 8 + r % 2);
            let greatest = shares.greatest(lane % 4u32 * 2u32 + comptime!(row as u32), config);
            self.scale_row(r, exp2((self.greatest[r] - greatest) * out.scale), config);
            #[unroll]
            for n in 0..comptime!(config.value_width / 16) {
                let value = self.values[comptime!(r / 2 * config.value_width / 16 + n)];
                #[unroll]
                for j in 0..2usize {
                    let offset = comptime!(row * config.sums_stride() + 64 * n + next * j);
                    store_word(to, offset, u32::reinterpret(value.extract(comptime!(r % 2 + 2 * j))));
                }
            }
        }
        sync_cube();
        shares
    }
}

/// Each plane's greatest score and sum of weights for each query row.
#[derive(CubeType)]
pub(super) struct Shares {
    found: Shared<[f32]>,
}

#[cube]
impl Shares {
    /// The greatest score of `row`.
    fn greatest(&self, row: u32, #[comptime] config: StepConfig) -> f32 {
        let mut greatest = self.found[(2u32 * row) as usize];
        #[unroll]
        for plane in 1..comptime!(config.planes) {
            let at = 2u32 * (row + comptime!((plane * config.rows()) as u32));
            greatest = max(greatest, self.found[at as usize]);
        }
        greatest
    }

    /// The sum of the weights of `row`, in relation to this greatest score.
    fn weights(&self, row: u32, greatest: f32, scale: f32, #[comptime] config: StepConfig) -> f32 {
        let mut weights = 0.0f32;
        #[unroll]
        for plane in 0..comptime!(config.planes) {
            let at = 2u32 * (row + comptime!((plane * config.rows()) as u32));
            let shrink = exp2((self.found[at as usize] - greatest) * scale);
            weights = fma(self.found[(at + 1u32) as usize], shrink, weights);
        }
        weights
    }

    /// Adds up what planes have left in their rings, and stores the rows: as the result, or as
    /// parts for `gpu/combine.rs`.
    pub fn store(
        &self,
        y: &mut [u32],
        scales: &mut [f32],
        memory: u32,
        out: &Destination,
        #[comptime] config: StepConfig,
    ) {
        let pairs = comptime!((config.value_width / 2) as u32);
        let (width, split) = comptime!((config.value_width, config.split));
        let rows = min(out.rows - out.own, comptime!(config.rows() as u32));
        let mut at = UNIT_POS_X;
        while at < rows * pairs {
            let (row, pair) = (at / pairs, at % pairs);
            let greatest = self.greatest(row, config);
            let weights = self.weights(row, greatest, out.scale, config);
            let found = (greatest, weights);
            let to = begin_row(scales, out, out.own + row, found, pair == 0u32, width, split);
            let from = memory + comptime!(config.queries() as u32) + 8u32 * pair;
            let from = from + row * comptime!(config.sums_stride() as u32);
            let mut left = 0.0f32;
            let mut right = 0.0f32;
            #[unroll]
            for plane in 0..comptime!(config.planes) {
                let from = register(from + comptime!((plane * config.ring()) as u32));
                let sums = shared_words(from, 0usize, 2usize);
                left += f32::reinterpret(sums[0]);
                right += f32::reinterpret(sums[1]);
            }
            if to.there {
                to.store(y, 2u32 * pair, (left, right), config.dtype, split);
            }
            at += comptime!(config.units() as u32);
        }
    }
}

/// The greatest of what the eight units have that share a row.
#[cube]
fn greatest_of_row(x: f32) -> f32 {
    let x = max(x, plane_shuffle_xor(x, 4u32));
    let x = max(x, plane_shuffle_xor(x, 8u32));
    max(x, plane_shuffle_xor(x, 16u32))
}

/// The sum of what these units have.
#[cube]
fn sum_of_row(x: f32) -> f32 {
    let x = x + plane_shuffle_xor(x, 4u32);
    let x = x + plane_shuffle_xor(x, 8u32);
    x + plane_shuffle_xor(x, 16u32)
}
