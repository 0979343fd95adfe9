//! The products of one step: codes to integers, integers times x, and what scales them.

use super::super::integers::{integers, split};
use super::shape::{RUNS, SPAN, Shape};
use crate::gpu::decode::{bias_of, scale_of};
use crate::gpu::layout::{RUN, Scales};
use crate::gpu::ptx::multiply;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The products of a unit's spans, which have these words; `first` is the step's first span in the chunk of x.
#[cube]
pub(super) fn multiply_spans(
    words: &Array<u32>,
    xs: &Shared<[Vector<u32, Const<4>>]>,
    first: usize,
    ones: u32,
    #[comptime] shape: Shape,
) -> Array<f32> {
    let pairs = comptime!(shape.pairs());
    let a_group = comptime!(SPAN / 4 / shape.groups());
    let unit = UNIT_POS_X as usize % 32;
    let (g, t) = (unit / 4, unit % 4);
    let mut halves = Array::<u32>::new(comptime!(shape.rows() * shape.halves()));
    #[unroll]
    for r in 0..comptime!(shape.rows()) {
        let (from, to) = comptime!((r * RUNS * shape.layout.bits, r * shape.halves()));
        split(words, from, &mut halves, to, SPAN, shape.integers());
    }
    let mut products = Array::<f32>::new(comptime!(shape.product_at(shape.pairs(), 0, 0)));
    #[unroll]
    for i in 0..comptime!(shape.product_at(shape.pairs(), 0, 0)) {
        products[i] = 0.0;
    }
    let zeros = Vector::<u32, Const<4>>::new(0u32);
    // A vector of x serves two products, and each product takes two pairs of codes of a row.
    #[unroll]
    for v in 0..comptime!(SPAN / 8) {
        let mut b = Array::<u32>::new(comptime!(4 * shape.pairs()));
        #[unroll]
        for f in 0..pairs {
            let column = min(g / 4 + comptime!(2 * f), comptime!(shape.columns - 1));
            let mut vector = zeros;
            if t == g % 4 {
                vector = xs[column * comptime!(shape.x_row()) + comptime!(v * shape.chunk) + first + t];
            }
            #[unroll]
            for j in 0..4usize {
                b[4 * f + j] = vector.extract(j);
            }
        }
        #[unroll]
        for half in 0..2usize {
            let step = comptime!(2 * v + half);
            #[unroll]
            for tile in 0..comptime!(shape.tiles) {
                let mut a = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    let (r, q) = comptime!((2 * tile + i % 2, 2 * step + i / 2));
                    a[i] = integers(&halves, comptime!(r * shape.halves()), q, ones, shape.integers());
                }
                #[unroll]
                for f in 0..pairs {
                    let at = comptime!(shape.product_at(f, tile, step / a_group));
                    let right = comptime!(2 * (2 * f + half));
                    multiply(&a, 0usize, b[right], b[right + 1], &mut products, at, shape.dtype);
                }
            }
        }
    }
    products
}

/// Scales the products of groups, and adds them to the unit's sums.
#[cube]
pub(super) fn scale_products<S: Int, B: Int>(
    products: &Array<f32>,
    x_sums: &Shared<[f32]>,
    scales: &Shared<[S]>,
    biases: &Shared<[B]>,
    first: usize,
    sums: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let unit = UNIT_POS_X as usize % 32;
    let (g, t) = (unit / 4, unit % 4);
    let span = first + t % 2 * 2;
    // Of each pair of rows of x, span and group.
    let mut of_x =
        Array::<f32>::new(comptime!(usize::max(1, shape.pairs() * 2 * shape.x_sums() / shape.columns)));
    #[unroll]
    for i in 0..comptime!(shape.pairs() * 2 * shape.x_sums() / shape.columns) {
        let a_pair = comptime!(2 * shape.groups());
        let column = min(t / 2 + comptime!(i / a_pair * 2), comptime!(shape.columns - 1));
        let at = column * comptime!(shape.chunk) + span;
        of_x[i] = x_sums[at * comptime!(shape.groups()) + comptime!(i % a_pair)];
    }
    #[unroll]
    for r in 0..comptime!(shape.rows()) {
        let row = g + comptime!(8 * r);
        #[unroll]
        for i in 0..2usize {
            #[unroll]
            for group in 0..comptime!(shape.groups()) {
                // Two neighbours may share what scales them.
                let at = span + comptime!(i % shape.scaled_spans());
                let (scale, bias) = elements::<S, B>(scales, biases, row, at, group, shape);
                #[unroll]
                for f in 0..comptime!(shape.pairs()) {
                    let product = comptime!(shape.product_at(f, r / 2, group) + r % 2 * 2 + i);
                    let mut value = products[product] * comptime!(shape.integers().factor());
                    let x_sum = comptime!((f * 2 + i) * shape.groups() + group);
                    if comptime!(shape.integers().zero() != 0.0) {
                        value = fma(of_x[x_sum], comptime!(-shape.integers().zero()), value);
                    }
                    let at = comptime!(r * shape.pairs() + f);
                    sums[at] = fma(scale, value, sums[at]);
                    if comptime!(layout.biased()) {
                        sums[at] = fma(bias, of_x[x_sum], sums[at]);
                    }
                }
            }
        }
    }
}

/// What scales group `group` of span `span` of the chunk, and what is added to it.
#[cube]
fn elements<S: Int, B: Int>(
    scales: &Shared<[S]>,
    biases: &Shared<[B]>,
    row: usize,
    span: usize,
    #[comptime] group: usize,
    #[comptime] shape: Shape,
) -> (f32, f32) {
    let layout = comptime!(shape.layout);
    let (scale_row, bias_row) = comptime!(shape.element_rows());
    let mut scale = 0u32;
    let mut bias = 0u32;
    match comptime!(layout.scales) {
        Scales::One | Scales::E8M0 { .. } | Scales::E4M3 => (),
        Scales::Group { size, biased, .. } => {
            let at = (span * SPAN + comptime!(group * shape.group())) / size;
            scale = u32::cast_from(scales[row * scale_row + at]);
            if comptime!(biased) {
                bias = u32::cast_from(biases[row * bias_row + at]);
            }
        }
        Scales::Super { .. } | Scales::SuperWithMinima { .. } => {
            let run = span * RUNS + comptime!(group * shape.group() / RUN);
            scale = u32::cast_from(scales[row * scale_row + run]);
            bias = u32::cast_from(biases[row * bias_row + run / 8]);
        }
    }
    let of_run = comptime!(group % (RUN / layout.group()));
    (scale_of(scale, bias, of_run, layout), bias_of(scale, bias, of_run, layout))
}
