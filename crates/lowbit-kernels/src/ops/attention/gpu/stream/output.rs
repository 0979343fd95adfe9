//! The end of a cube: its rows' sums over all units become the result, or parts of it.

use super::super::combine::NO_SCORE;
use super::super::operands::reciprocal;
use super::super::parts::PARTS;
use super::keys::Sums;
use super::{Rows, StreamConfig, element, row_index};
use crate::gpu::float::narrow;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The destination of a cube's rows.
#[derive(CubeType)]
pub(super) struct Destination {
    pub of: Rows,
    /// True if the cube had keys at all.
    pub any_keys: bool,
}

/// Adds up the planes' sums and stores the rows: as the result, or as parts for `combine.rs`.
#[cube]
pub(super) fn store<Y: Int>(
    sums: &Sums,
    y: &mut [Y],
    scales: &mut [f32],
    out: &Destination,
    #[comptime] config: StreamConfig,
) {
    let width = comptime!(config.value_width as u32);
    let slots = comptime!(config.slots(config.value_width));
    let first = UNIT_POS_X % comptime!(config.plane as u32) < comptime!(config.lanes as u32);
    if comptime!(config.planes == 1) {
        #[unroll]
        for r in 0..comptime!(config.rows) {
            let row = out.of.first + comptime!(r as u32);
            if first && row < out.of.count {
                let at = row_index(&out.of, row);
                let factor = reciprocal(sums.weights[r]);
                if !comptime!(config.split) || out.any_keys {
                    #[unroll]
                    for i in 0..slots {
                        let element = element(out.of.lane, i, config);
                        if element < width {
                            let value = sums.values[r * slots + i];
                            store_element::<Y>(
                                y,
                                output_index(out, at, element, config),
                                value,
                                factor,
                                config,
                            );
                        }
                    }
                }
                if comptime!(config.split) && out.of.lane == 0u32 {
                    store_scale(scales, at, sums.max[r], sums.weights[r], config);
                }
            }
        }
    } else {
        store_planes::<Y>(sums, y, scales, out, first, config);
    }
}

/// The same where a cube has several planes, through shared memory; `first` in the units of a
/// plane's first group of lanes.
#[cube]
fn store_planes<Y: Int>(
    sums: &Sums,
    y: &mut [Y],
    scales: &mut [f32],
    out: &Destination,
    first: bool,
    #[comptime] config: StreamConfig,
) {
    let width = comptime!(config.value_width as u32);
    let slots = comptime!(config.slots(config.value_width));
    let stride = comptime!(config.value_width + 2);
    let plane = (UNIT_POS_X / comptime!(config.plane as u32)) as usize * stride;
    let mut parts = Shared::<[f32]>::new_slice(comptime!(config.planes * stride));
    #[unroll]
    for r in 0..comptime!(config.rows) {
        sync_cube();
        if first {
            #[unroll]
            for i in 0..slots {
                let element = element(out.of.lane, i, config);
                if element < width {
                    parts[plane + element as usize] = sums.values[r * slots + i];
                }
            }
            parts[plane + comptime!(config.value_width)] = sums.max[r];
            parts[plane + comptime!(config.value_width + 1)] = sums.weights[r];
        }
        sync_cube();
        let row = out.of.first + comptime!(r as u32);
        if row < out.of.count {
            store_shared_row::<Y>(&parts, y, scales, out, row_index(&out.of, row), config);
        }
    }
}

/// Combines a row's sums of all planes, which are in shared memory, and stores it.
#[cube]
fn store_shared_row<Y: Int>(
    parts: &Shared<[f32]>,
    y: &mut [Y],
    scales: &mut [f32],
    out: &Destination,
    row: u32,
    #[comptime] config: StreamConfig,
) {
    let stride = comptime!(config.value_width + 2);
    let mut greatest = NO_SCORE.runtime();
    #[unroll]
    for plane in 0..comptime!(config.planes) {
        greatest = max(greatest, parts[comptime!(plane * stride + config.value_width)]);
    }
    let mut weights = 0.0f32;
    let mut factors = Array::<f32>::new(comptime!(config.planes));
    #[unroll]
    for plane in 0..comptime!(config.planes) {
        factors[plane] = (parts[comptime!(plane * stride + config.value_width)] - greatest).exp();
        weights += parts[comptime!(plane * stride + config.value_width + 1)] * factors[plane];
    }
    let factor = reciprocal(weights);
    let mut element = UNIT_POS_X;
    if comptime!(config.split) && !out.any_keys {
        element = comptime!(config.value_width as u32).runtime();
    }
    while element < comptime!(config.value_width as u32) {
        let mut value = 0.0f32;
        #[unroll]
        for plane in 0..comptime!(config.planes) {
            value += parts[comptime!(plane * stride) + element as usize] * factors[plane];
        }
        store_element::<Y>(y, output_index(out, row, element, config), value, factor, config);
        element += comptime!((config.plane * config.planes) as u32);
    }
    if comptime!(config.split) && UNIT_POS_X == 0u32 {
        store_scale(scales, row, greatest, weights, config);
    }
}

/// The index in y of an element of row `row`: of the result, or of this cube's part of it.
#[cube]
fn output_index(out: &Destination, row: u32, element: u32, #[comptime] config: StreamConfig) -> usize {
    let mut at = row;
    if comptime!(config.split) {
        at += CUBE_POS_Z * CUBE_COUNT_Y * out.of.all;
    }
    (at * comptime!(config.value_width as u32) + element) as usize
}

/// Stores an element of the result, or, for a part, the sum itself.
#[cube]
fn store_element<Y: Int>(y: &mut [Y], at: usize, sum: f32, factor: f32, #[comptime] config: StreamConfig) {
    if comptime!(config.split) {
        y[at] = Y::cast_from(u32::reinterpret(sum));
    } else {
        y[at] = Y::cast_from(narrow(sum * factor, config.dtype));
    }
}

/// Stores the greatest score and the weights' sum of a part.
#[cube]
fn store_scale(scales: &mut [f32], row: u32, max: f32, weights: f32, #[comptime] config: StreamConfig) {
    let splits = if comptime!(config.paged) { comptime!(PARTS as u32).runtime() } else { CUBE_COUNT_Z };
    let at = ((row * splits + CUBE_POS_Z) * 2u32) as usize;
    scales[at] = max;
    scales[at + 1] = weights;
}
