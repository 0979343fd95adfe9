//! The product with few rows of x on CUDA's tensor cores. A plane multiplies 16 rows of the weight with 8 columns at a
//! time; of x's f16 and bf16 values and the weight's codes as integers of the same type, so that all products are exact.
//!
//! A unit holds one span of two of the weight's rows (two runs, next to each other), and the 4 spans that a plane has
//! of a row belong to different groups. So that their sums stay apart, each has a column of its own: it has x where its
//! span is, and zeros elsewhere. The 8 columns are thus 4 spans of 2 rows of x:
//!
//! ```text
//! unit 4 g + t      weight: span t of rows g and g + 8     x: span g % 4 of row g / 4, if t = g % 4
//!                   sums:   spans 2 (t % 2) and the next, row t / 2 of x, rows g and g + 8 of the weight
//! ```

mod products;
mod shape;
mod share;
pub(super) mod source;
pub(super) mod stream;

use shape::RUNS;
pub(crate) use shape::Shape;

use super::mat_vec::{Place, place};
use super::share::{Chunk, Rows, stage, store_sums};
use crate::gpu::compile::{Target, buffer, early, overlap};
use crate::gpu::decode::load;
use crate::gpu::float::with_storage;
use crate::gpu::layout::{Codes, Layout, with_planes};
use crate::gpu::ptx::address;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
#[cfg(test)]
use lowbit_formats::Format;
use products::{Step, multiply_spans, scale_products};
use share::{elements, keep_elements, load_elements, staged};
use source::Inputs;

/// Whether a device has this kernel for a layout and a type of x. Wider codes fill the memory's bandwidth without it.
pub(super) fn supports(target: &Target, layout: Layout, dtype: FloatType) -> bool {
    let few = matches!(layout.codes, Codes::Integer { .. }) && layout.bits <= 4;
    target.tensor_cores() && dtype != FloatType::F32 && few
}

/// What [`mat_vec`](super::mat_vec) computes, of the same operands and `up`, see [`Shape::made`].
#[cube(launch_unchecked)]
fn mma_vec<S: Int, B: Int, Y: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    x: &[Vector<u32, Const<4>>],
    ids: &[u32],
    y: &mut [Y],
    up: &[Vector<u32, Const<4>>],
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
    let sums_count = comptime!(shape.rows() * shape.pairs());
    let stride = comptime!(4 * shape.planes);
    // The last launch may have written the ids, but not the weight. Without runs there is no later place to wait.
    if comptime!(shape.overlaps) && (experts > 0 || runs == 0) {
        overlap();
    }
    let place = place(ids, (batches, rows_a_batch), (experts, pairs, share), shape.columns);
    let n = n as usize;
    let mut runs = runs as usize;
    let row0 = CUBE_POS_X as usize * comptime!(16 * shape.tiles);
    let starts = starts(&place, row0, n, runs, shape);
    let mut run = place.x_row * runs;
    let x_row = run;
    if comptime!(shape.made > 0) {
        run = 0;
    }
    let rows_of_x = Rows { count: place.count, run, y: place.t0, list: 0u32.runtime() };
    if !place.known {
        runs = 0;
    }
    let mut sums = Array::<f32>::new(sums_count);
    #[unroll]
    for i in 0..sums_count {
        sums[i] = place.initial;
    }

    let mut xs = staged(shape);
    let mut made =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(shape.making().vectors()), 16usize);
    let mut scaling = elements::<S, B>(comptime!(16 * shape.tiles), 16usize, shape);
    let mut words = Array::<u32>::new(comptime!(shape.fetched()));
    let mut first = UNIT_POS_X as usize / 32 * 4;
    fetch::<V>(codes, &starts, first, runs, &mut words, shape);
    let mut chunk = 0usize;
    let spans = (runs + comptime!(RUNS - 1)) / RUNS;
    while chunk < spans {
        if chunk > 0 {
            sync_cube();
        }
        let row = place.batch * n + row0;
        let part = Chunk { first: chunk * RUNS, runs };
        let loaded_scales = load_elements::<S>(scales, row, n - row0, &part, false, shape);
        let loaded_biases = load_elements::<B>(biases, row, n - row0, &part, true, shape);
        if comptime!(shape.overlaps) {
            overlap();
        }
        if comptime!(shape.made == 0) {
            stage(x, &rows_of_x, &part, &mut xs, shape.staging());
        } else {
            if chunk == 0 {
                let from = Inputs::new(x, up, x_row * 4, comptime!(shape.made).runtime());
                source::silu_mul(&from, &mut made, shape.making());
                sync_cube();
            }
            stage(made.as_slice(), &rows_of_x, &part, &mut xs, shape.staging());
        }
        keep_elements::<S>(&loaded_scales, &mut scaling.scales, false, shape);
        keep_elements::<B>(&loaded_biases, &mut scaling.biases, true, shape);
        sync_cube();
        let end = min(chunk + comptime!(shape.chunk), spans);
        while first < end {
            let products = multiply_spans(&words, address(&xs.values), first - chunk, ones, shape);
            fetch::<V>(codes, &starts, first + stride, runs, &mut words, shape);
            let at = first - chunk;
            let step = Step { first: at, row: 0usize.runtime(), span: at };
            scale_products(&products, &xs.sums, &scaling, &step, &mut sums, shape);
            first += stride;
        }
        chunk += comptime!(shape.chunk);
    }
    store::<Y>(&sums, y, n, row0, &rows_of_x, shape);
}

