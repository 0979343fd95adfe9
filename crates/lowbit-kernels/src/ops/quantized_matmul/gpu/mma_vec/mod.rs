//! The product with few rows of x on CUDA's tensor cores. A plane multiplies 16 rows of the weight with 8 columns at a
//! time; of x's f16 and bf16 values and the weight's codes as integers of the same type, so that all products are exact.
//!
//! A unit holds one run of two of the weight's rows, and the 4 runs that a plane has of a row belong to different
//! groups. So that their sums stay apart, each has a column of its own: it has x where its run is, and zeros elsewhere.
//! The 8 columns are thus 4 runs of 2 rows of x:
//!
//! ```text
//! unit 4 g + t      weight: run t of rows g and g + 8      x: run g % 4 of row g / 4, if t = g % 4
//!                   sums:   runs 2 (t % 2) and the next, row t / 2 of x, rows g and g + 8 of the weight
//! ```

mod products;
mod shape;
mod share;

pub(crate) use shape::Shape;

use super::mat_vec::{Place, place};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::decode::load;
use crate::gpu::float::narrow;
use crate::gpu::layout::{Codes, Layout};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
#[cfg(test)]
use lowbit_formats::Format;
use products::{multiply_runs, scale_products};
use share::{Span, keep_elements, load_elements, stage};

/// Bits that are 1 as bf16, twice: codes go into the mantissa. An argument for the reason that
/// [`INTEGERS`](crate::gpu::decode::INTEGERS) is one.
pub(super) const ONES: u32 = 0x3f80_3f80;

/// Whether a device has this kernel for a layout and a type of x. Wider codes fill the memory's bandwidth without it.
pub(super) fn supports(target: &Target, layout: Layout, dtype: FloatType) -> bool {
    let few = matches!(layout.codes, Codes::Integer { .. }) && layout.bits <= 4;
    target.tensor_cores() && dtype != FloatType::F32 && few
}

/// What [`mat_vec`](super::mat_vec) computes, of the same operands.
#[cube(launch_unchecked)]
fn mma_vec<S: Int, B: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    x: &[Vector<u32, Const<4>>],
    ids: &[u32],
    y: &mut [u16],
    n: u32,
    runs: u32,
    batches: u32,
    rows_a_batch: u32,
    experts: u32,
    share: u32,
    ones: u32,
    #[comptime] shape: Shape,
) {
    let (rows, sums_count) = comptime!((shape.rows(), shape.rows() * shape.pairs()));
    let stride = comptime!(4 * shape.planes);
    let place = place(ids, batches, rows_a_batch, experts, shape.columns);
    let n = n as usize;
    let mut runs = runs as usize;
    let row0 = CUBE_POS_X as usize * comptime!(16 * shape.tiles);
    // Rows past the last are computed and not stored.
    let mut starts = Array::<usize>::new(rows);
    #[unroll]
    for r in 0..rows {
        let row = row0 + UNIT_POS_X as usize % 32 / 4 + comptime!(8 * r);
        starts[r] = (place.batch * n + min(row, n - 1)) * runs;
    }
    let x_row = place.t0 / share as usize * runs;
    if !place.known {
        runs = 0;
    }
    let mut sums = Array::<f32>::new(sums_count);
    #[unroll]
    for i in 0..sums_count {
        sums[i] = place.initial;
    }

    let mut xs = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(shape.columns * shape.x_row()));
    let mut x_sums = Shared::<[f32]>::new_slice(comptime!(usize::max(1, shape.x_sums() * shape.chunk)));
    let (scale_row, bias_row) = comptime!(shape.element_rows());
    let mut row_scales = Shared::<[S]>::new_slice(comptime!(16 * shape.tiles * scale_row));
    let mut row_biases = Shared::<[B]>::new_slice(comptime!(16 * shape.tiles * bias_row));
    // Two steps' loads are under way at a time.
    let mut one = Array::<u32>::new(comptime!(shape.fetched()));
    let mut other = Array::<u32>::new(comptime!(shape.fetched()));
    let mut first = UNIT_POS_X as usize / 32 * 4;
    fetch::<V>(codes, &starts, first, runs, &mut one, shape);
    fetch::<V>(codes, &starts, first + stride, runs, &mut other, shape);
    let mut chunk = 0usize;
    while chunk < runs {
        if chunk > 0 {
            sync_cube();
        }
        let row = place.batch * n + row0;
        let span = Span { first: chunk, runs };
        let loaded_scales = load_elements::<S>(scales, row, n - row0, &span, false, shape);
        let loaded_biases = load_elements::<B>(biases, row, n - row0, &span, true, shape);
        stage(x, x_row, &span, place.count, &mut xs, &mut x_sums, shape);
        keep_elements::<S>(&loaded_scales, &mut row_scales, false, shape);
        keep_elements::<B>(&loaded_biases, &mut row_biases, true, shape);
        sync_cube();
        let end = min(chunk + comptime!(shape.chunk), runs);
        while first < end {
            let mut products = multiply_runs(&one, &xs, first - chunk, ones, shape);
            fetch::<V>(codes, &starts, first + 2 * stride, runs, &mut one, shape);
            scale_products::<S, B>(
                &products,
                &x_sums,
                &row_scales,
                &row_biases,
                first - chunk,
                &mut sums,
                shape,
            );
            if first + stride < end {
                let at = first + stride - chunk;
                products = multiply_runs(&other, &xs, at, ones, shape);
                fetch::<V>(codes, &starts, first + 3 * stride, runs, &mut other, shape);
                scale_products::<S, B>(&products, &x_sums, &row_scales, &row_biases, at, &mut sums, shape);
            }
            first += 2 * stride;
        }
        chunk += comptime!(shape.chunk);
    }
    store(&sums, y, n, row0, &place, shape);
}

