//! The online softmax and the sums of weighted values, which a plane keeps in registers for its own
//! query rows.
//!
//! The sums are those of `mma` instructions: unit `l` of a plane has, of each 16 rows by 8 columns,
//! rows `l / 4` and `l / 4 + 8` and columns `2 (l % 4)` and the next.

use super::config::TileConfig;
use super::rows::{Destination, LOWEST_SCORE, begin_row, sum_of_four};
use crate::gpu::cuda::ptx::{exp2, load_tiles, mma, pack};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The running softmax of a unit's query rows, two of each block, over the keys that it has met.
#[derive(CubeType)]
pub(super) struct Sums {
    /// Sums of weighted values, in the places of a sum of `products`.
    values: Array<Vector<f32, Const<4>>>,
    /// The greatest score, not scaled.
    max: Array<f32>,
    /// The sum of the weights of the unit's keys.
    weights: Array<f32>,
}

#[cube]
impl Sums {
    pub fn new(#[comptime] config: TileConfig) -> Sums {
        let mut values =
            Array::<Vector<f32, Const<4>>>::new(comptime!(config.blocks * config.value_width / 8));
        let mut greatest = Array::<f32>::new(comptime!(2 * config.blocks));
        let mut weights = Array::<f32>::new(comptime!(2 * config.blocks));
        #[unroll]
        for i in 0..comptime!(config.blocks * config.value_width / 8) {
            values[i] = Vector::<f32, Const<4>>::new(0.0f32);
        }
        #[unroll]
        for r in 0..comptime!(2 * config.blocks) {
            greatest[r] = LOWEST_SCORE;
            weights[r] = 0.0;
        }
        Sums { values, max: greatest, weights }
    }

    /// The online softmax: takes a tile's scores into the greatest score and the weights' sum,
    /// rescales the sums, and gives the weights `2^((score - greatest) scale)`, rounded, as the
    /// left operand of a product with the values.
    pub fn weigh(
        &mut self,
        scores: &mut Array<Vector<f32, Const<4>>>,
        scale: f32,
        #[comptime] config: TileConfig,
    ) -> Array<Vector<u32, Const<4>>> {
        let count = comptime!(config.keys / 8);
        let mut packed = Array::<Vector<u32, Const<4>>>::new(comptime!(config.blocks * count / 2));
        #[unroll]
        for i in 0..comptime!(config.blocks * count / 2) {
            packed[i] = Vector::<u32, Const<4>>::new(0u32);
        }
        #[unroll]
        for r in 0..comptime!(2 * config.blocks) {
            let first = comptime!(r / 2 * count);
            let element = comptime!(r % 2 * 2);
            let mut greatest = self.max[r];
            #[unroll]
            for n in 0..count {
                let score = scores[comptime!(first + n)];
                greatest = max(greatest, max(score.extract(element), score.extract(comptime!(element + 1))));
            }
            greatest = max(greatest, plane_shuffle_xor(greatest, 1u32));
            greatest = max(greatest, plane_shuffle_xor(greatest, 2u32));
            let shrink = exp2((self.max[r] - greatest) * scale);
            let shift = greatest * scale;
            self.max[r] = greatest;
            let mut sum = 0.0f32;
            #[unroll]
            for n in 0..count {
                let score = scores[comptime!(first + n)];
                let left = exp2(fma(score.extract(element), scale, -shift));
                let right = exp2(fma(score.extract(comptime!(element + 1)), scale, -shift));
                sum += left + right;
                let i = comptime!(r / 2 * count / 2 + n / 2);
                let mut pair = packed[i];
                pair.insert(comptime!(n % 2 * 2 + r % 2), pack(left, right, config.dtype));
                packed[i] = pair;
            }
            self.weights[r] = fma(self.weights[r], shrink, sum);
            #[unroll]
            for n in 0..comptime!(config.value_width / 8) {
                let i = comptime!(r / 2 * config.value_width / 8 + n);
                let mut value = self.values[i];
                value.insert(element, value.extract(element) * shrink);
                value.insert(comptime!(element + 1), value.extract(comptime!(element + 1)) * shrink);
                self.values[i] = value;
            }
        }
        packed
    }

    /// Adds the weighted values of a tile.
    pub fn add_weighted_values(
        &mut self,
        weights: &Array<Vector<u32, Const<4>>>,
        v_at: u32,
        #[comptime] config: TileConfig,
    ) {
        let stride = comptime!(16 * config.value_stride());
        let lane = UNIT_POS_X % 32u32;
        let v_at = v_at + lane % 16u32 * comptime!(stride as u32) + lane / 16u32 * 16u32;
        #[unroll]
        for n in 0..comptime!(config.keys / 16) {
            #[unroll]
            for d in 0..comptime!(config.value_width / 16) {
                let values = load_tiles(v_at, comptime!(n * 16 * stride + d * 32), true);
                #[unroll]
                for b in 0..comptime!(config.blocks) {
                    let weight = weights[comptime!(b * config.keys / 16 + n)];
                    let i = comptime!(b * config.value_width / 8 + 2 * d);
                    self.values[i] = mma(
                        weight,
                        values.extract(0usize),
                        values.extract(1usize),
                        self.values[i],
                        config.dtype,
                    );
                    let i = comptime!(b * config.value_width / 8 + 2 * d + 1);
                    self.values[i] = mma(
                        weight,
                        values.extract(2usize),
                        values.extract(3usize),
                        self.values[i],
                        config.dtype,
                    );
                }
            }
        }
    }

    /// Stores the rows: as the result, or as parts for `gpu/combine.rs`.
    pub fn store(
        &self,
        y: &mut [u32],
        scales: &mut [f32],
        out: &Destination,
        #[comptime] config: TileConfig,
    ) {
        let column = UNIT_POS_X % 4u32 * 2u32;
        #[unroll]
        for r in 0..comptime!(2 * config.blocks) {
            let row = out.own + comptime!(8 * r as u32);
            let (width, split) = comptime!((config.value_width, config.split));
            let found = (self.max[r], sum_of_four(self.weights[r]));
            let row = begin_row(scales, out, row, found, column == 0u32, width, split);
            let element = comptime!(r % 2 * 2);
            if row.there {
                #[unroll]
                for n in 0..comptime!(width / 8) {
                    let value = self.values[comptime!(r / 2 * width / 8 + n)];
                    let pair = (value.extract(element), value.extract(comptime!(element + 1)));
                    row.store(y, column + comptime!(8 * n as u32), pair, config.dtype, split);
                }
            }
        }
    }
}
