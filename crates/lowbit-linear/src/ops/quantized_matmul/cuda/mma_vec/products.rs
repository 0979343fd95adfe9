//! The products of one step: codes to numbers, numbers times x, and what scales them.

use super::super::numbers::{numbers, split};
use super::config::{MmaVec, RUNS, SPAN, X_SPAN};
use super::runs::scale_runs;
use super::scales::Elements;
use crate::gpu::cuda::ptx::{address, multiply, register, shared, shared_words};
use crate::gpu::decode::{bias_of, scale_of};
use crate::gpu::layout::{RUN, Scales};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The place of a unit's x, of each pair of rows of x, or of each run where [`MmaVec::runs_apart`]:
/// in its spans, or in the zeros after all of x.
#[derive(CubeType)]
pub(in super::super) struct XPlaces {
    /// Addresses in shared memory, for the span that is x's first.
    pub begins: Array<u32>,
    /// Bytes from one span to the next: none from zeros.
    pub steps: Array<u32>,
}

/// The number of places in [`XPlaces`].
pub(in super::super) fn x_places_count(config: MmaVec) -> usize {
    if config.runs_apart() { RUNS } else { config.pairs() }
}

/// A unit's places where x is shared at `xs`.
#[cube]
pub(in super::super) fn x_places(xs: u32, #[comptime] config: MmaVec) -> XPlaces {
    let unit = UNIT_POS_X as usize % 32;
    let (g, t) = (unit / 4, unit % 4);
    let count = comptime!(x_places_count(config));
    let (mut begins, mut steps) = (Array::<u32>::new(count), Array::<u32>::new(count));
    #[unroll]
    for f in 0..count {
        let column = min(g / 4 + comptime!(2 * f), comptime!(config.m_tile - 1));
        let begin = column * comptime!(config.x_row()) + t * X_SPAN;
        let zeros = comptime!(config.m_tile * config.x_row());
        let mut has_span = t == g % 4;
        if comptime!(config.runs_apart()) {
            has_span = t + comptime!(4 * f) == g;
        }
        begins[f] = xs + select(has_span, begin, zeros) as u32 * 16u32;
        steps[f] = select(has_span, comptime!(16 * X_SPAN as u32).runtime(), 0u32.runtime());
    }
    XPlaces { begins, steps }
}

/// The products of a unit's spans, which have these words. `first` is the step's first span of x.
#[cube]
pub(in super::super) fn multiply_spans(
    words: &Array<u32>,
    xs: &XPlaces,
    first: usize,
    ones: u32,
    #[comptime] config: MmaVec,
) -> Array<f32> {
    let pairs = comptime!(config.pairs());
    let a_group = comptime!(SPAN / 4 / config.groups());
    let mut halves = Array::<u32>::new(comptime!(config.n_unit() * config.halves()));
    #[unroll]
    for r in 0..comptime!(config.n_unit()) {
        let (from, to) = comptime!((r * RUNS * config.layout.bits, r * config.halves()));
        split(words, from, &mut halves, to, SPAN, ones, config.numbers());
    }
    let count = comptime!(config.product_at(config.pairs(), 0, 0));
    let mut products = Array::<f32>::new(comptime!(count * config.numbers().places));
    #[unroll]
    for i in 0..comptime!(count * config.numbers().places) {
        products[i] = 0.0;
    }
    let mut from = Array::<u32>::new(comptime!(x_places_count(config)));
    #[unroll]
    for f in 0..comptime!(x_places_count(config)) {
        from[f] = register(xs.begins[f] + first as u32 * xs.steps[f]);
    }
    // A vector of x serves two products, and each product takes two pairs of codes of a row.
    #[unroll]
    for v in 0..comptime!(SPAN / 8) {
        let mut b = Array::<u32>::new(comptime!(4 * config.pairs()));
        #[unroll]
        for f in 0..pairs {
            let of = comptime!(if config.runs_apart() { v * 8 / RUN } else { f });
            let vector = shared::<u32, Const<4>>(from[of], comptime!(16 * v), 4usize);
            #[unroll]
            for j in 0..4usize {
                b[4 * f + j] = vector.extract(j);
            }
        }
        #[unroll]
        for half in 0..2usize {
            let step = comptime!(2 * v + half);
            #[unroll]
            for tile in 0..comptime!(config.n_tiles) {
                let mut a = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    let (r, q) = comptime!((2 * tile + i % 2, 2 * step + i / 2));
                    a[i] = numbers(&halves, comptime!(r * config.halves()), q, ones, config.numbers());
                }
                #[unroll]
                for f in 0..pairs {
                    let at = comptime!(
                        config.numbers().place_of_step(step) * count
                            + config.product_at(f, tile, step / a_group % config.column_groups())
                    );
                    let right = comptime!(2 * (2 * f + half));
                    multiply(&a, 0usize, b[right], b[right + 1], &mut products, at, config.x_type);
                }
            }
        }
    }
    if comptime!(config.numbers().places == 2) {
        #[unroll]
        for i in 0..count {
            products[i] =
                fma(products[count + i], comptime!(config.numbers().second()).runtime(), products[i]);
        }
    }
    products
}

