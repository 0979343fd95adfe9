//! The product with some rows of x, 8 to 32, on CUDA's tensor cores: as [`mma_vec`](super::mma_vec) an exact one, of
//! codes as integers. All 4 units that share a row of the weight have parts of the same group, so that the 8 columns of
//! a product are 8 rows of x, and what is decoded serves all of them:
//!
//! ```text
//! unit 4 g + t      weight: quarter t of a group, of rows g and g + 8     x: quarter t, row g
//!                   sums:   rows 2 t and 2 t + 1 of x, rows g and g + 8 of the weight
//! ```
//!
//! Quarters of a group are fewer bytes than one load can have: with up to 5 rows of x `mma_vec` is faster.
//!
//! Where each row of x chooses its batch of the weight, a cube has a batch, and looks for its rows itself: see `chosen.rs`.

pub(crate) mod chosen;
mod products;
mod shape;
mod terms;
mod weight;

pub(super) use shape::STEP;
pub(crate) use shape::Shape;

use super::mat_vec::place;
use super::share::{Chunk, Planes, Rows, Staged, stage, store_sums};
use crate::gpu::compile::{Target, buffer, early, overlap};
use crate::gpu::float::with_storage;
use crate::gpu::layout::{Codes, Layout, RUN, with_planes};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
#[cfg(test)]
use lowbit_formats::Format;
use products::{add_scaled, multiply_group, of_step, places, scaling, sum_groups};
use terms::{keep_terms, load_terms};
use weight::Weight;

/// Whether a device has this kernel for a layout and a type of x: codes that the type has as integers, in groups whose
/// quarters are whole words and whole pairs.
pub(super) fn supports(target: &Target, layout: Layout, dtype: FloatType) -> bool {
    if !matches!(layout.codes, Codes::Integer { .. }) || !target.tensor_cores() {
        return false;
    }
    let bits = match dtype {
        FloatType::F32 => 0,
        FloatType::F16 => 8,
        FloatType::BF16 => 6,
    };
    let (part, pairs) =
        (shape::group(layout) / 4, super::integers::Integers::new(layout, dtype).distance() * 2);
    layout.bits <= bits && (part * layout.bits).is_multiple_of(32) && part.is_multiple_of(pairs.max(8))
}

/// What [`mat_vec`](super::mat_vec) computes, of the same operands.
#[cube(launch_unchecked)]
fn mma_rows<S: Int, B: Int, Y: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    x: &[Vector<u32, Const<4>>],
    ids: &[u32],
    y: &mut [Y],
    n: u32,
    runs: u32,
    batches: u32,
    rows_a_batch: u32,
    experts: u32,
    pairs: u32,
    share: u32,
    ones: u32,
    #[comptime] shape: Shape,
) {
    // The weight's planes.
    early(3usize);
    // The last launch may have written the ids, but not the weight. Without runs there is no later place to wait.
    if comptime!(shape.overlaps && !shape.listed()) && (experts > 0 || runs == 0) {
        overlap();
    }
    let place = if comptime!(shape.listed()) {
        chosen::place(experts)
    } else {
        place(ids, (batches, rows_a_batch), (experts, pairs, share), shape.columns)
    };
    let (n, runs) = (n as usize, runs as usize);
    let run = place.x_row * runs;
    let planes = Planes::new(codes, scales, biases);
    let mut weight = Weight::new(planes, &place, n, runs, shape);
    let mut shared = shares(shape);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(shape.splits * shape.columns * shape.rows()));
    weight.fetch_first(shape);
    // How many times as many rows as a cube takes there are: one time, or up to where its list ends.
    let mut all = 1usize.runtime();
    let mut found = Shared::<[u16]>::new_slice(comptime!(shape.ids.max(1)));
    let mut list = Shared::<[u32]>::new_aligned_slice(shape.columns, 16usize);
    if comptime!(shape.listed()) {
        if comptime!(shape.overlaps) {
            overlap();
        }
        all = chosen::find(ids, pairs, experts, &mut found, shape);
    }
    let mut first = 0usize;
    while first < all {
        let rows = if comptime!(shape.listed()) {
            if first > 0 {
                // All have stored what they had before.
                sync_cube();
                weight.fetch_first(shape);
            }
            chosen::rows(&found, first, all, share, &mut list, shape)
        } else {
            Rows { count: place.count, run, y: place.t0, list: 0u32.runtime() }
        };
        let sums = product(&mut weight, x, &rows, ones, &mut shared, shape);
        store::<S, B, V, Y>(&sums, y, &rows, &weight, &mut partial, shape);
        first += shape.columns;
    }
}

/// What a cube's units share of a chunk.
#[derive(CubeType)]
struct Shares {
    x: Staged,
    /// What scales the weight's groups.
    terms: Shared<[Vector<f32, Const<2>>]>,
}