/// The first runs of a unit's rows of the weight, where the cube's first is `row0` of the batch at `place`.
#[cube]
fn starts(place: &Place, row0: usize, n: usize, runs: usize, #[comptime] shape: Shape) -> Array<usize> {
    let mut starts = Array::<usize>::new(comptime!(shape.rows()));
    #[unroll]
    for r in 0..comptime!(shape.rows()) {
        // Rows past the last are computed and not stored.
        let row = row0 + UNIT_POS_X as usize % 32 / 4 + comptime!(8 * r);
        starts[r] = (place.batch * n + min(row, n - 1)) * runs;
    }
    starts
}

/// Loads a unit's spans of the weight, for the step that begins with span `first`.
#[cube]
fn fetch<V: Size>(
    codes: &[Vector<u32, V>],
    starts: &Array<usize>,
    first: usize,
    runs: usize,
    to: &mut Array<u32>,
    #[comptime] shape: Shape,
) {
    if first * RUNS < runs {
        let run = (first + UNIT_POS_X as usize % 4) * RUNS;
        #[unroll]
        for r in 0..comptime!(shape.rows()) {
            #[unroll]
            for i in 0..RUNS {
                let at = comptime!((r * RUNS + i) * shape.layout.bits);
                // Runs past the last are multiplied with zeros.
                load::<V>(codes, starts[r] + min(run + i, runs - 1), to, at, shape.layout);
            }
        }
    }
}

/// Adds up what the units have of each sum, and stores those that there are rows for.
#[cube]
fn store<Y: Int>(sums: &Array<f32>, y: &mut [Y], n: usize, row0: usize, of: &Rows, #[comptime] shape: Shape) {
    let (rows, columns) = comptime!((16 * shape.tiles, 2 * shape.pairs()));
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    let (g, t) = (unit / 4, unit % 4);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(32 * shape.tiles * shape.pairs() * shape.planes));
    #[unroll]
    for r in 0..comptime!(shape.rows()) {
        #[unroll]
        for f in 0..comptime!(shape.pairs()) {
            let mut sum = sums[comptime!(r * shape.pairs() + f)];
            sum += plane_shuffle_xor(sum, 1u32);
            if t % 2 == 0 {
                partial[(plane * columns + comptime!(2 * f) + t / 2) * rows + g + comptime!(8 * r)] = sum;
            }
        }
    }
    sync_cube();
    store_sums::<Y>(&partial, y, n, row0, of, shape.stored());
}

/// The kernel for `shape`, its types chosen by what the layout stores.
pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(32 * shape.planes as u32);
    let [codes, scales, biases] = [buffer(), buffer(), buffer()];
    let [x, ids, y, up] = [buffer(), buffer(), buffer(), buffer()];
    with_planes!(shape.layout, S, B => with_storage!(shape.result, Y => Box::new(mma_vec::MmaVec::<S, B, Y>::new(
        settings, properties, registers, codes, scales, biases, x, ids, y, up, (), (), (), (), (), (), (), (),
        shape.layout.vector(), shape,
    ))))
}

/// Both types of x for each format; where there are more rows of x, for one.
#[cfg(test)]
pub(super) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for layout in formats.iter().map(|&format| Layout::of(format)) {
        use FloatType::{BF16, F16, F32};
        for (dtype, result, columns) in [(F16, F16, 1), (BF16, F32, 1), (F16, F16, 8)] {
            if supports(target, layout, dtype) {
                let shape = Shape {
                    layout,
                    dtype,
                    result,
                    columns,
                    tiles: 1,
                    planes: 4,
                    chunk: 64,
                    scaled: 64,
                    made: 0,
                    overlaps: target.overlaps(),
                };
                kernels.push(kernel(target, shape));
                if columns == 1 {
                    kernels.push(kernel(target, Shape { made: 64, ..shape }));
                }
            }
        }
    }
    kernels
}
