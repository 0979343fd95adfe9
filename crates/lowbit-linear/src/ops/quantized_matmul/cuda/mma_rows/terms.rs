//! The terms that a group's products and its sum of x are multiplied with: of a chunk of the cube's
//! rows, which its units share.

use super::super::staging::Chunk;
use super::config::{MmaRows, STEP};
use super::weight::Weight;
use crate::gpu::decode::{bias_of, scale_of};
use crate::gpu::layout::RUN;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Loads a unit's part of the chunk's scales and biases, as they are stored, for the cube's rows.
#[cube]
pub(super) fn load_terms<S: Int, B: Int, V: Size>(
    weight: &Weight<'_, S, B, V>,
    chunk: &Chunk,
    #[comptime] config: MmaRows,
) -> Array<u32> {
    let count = comptime!(config.terms_per_unit());
    let a_row = comptime!(config.chunk * config.groups());
    // Of a step.
    let (a_scale, a_bias) = comptime!(config.layout.elements(STEP / RUN));
    let mut loaded = Array::<u32>::new(comptime!(2 * count));
    #[unroll]
    for i in 0..count {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        let row = weight.first + min(weight.row0 + at / a_row, weight.n - 1);
        let run = chunk.first + at % a_row * comptime!(config.group() / RUN);
        // Past the last run, too, what x's zeros are multiplied with must be finite.
        loaded[2 * i] = 0u32;
        loaded[2 * i + 1] = 0u32;
        if run < chunk.runs {
            let run = row * chunk.runs + run;
            loaded[2 * i] = u32::cast_from(weight.components.scales[run / comptime!(STEP / RUN / a_scale)]);
            if comptime!(a_bias > 0) {
                loaded[2 * i + 1] =
                    u32::cast_from(weight.components.biases[run / comptime!(STEP / RUN / a_bias)]);
            }
        }
    }
    loaded
}

/// Puts them where units share them:
/// `y += scale * (factor * product - zero * x_sum) + bias * x_sum`, as two terms.
#[cube]
pub(super) fn keep_terms(
    loaded: &Array<u32>,
    to: &mut Shared<[Vector<f32, Const<2>>]>,
    #[comptime] config: MmaRows,
) {
    let (layout, numbers) = comptime!((config.layout, config.numbers()));
    let a_row = comptime!(config.chunk * config.groups());
    #[unroll]
    for i in 0..comptime!(config.terms_per_unit()) {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        if at < comptime!(config.n_tile() * config.chunk * config.groups()) {
            let (scale, bias) = (loaded[2 * i], loaded[2 * i + 1]);
            let factor = scale_of(scale, bias, 0usize, layout);
            let mut added = factor * comptime!(-numbers.zero());
            if comptime!(layout.biased()) {
                added += bias_of(scale, bias, 0usize, layout);
            }
            let mut term = Vector::<f32, Const<2>>::new(0.0f32);
            term.insert(0usize, factor * comptime!(numbers.factor()));
            term.insert(1usize, added);
            to[at / a_row * comptime!(config.term_row()) + at % a_row] = term;
        }
    }
}