/// Loads a unit's runs of the weight, for the step that begins with run `first`.
#[cube]
fn fetch<V: Size>(
    codes: &[Vector<u32, V>],
    starts: &Array<usize>,
    first: usize,
    runs: usize,
    to: &mut Array<u32>,
    #[comptime] shape: Shape,
) {
    if first < runs {
        // Runs past the last are multiplied with zeros.
        let run = min(first + UNIT_POS_X as usize % 4, runs - 1);
        #[unroll]
        for r in 0..comptime!(shape.rows()) {
            load::<V>(codes, starts[r] + run, to, comptime!(r * shape.layout.bits), shape.layout);
        }
    }
}

/// Adds up what the units have of each sum, and stores those that there are rows for.
#[cube]
fn store(sums: &Array<f32>, y: &mut [u16], n: usize, row0: usize, place: &Place, #[comptime] shape: Shape) {
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
    let mut i = UNIT_POS_X as usize;
    while i < comptime!(32 * shape.tiles * shape.pairs()) {
        let (column, row) = (i / rows, row0 + i % rows);
        if column < place.count && row < n {
            let mut sum = 0.0f32;
            #[unroll]
            for plane in 0..comptime!(shape.planes) {
                sum += partial[i + comptime!(plane * 32 * shape.tiles * shape.pairs())];
            }
            y[(place.t0 + column) * n + row] = u16::cast_from(narrow(sum, shape.dtype));
        }
        i += comptime!(32 * shape.planes);
    }
}

/// The kernel for `shape`, its types chosen by what the layout stores.
pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    macro_rules! typed {
        ($scales:ty, $biases:ty) => {{
            let (settings, properties, registers) = target.start(32 * shape.planes as u32);
            Box::new(mma_vec::MmaVec::<$scales, $biases>::new(
                settings,
                properties,
                registers,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                shape.layout.vector(),
                shape,
            ))
        }};
    }
    match shape.layout.scale_sizes() {
        (1, 2) => typed!(u8, u16),
        (1, _) => typed!(u8, u32),
        (2, 2) => typed!(u16, u16),
        (2, _) => typed!(u16, u32),
        _ => typed!(u32, u32),
    }
}

/// Both types of x for each format; where there are more rows of x, for one.
#[cfg(test)]
pub(super) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for layout in formats.iter().map(|&format| Layout::of(format)) {
        for (dtype, columns) in [(FloatType::F16, 1), (FloatType::BF16, 1), (FloatType::F16, 8)] {
            if supports(target, layout, dtype) {
                let shape = Shape { layout, dtype, columns, tiles: 1, planes: 4, chunk: 128 };
                kernels.push(kernel(target, shape));
            }
        }
    }
    kernels
}
