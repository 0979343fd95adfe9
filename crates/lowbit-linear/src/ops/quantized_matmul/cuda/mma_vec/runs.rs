//! The scaling of one row of x where each run has a scale of its own, or two: a unit's columns have
//! one run each of two neighbouring spans.

use super::config::{MmaVec, RUNS};
use super::products::Step;
use super::scales::Elements;
use crate::gpu::cuda::ptx::{address, e4m3_pair, register, shared};
use crate::gpu::decode::{INTEGERS, bias_of, scale_of};
use crate::gpu::float::widen;
use crate::gpu::layout::{Layout, Scales};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Of a row of the weight, the first of a unit's two runs among those whose scales units share: the
/// other one is [`RUNS`] further.
#[derive(CubeType)]
struct Place {
    row: usize,
    run: usize,
}

/// Scales the products of groups, and adds them to the unit's sums.
#[cube]
pub(super) fn scale_runs<S: Int, B: Int>(
    products: &Array<f32>,
    x_sums: &Shared<[f32]>,
    scaling: &Elements<S, B>,
    step: &Step,
    sums: &mut Array<f32>,
    #[comptime] config: MmaVec,
) {
    let (numbers, groups) = comptime!((config.numbers(), config.column_groups()));
    let unit = UNIT_POS_X as usize % 32;
    let (g, t) = (unit / 4, unit % 4);
    let run = t % 2 * comptime!(2 * RUNS) + t / 2;
    // Of each of both runs and its groups.
    let mut of_x = Array::<f32>::new(comptime!(2 * groups));
    if comptime!(config.sums()) {
        #[unroll]
        for i in 0..comptime!(2 * groups) {
            let at = step.first * RUNS + run + comptime!(i / groups * RUNS);
            of_x[i] = x_sums[at * groups + comptime!(i % groups)];
        }
    }
    #[unroll]
    for r in 0..comptime!(config.n_unit()) {
        let place = Place { row: step.row + g + comptime!(8 * r), run: step.span * RUNS + run };
        let mut values = Array::<f32>::new(comptime!(2 * groups));
        #[unroll]
        for i in 0..comptime!(2 * groups) {
            let product = comptime!(config.product_at(0, r / 2, i % groups) + r % 2 * 2 + i / groups);
            values[i] = products[product];
            if comptime!(numbers.zero() != 0.0) {
                values[i] = fma(of_x[i], comptime!(-numbers.zero() / numbers.factor()), values[i]);
            }
        }
        if comptime!(matches!(config.layout.scales, Scales::Super { .. } | Scales::SuperWithMinima { .. })) {
            sums[r] += of_superblock(scaling, &place, &values, &of_x, config);
        } else if comptime!(config.layout.scales == Scales::E4M3 && config.overlaps) {
            sums[r] += of_small_floats(scaling, &place, &values, config);
        } else {
            sums[r] += of_elements(scaling, &place, &values, &of_x, config);
        }
    }
}

/// The scaled products of a row where each group's scale stands by itself.
#[cube]
fn of_elements<S: Int, B: Int>(
    scaling: &Elements<S, B>,
    place: &Place,
    values: &Array<f32>,
    of_x: &Array<f32>,
    #[comptime] config: MmaVec,
) -> f32 {
    let (layout, groups) = comptime!((config.layout, config.column_groups()));
    let (scale_row, bias_row) = comptime!(config.element_rows());
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..comptime!(2 * groups) {
        let run = place.run + comptime!(i / groups * RUNS);
        let scale =
            u32::cast_from(scaling.scales[place.row * scale_row + run * groups + comptime!(i % groups)]);
        sum =
            fma(scale_of(scale, 0u32, 0usize, layout), values[i] * comptime!(config.numbers().factor()), sum);
        if comptime!(layout.biased()) {
            let bias = u32::cast_from(scaling.biases[place.row * bias_row + run]);
            sum = fma(bias_of(0u32, bias, 0usize, layout), of_x[i], sum);
        }
    }
    sum
}

