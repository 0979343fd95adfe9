//! Where several cubes share a row's keys: how they share them, and how their parts become one.
//!
//! A part of a row is Dv sums of weighted values, the greatest score, and the sum of the weights, all f32.

use crate::gpu::float::write;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The greatest score of no keys: below all, and a difference with it is a number.
pub(super) const NOTHING: f32 = -3.0e38;

/// How many of `keys` each of `parts` cubes takes: whole steps, so that few keys need few cubes.
#[cube]
pub(super) fn share(keys: u32, parts: u32, #[comptime] step: u32) -> u32 {
    keys.div_ceil(parts).div_ceil(step) * step
}

/// What sums are multiplied with to be means: NaN where there is nothing.
#[cube]
pub(super) fn inverse(weights: f32) -> f32 {
    select(weights == 0.0f32, f32::reinterpret(0x7fc0_0000u32), 1.0f32 / weights)
}

/// `y` of `rows` rows from `parts` of each.
#[cube(launch_unchecked)]
pub(super) fn combine<Y: Int>(
    parts: &[f32],
    y: &mut [Y],
    rows: u32,
    count: u32,
    #[comptime] width: usize,
    #[comptime] dtype: FloatType,
) {
    let mut i = ABSOLUTE_POS as u32;
    while i < rows * comptime!(width as u32) {
        let stride = comptime!(width as u32 + 2);
        let row = i / comptime!(width as u32) * stride;
        let element = i % comptime!(width as u32);
        let mut greatest = NOTHING.runtime();
        for part in 0..count {
            greatest = max(greatest, parts[(part * rows * stride + row + comptime!(width as u32)) as usize]);
        }
        let mut value = 0.0f32;
        let mut weights = 0.0f32;
        for part in 0..count {
            let at = part * rows * stride + row;
            let scale = (parts[(at + comptime!(width as u32)) as usize] - greatest).exp();
            weights += parts[(at + comptime!(width as u32 + 1)) as usize] * scale;
            value = fma(parts[(at + element) as usize], scale, value);
        }
        write(y, i as usize, value * inverse(weights), dtype);
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}