/// The place of a step: its first span in the chunk of x, and the row and the span that its scales
/// begin with among those that units share.
#[derive(CubeType)]
pub(in super::super) struct Step {
    pub first: usize,
    pub row: usize,
    pub span: usize,
}

/// Scales the products of groups, and adds them to the unit's sums.
#[cube]
pub(in super::super) fn scale_products<S: Int, B: Int>(
    products: &Array<f32>,
    x_sums: &Shared<[f32]>,
    scaling: &Elements<S, B>,
    step: &Step,
    sums: &mut Array<f32>,
    #[comptime] config: MmaVec,
) {
    if comptime!(config.runs_apart()) {
        scale_runs(products, x_sums, scaling, step, sums, config);
    } else {
        scale_spans(products, x_sums, scaling, step, sums, config);
    }
}

/// The same where a column has a whole span.
#[cube]
fn scale_spans<S: Int, B: Int>(
    products: &Array<f32>,
    x_sums: &Shared<[f32]>,
    scaling: &Elements<S, B>,
    step: &Step,
    sums: &mut Array<f32>,
    #[comptime] config: MmaVec,
) {
    let layout = comptime!(config.layout);
    let unit = UNIT_POS_X as usize % 32;
    let (g, t) = (unit / 4, unit % 4);
    let even = t % 2 * 2;
    // Of each pair of rows of x, span and group.
    let mut of_x =
        Array::<f32>::new(comptime!(usize::max(1, config.pairs() * 2 * config.x_sums() / config.m_tile)));
    #[unroll]
    for i in 0..comptime!(config.pairs() * 2 * config.x_sums() / config.m_tile) {
        let a_pair = comptime!(2 * config.groups());
        let column = min(t / 2 + comptime!(i / a_pair * 2), comptime!(config.m_tile - 1));
        let at = column * comptime!(config.chunk) + step.first + even;
        of_x[i] = x_sums[at * comptime!(config.groups()) + comptime!(i % a_pair)];
    }
    #[unroll]
    for r in 0..comptime!(config.n_unit()) {
        let row = step.row + g + comptime!(8 * r);
        let (row_scales, row_biases) = floats(scaling, row, step.span + even, config);
        #[unroll]
        for i in 0..2usize {
            #[unroll]
            for group in 0..comptime!(config.groups()) {
                let (scale, bias) = if comptime!(matches!(layout.scales, Scales::Group { .. })) {
                    // Two neighbours may share what scales them.
                    let at = comptime!(i % config.scaled_spans() * config.groups() + group);
                    (
                        scale_of(row_scales[at], 0u32, 0usize, layout),
                        bias_of(0u32, row_biases[at], 0usize, layout),
                    )
                } else {
                    elements(scaling, row, step.span + even + i, group, config)
                };
                #[unroll]
                for f in 0..comptime!(config.pairs()) {
                    let product = comptime!(config.product_at(f, r / 2, group) + r % 2 * 2 + i);
                    let mut value = products[product] * comptime!(config.numbers().factor());
                    let x_sum = comptime!((f * 2 + i) * config.groups() + group);
                    if comptime!(config.numbers().zero() != 0.0) {
                        value = fma(of_x[x_sum], comptime!(-config.numbers().zero()), value);
                    }
                    let at = comptime!(r * config.pairs() + f);
                    sums[at] = fma(scale, value, sums[at]);
                    if comptime!(layout.biased()) {
                        sums[at] = fma(bias, of_x[x_sum], sums[at]);
                    }
                }
            }
        }
    }
}