/// The same where scales are e4m3, two per run.
#[cube]
fn of_small_floats<S: Int, B: Int>(
    scaling: &Elements<S, B>,
    place: &Place,
    values: &Array<f32>,
    #[comptime] config: MmaVec,
) -> f32 {
    let scale_row = comptime!(config.element_rows().0);
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..2usize {
        // Those of both runs of a span are a word.
        let span = place.run / RUNS + i;
        let from = address(&scaling.scales) + (place.row * scale_row + span * comptime!(2 * RUNS)) as u32;
        let word = shared::<u32, Const<1>>(register(from), 0usize, 1usize).extract(0usize);
        let pair = e4m3_pair(word >> (place.run % RUNS * 16) as u32);
        let factor = comptime!(config.numbers().factor());
        sum = fma(widen(pair & 0xffffu32, FloatType::F16), values[2 * i] * factor, sum);
        sum = fma(widen(pair >> 16u32, FloatType::F16), values[2 * i + 1] * factor, sum);
    }
    sum
}

/// The same in superblocks, of which a step has one per row: sums of integers times products, and
/// then the superblock's scales.
#[cube]
fn of_superblock<S: Int, B: Int>(
    scaling: &Elements<S, B>,
    place: &Place,
    values: &Array<f32>,
    of_x: &Array<f32>,
    #[comptime] config: MmaVec,
) -> f32 {
    let (layout, groups) = comptime!((config.layout, config.column_groups()));
    let (scale_row, bias_row) = comptime!(config.element_rows());
    let mut scaled = Array::<f32>::new(groups);
    let mut minima = Array::<f32>::new(groups);
    #[unroll]
    for group in 0..groups {
        scaled[group] = 0.0;
        minima[group] = 0.0;
    }
    #[unroll]
    for i in 0..comptime!(2 * groups) {
        let group = comptime!(i % groups);
        let run = place.run + comptime!(i / groups * RUNS);
        let word = u32::cast_from(scaling.scales[place.row * scale_row + run]);
        let (scale, minimum) = comptime!((SubScale::scale(layout, group), SubScale::minimum(layout, group)));
        scaled[group] = fma(integer(word, scale), values[i], scaled[group]);
        if comptime!(layout.biased()) {
            minima[group] = fma(integer(word, minimum), of_x[i], minima[group]);
        }
    }
    let factors = u32::cast_from(scaling.biases[place.row * bias_row + place.run / 8]);
    let scale = widen(factors & 0xffffu32, FloatType::F16) * comptime!(config.numbers().factor());
    let mut sum = 0.0f32;
    #[unroll]
    for group in 0..groups {
        sum = fma(scaled[group], comptime!(SubScale::scale(layout, group).unit()), sum);
    }
    sum *= scale;
    if comptime!(layout.biased()) {
        let mut all = 0.0f32;
        #[unroll]
        for group in 0..groups {
            all = fma(minima[group], comptime!(SubScale::minimum(layout, group).unit()), all);
        }
        sum = fma(-widen(factors >> 16u32, FloatType::F16), all, sum);
    }
    sum
}

/// The place of a group's integer in the element of its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SubScale {
    bit: u32,
    bits: u32,
    signed: bool,
}

impl SubScale {
    /// The scale of group `group` of a run.
    fn scale(layout: Layout, group: usize) -> Self {
        let bit = 8 * group as u32;
        match layout.scales {
            Scales::SuperWithMinima { size: 16 } => Self { bit, bits: 4, signed: false },
            Scales::SuperWithMinima { .. } => Self { bit, bits: 8, signed: false },
            _ => Self { bit, bits: 8, signed: true },
        }
    }

    /// The minimum, which is subtracted.
    fn minimum(layout: Layout, group: usize) -> Self {
        let scale = Self::scale(layout, group);
        Self { bit: scale.bit + scale.bits, ..scale }
    }

    /// The unit of [`integer`]'s results.
    fn unit(self) -> f32 {
        1.0 / (1u32 << self.bit) as f32
    }
}

/// An integer of a run's element, in units of [`SubScale::unit`]: it goes into the mantissa where
/// it is.
#[cube]
fn integer(word: u32, #[comptime] of: SubScale) -> f32 {
    let field = word & comptime!(((1u32 << of.bits) - 1) << of.bit);
    let sign = comptime!(if of.signed { 1u32 << (of.bit + of.bits - 1) } else { 0u32 });
    f32::reinterpret(field ^ comptime!(INTEGERS | sign)) - comptime!((8_388_608 + sign) as f32)
}
