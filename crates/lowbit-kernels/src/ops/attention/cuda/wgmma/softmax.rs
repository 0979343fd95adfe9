//! The online softmax of the scores that four planes have in registers, and how rows are stored.

use super::super::rows::{Destination, LOWEST_SCORE, RowBounds, begin_row, capped, sum_of_four};
use super::config::WgmmaConfig;
use crate::gpu::cuda::ptx::attention::{greatest_scores, score, set_score, value, weigh};
use crate::gpu::cuda::ptx::exp2;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The running softmax of a unit's two rows, over the keys that they have met. The sums of values
/// are in registers of their own.
#[derive(CubeType)]
pub(super) struct Softmax {
    /// The greatest score, not scaled.
    greatest: Array<f32>,
    /// The sum of the weights of the unit's keys.
    weights: Array<f32>,
}

#[cube]
impl Softmax {
    pub fn new() -> Softmax {
        let mut greatest = Array::<f32>::new(2usize);
        let mut weights = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            greatest[r] = LOWEST_SCORE;
            weights[r] = 0.0;
        }
        Softmax { greatest, weights }
    }

    /// Takes a tile's scores into the greatest score and the weights' sum, and makes them weights
    /// `2^((score - greatest) scale)`, not rounded yet. Gives what the sums of values shrink by.
    pub fn weigh(&mut self, scale: f32, #[comptime] config: WgmmaConfig) -> (f32, f32) {
        let tile = greatest_scores(config.products());
        let mut shrink = Array::<f32>::new(2usize);
        let mut shift = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            let mut greatest = max(self.greatest[r], tile.extract(r));
            greatest = max(greatest, plane_shuffle_xor(greatest, 1u32));
            greatest = max(greatest, plane_shuffle_xor(greatest, 2u32));
            shrink[r] = exp2((self.greatest[r] - greatest) * scale);
            shift[r] = greatest * scale;
            self.greatest[r] = greatest;
        }
        let sums = weigh(scale, (shift[0], shift[1]), config.products());
        #[unroll]
        for r in 0..2usize {
            self.weights[r] = fma(self.weights[r], shrink[r], sums.extract(r));
        }
        (shrink[0], shrink[1])
    }

    /// Stores the rows: as the result, or as parts for `gpu/combine.rs`.
    pub fn store(
        &self,
        y: &mut [u32],
        scales: &mut [f32],
        out: &Destination,
        #[comptime] config: WgmmaConfig,
    ) {
        let (width, split) = comptime!((config.value_width, config.split));
        let column = UNIT_POS_X % 4u32 * 2u32;
        #[unroll]
        for r in 0..2usize {
            let row = out.own + comptime!(8 * r as u32);
            let found = (self.greatest[r], sum_of_four(self.weights[r]));
            let row = begin_row(scales, out, row, found, column == 0u32, width, split);
            if row.there {
                #[unroll]
                for n in 0..comptime!(width / 8) {
                    let pair = (value(comptime!(4 * n + 2 * r)), value(comptime!(4 * n + 2 * r + 1)));
                    row.store(y, column + comptime!(8 * n as u32), pair, config.dtype, split);
                }
            }
        }
    }
}

/// Bends a tile's scores towards the cap, if there is one.
#[cube]
pub(super) fn cap_scores(scale: f32, #[comptime] config: WgmmaConfig) {
    if comptime!(config.softcap.is_some()) {
        #[unroll]
        for i in 0..comptime!(config.keys / 2) {
            set_score(i, capped(score(i), scale, config.softcap));
        }
    }
}

/// Makes the scores of keys that a row does not see -inf, and those of marked keys that it sees
/// NaN.
#[cube]
pub(super) fn mask(
    non_finite: &Shared<[u32]>,
    bounds: &RowBounds,
    first: u32,
    end: u32,
    #[comptime] config: WgmmaConfig,
) {
    #[unroll]
    for n in 0..comptime!(config.keys / 8) {
        #[unroll]
        for j in 0..2usize {
            let key = UNIT_POS_X % 4u32 * 2u32 + comptime!((8 * n + j) as u32);
            let bad = non_finite[key as usize] != 0u32;
            let key = first + key;
            #[unroll]
            for r in 0..2usize {
                let i = comptime!(4 * n + 2 * r + j);
                set_score(i, bounds.masked(score(i), r, key, end, bad));
            }
        }
    }
}