#[cube]
fn shares(#[comptime] shape: Shape) -> Shares {
    let values = Shared::new_slice(comptime!(shape.columns * shape.x_row()));
    let sums = Shared::new_aligned_slice(comptime!(shape.columns * shape.sum_row()), 16usize);
    let terms = Shared::new_aligned_slice(comptime!(shape.rows() * shape.term_row()), 16usize);
    Shares { x: Staged { values, sums }, terms }
}

/// A unit's sums of the products of the cube's rows, the weight's first step in its words.
#[cube]
fn product<S: Int, B: Int, V: Size>(
    weight: &mut Weight<'_, S, B, V>,
    x: &[Vector<u32, Const<4>>],
    rows: &Rows,
    ones: u32,
    shared: &mut Shares,
    #[comptime] shape: Shape,
) -> Array<f32> {
    let sums_count = comptime!(4 * shape.tiles * shape.columns8());
    let mut sums = Array::<f32>::new(sums_count);
    #[unroll]
    for i in 0..sums_count {
        sums[i] = weight.initial;
    }
    let first = places(&shared.x, &shared.terms, weight.strip, shape);
    let mut step = UNIT_POS_X as usize / 32 % shape.splits;
    let mut chunk = 0usize;
    let steps = (weight.runs * comptime!(RUN) + comptime!(STEP - 1)) / comptime!(STEP);
    while chunk < steps {
        if chunk > 0 {
            sync_cube();
        }
        let part = Chunk { first: chunk * comptime!(STEP / RUN), runs: weight.runs };
        let loaded = load_terms(&*weight, &part, shape);
        if comptime!(shape.overlaps) {
            overlap();
        }
        stage(x, rows, &part, &mut shared.x, shape.staging());
        keep_terms(&loaded, &mut shared.terms, shape);
        sync_cube();
        sum_groups(first.x, &mut shared.x.sums, shape);
        sync_cube();
        let end = min(chunk + comptime!(shape.chunk), steps);
        while step < end {
            let places = of_step(&first, (step - chunk) as u32, shape);
            #[unroll]
            for pair in 0..comptime!(shape.groups() / 2) {
                let scaling = scaling(&places, pair, shape);
                #[unroll]
                for i in 0..2usize {
                    let group = comptime!(2 * pair + i);
                    let products = multiply_group(&weight.words, places.x, ones, group, shape);
                    // What comes next is under way while the other groups are multiplied.
                    weight.fetch(step + shape.splits, group, shape);
                    add_scaled(&products, &scaling, i, &mut sums, shape);
                }
            }
            step += shape.splits;
        }
        chunk += comptime!(shape.chunk);
    }
    sums
}

/// Adds up what the planes have of each sum, and stores those that there are rows for.
#[cube]
fn store<S: Int, B: Int, V: Size, Y: Int>(
    sums: &Array<f32>,
    y: &mut [Y],
    rows: &Rows,
    of: &Weight<'_, S, B, V>,
    partial: &mut Shared<[f32]>,
    #[comptime] shape: Shape,
) {
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    let (g, t) = (unit / 4, unit % 4);
    let first = (plane % shape.splits * shape.columns + 2 * t) * comptime!(shape.rows()) + of.strip + g;
    #[unroll]
    for f in 0..comptime!(shape.columns8()) {
        #[unroll]
        for i in 0..comptime!(4 * shape.tiles) {
            let at = comptime!((8 * f + i % 2) * shape.rows() + 8 * (i / 2));
            partial[first + at] = sums[comptime!(f * 4 * shape.tiles + i)];
        }
    }
    sync_cube();
    store_sums::<Y>(&*partial, y, of.n, of.row0, rows, shape.stored());
}

/// The kernel for `shape`, its types chosen by what the layout stores.
pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.units() as u32);
    let [codes, scales, biases] = [buffer(), buffer(), buffer()];
    let [x, ids, y] = [buffer(), buffer(), buffer()];
    with_planes!(shape.layout, S, B => with_storage!(shape.result, Y => Box::new(mma_rows::MmaRows::<S, B, Y>::new(
        settings, properties, registers, codes, scales, biases, x, ids, y, (), (), (), (), (), (), (), (),
        shape.vector(), shape,
    ))))
}

/// Both types of x for each format, both numbers of steps, and rows that follow each other or are found by ids.
#[cfg(test)]
pub(super) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    for layout in formats.iter().map(|&format| Layout::of(format)) {
        for (dtype, result, columns, whole, ids) in [
            (F16, F16, 8, false, 0),
            (BF16, BF16, 16, true, 0),
            (F16, F32, 32, true, 0),
            (F16, F16, 8, true, 512),
            (BF16, BF16, 24, false, 4096),
        ] {
            if supports(target, layout, dtype) {
                let (tiles, splits) = if ids == 512 { (2, 1) } else { (1, 2) };
                let shape = Shape {
                    layout,
                    dtype,
                    result,
                    columns,
                    tiles,
                    strips: 4,
                    splits,
                    chunk: 4,
                    whole,
                    ids,
                    overlaps: target.overlaps(),
                };
                kernels.push(kernel(target, shape));
            }
        }
    }
    kernels
}
