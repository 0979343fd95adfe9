//! The keys that query rows see, and each row's softmax.

use super::{SPAN, Sizes, row_of_token};
use crate::gpu::compile::Target;
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::exp;
use crate::gpu::rows::{self, Maximum, Rows, Sum, VECTOR};
use crate::ops::attention::gpu::operands::{Softcap, capped, seen_from};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The most keys that a query sees up to its own, and after it; and the bits of what multiplies the
/// scores.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Params {
    pub window: u32,
    pub ahead: u32,
    pub scale: u32,
}

/// The keys that a token sees, from the first to before the second; none where its position is
/// beyond the capacity.
#[cube]
fn visible(positions: &[u32], token: usize, sizes: &Sizes, params: &Params) -> (u32, u32) {
    let seen = seen_from(positions[token], sizes.capacity, params.window).ahead(params.ahead, sizes.capacity);
    (seen.low, seen.high)
}

/// `spans[i]`: the keys that any of rows `16 i..16 i + 16` sees lie from the first number to before
/// the second, and all rows see those from the third to before the fourth. A unit a span.
#[kernel]
pub(super) fn attention_backward_spans(
    positions: &[u32],
    spans: &mut [Vector<u32, Const<4>>],
    sizes: Sizes,
    params: Params,
    #[comptime] group: usize,
) {
    let mut i = ABSOLUTE_POS;
    while i * SPAN < sizes.padded as usize {
        let mut token = sizes.first as usize + i * SPAN / group;
        let last = sizes.first as usize + (min(i * SPAN + SPAN, sizes.rows as usize) - 1usize) / group;
        let mut low = 0xffff_ffffu32.runtime();
        let mut high = 0u32.runtime();
        let mut all_low = 0u32.runtime();
        let mut all_high = 0xffff_ffffu32.runtime();
        while token <= last {
            let (first, end) = visible(positions, token, &sizes, &params);
            // A token that sees nothing begins nowhere.
            low = min(low, select(end == 0u32, 0xffff_ffffu32.runtime(), first));
            high = max(high, end);
            all_low = max(all_low, first);
            all_high = min(all_high, end);
            token += 1;
        }
        let mut span = Vector::<u32, Const<4>>::new(0u32);
        span.insert(0usize, min(low, high));
        span.insert(1usize, high);
        span.insert(2usize, all_low);
        span.insert(3usize, all_high);
        spans[i] = span;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// `weights`, which are `q . k`, become `p`, and `gradients`, which are `dy . v`, become
/// `scale p (dy . v - dy . y)`; both 0 where a row does not see a key, and in the rows that fill
/// the last span.
#[kernel]
pub(super) fn attention_backward_softmax(
    y: &[Vector<f32, Const<4>>],
    dy: &[Vector<f32, Const<4>>],
    positions: &[u32],
    weights: &mut [Vector<f32, Const<4>>],
    gradients: &mut [Vector<f32, Const<4>>],
    sizes: Sizes,
    vectors: u32,
    params: Params,
    #[comptime] group: usize,
    #[comptime] softcap: Option<Softcap>,
    #[comptime] config: Rows,
) {
    let (at, padded) = (rows::row(config), sizes.padded as usize);
    let (head, row) = (at / padded, at % padded);
    // Units past the last row have an empty one: they only take part in the sums.
    let known = head < sizes.heads as usize;
    let lane = rows::lane_in_row(config);
    let lanes = comptime!(rows::lanes_per_row(config));
    let mut low = 0u32.runtime();
    let mut high = 0u32.runtime();
    let mut along = 0.0f32.runtime();
    if known && row < sizes.rows as usize {
        let (first, end) = visible(positions, sizes.first as usize + row / group, &sizes, &params);
        low = first;
        high = end;
        let from = row_of_token(&sizes, head, row, group) * vectors as usize;
        let mut i = lane;
        while i < vectors as usize {
            let product = y[from + i] * dy[from + i];
            #[unroll]
            for j in 0..VECTOR {
                along += product.extract(j);
            }
            i += lanes;
        }
    }
    let along = rows::reduce::<f32, Sum>(along, config);
    let seen = Seen { row: at * sizes.columns as usize, low, high, scale: f32::reinterpret(params.scale) };
    let most = greatest(weights, &seen, softcap, config);
    let sum = sum_of_exponentials(weights, &seen, most, softcap, config);
    let end = select(known, sizes.columns as usize, 0usize);
    let mut i = lane;
    while i < end {
        let mut p = Vector::<f32, Const<4>>::new(0.0f32);
        let mut ds = Vector::<f32, Const<4>>::new(0.0f32);
        let key = i as u32 * 4u32;
        if key + 4u32 > low && key < high {
            let (scores, of_values) = (weights[seen.row + i], gradients[seen.row + i]);
            #[unroll]
            for j in 0..VECTOR {
                let within = key + comptime!(j as u32) >= low && key + comptime!(j as u32) < high;
                let score = capped(scores.extract(j) * seen.scale, softcap);
                let weight = exp(score - most) / sum;
                let mut gradient = seen.scale * weight * (of_values.extract(j) - along);
                if comptime!(softcap.is_some()) {
                    let bent = score * comptime!(Softcap::inverse(softcap)).runtime();
                    gradient *= 1.0f32 - bent * bent;
                }
                p.insert(j, select(within, weight, 0.0f32.runtime()));
                ds.insert(j, select(within, gradient, 0.0f32.runtime()));
            }
        }
        weights[seen.row + i] = p;
        gradients[seen.row + i] = ds;
        i += lanes;
    }
}

/// A row's scores: its first vector, the keys that it sees, and what multiplies them.
#[derive(CubeType)]
struct Seen {
    row: usize,
    low: u32,
    high: u32,
    scale: f32,
}

/// The greatest of a row's scores that are numbers, for all units that share it.
#[cube]
fn greatest(
    scores: &mut [Vector<f32, Const<4>>],
    seen: &Seen,
    #[comptime] softcap: Option<Softcap>,
    #[comptime] config: Rows,
) -> f32 {
    let mut most = f32::reinterpret(0xff80_0000u32);
    let mut i = seen.low as usize / VECTOR + rows::lane_in_row(config);
    while i * VECTOR < seen.high as usize {
        let vector = scores[seen.row + i];
        #[unroll]
        for j in 0..VECTOR {
            let key = (i * VECTOR + j) as u32;
            let within = key >= seen.low && key < seen.high;
            most = max(most, select(within, capped(vector.extract(j) * seen.scale, softcap), most));
        }
        i += comptime!(rows::lanes_per_row(config));
    }
    rows::reduce::<f32, Maximum>(most, config)
}

/// Relative to `most`, for all units that share the row.
#[cube]
fn sum_of_exponentials(
    scores: &mut [Vector<f32, Const<4>>],
    seen: &Seen,
    most: f32,
    #[comptime] softcap: Option<Softcap>,
    #[comptime] config: Rows,
) -> f32 {
    let mut sum = 0.0f32.runtime();
    let mut i = seen.low as usize / VECTOR + rows::lane_in_row(config);
    while i * VECTOR < seen.high as usize {
        let vector = scores[seen.row + i];
        #[unroll]
        for j in 0..VECTOR {
            let key = (i * VECTOR + j) as u32;
            let within = key >= seen.low && key < seen.high;
            let score = capped(vector.extract(j) * seen.scale, softcap);
            sum += select(within, exp(score - most), 0.0f32.runtime());
        }
        i += comptime!(rows::lanes_per_row(config));
    }
    rows::reduce::<f32, Sum>(sum, config)
}

pub(super) fn compiled(
    target: &Target,
    group: usize,
    softcap: Option<Softcap>,
    config: Rows,
) -> Kernel<AttentionBackwardSoftmax<'static>> {
    AttentionBackwardSoftmax::kernel(target, config.units, group, softcap, config)
}