/// The floats that scale two spans of a row, from span `span` on, and those that are added; none
/// where they are not floats.
#[cube]
fn floats<S: Int, B: Int>(
    of: &Elements<S, B>,
    row: usize,
    span: usize,
    #[comptime] config: MmaVec,
) -> (Array<u32>, Array<u32>) {
    let (scale_row, bias_row) = comptime!(config.element_rows());
    let mut row_scales = Array::<u32>::new(comptime!(config.span_scales()));
    let mut row_biases = Array::<u32>::new(comptime!(config.span_scales()));
    if let Scales::Group { size, float, biased } = comptime!(config.layout.scales) {
        let at = span * SPAN / size;
        load_floats::<S>(&of.scales, row * scale_row + at, &mut row_scales, config.span_scales(), float);
        if comptime!(biased) {
            load_floats::<B>(&of.biases, row * bias_row + at, &mut row_biases, config.span_scales(), float);
        }
    }
    (row_scales, row_biases)
}

/// The bits of `count` floats, from `at` on.
#[cube]
fn load_floats<E: Int>(
    elements: &Shared<[E]>,
    at: usize,
    to: &mut Array<u32>,
    #[comptime] count: usize,
    #[comptime] float: FloatType,
) {
    if comptime!(count * float.size() < 4) {
        to[0] = u32::cast_from(elements[at]);
    } else {
        let from = register(address(elements) + at as u32 * comptime!(float.size() as u32));
        let loads = comptime!(count * float.size() / 4);
        let mut words = Array::<u32>::new(loads);
        // A load takes four words at most.
        #[unroll]
        for part in 0..comptime!(loads.div_ceil(4)) {
            let taken = comptime!(usize::min(4, loads - 4 * part));
            let some = shared_words(from, comptime!(16 * part), taken);
            #[unroll]
            for i in 0..taken {
                words[comptime!(4 * part + i)] = some[i];
            }
        }
        #[unroll]
        for i in 0..count {
            if comptime!(float.size() == 4) {
                to[i] = words[i];
            } else if comptime!(i % 2 == 0) {
                to[i] = words[comptime!(i / 2)] & 0xffffu32;
            } else {
                to[i] = words[comptime!(i / 2)] >> 16u32;
            }
        }
    }
}

/// The scale of group `group` of span `span`, and the bias that is added to it, where that is no
/// float by itself.
#[cube]
fn elements<S: Int, B: Int>(
    of: &Elements<S, B>,
    row: usize,
    span: usize,
    #[comptime] group: usize,
    #[comptime] config: MmaVec,
) -> (f32, f32) {
    let layout = comptime!(config.layout);
    let (scale_row, bias_row) = comptime!(config.element_rows());
    let run = span * RUNS + comptime!(group * config.group() / RUN);
    let of_run = comptime!(group % (RUN / layout.group()));
    let mut at = run;
    // Each group of a run has a scale of its own.
    if comptime!(layout.scales == Scales::E4M3) {
        at = run * 2 + of_run;
    }
    let scale = u32::cast_from(of.scales[row * scale_row + at]);
    let mut bias = 0u32;
    if comptime!(layout.elements(8).1 > 0) {
        bias = u32::cast_from(of.biases[row * bias_row + run / 8]);
    }
    (scale_of(scale, bias, of_run, layout), bias_of(scale, bias, of_run, layout))
}
