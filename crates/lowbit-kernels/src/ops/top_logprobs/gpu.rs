//! Log-probabilities on a GPU. A row's logits are cut into slices. A plane, or a cube, finds the
//! greatest of a slice, the sum of its exponentials, and its likeliest tokens; a cube per row
//! merges what slices found.
//!
//! A list is found from its start: each round takes the greatest of what comes after the last one
//! in the order of logits and ids, so that nothing is marked or moved. Logits are compared by bits
//! in their total order; 0 stands for none.

#![allow(unsafe_code)] // Launches.

use super::{CHECK, LogprobRows};
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{read, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::exp;
use crate::gpu::rows::{self, Maximum, Minimum, Rows, Sum, reduce};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The most slices of a row.
const SLICES: usize = 256;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Rows of logits.
    rows: u32,
    /// Logits of a row, and of a slice.
    len: u32,
    slice: u32,
    /// Slices of a row.
    slices: u32,
    /// Likeliest tokens of a row, and at least 1.
    top: u32,
}

/// The bits of a number as an integer in the total order of floats.
#[cube]
fn ordered(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    select(bits >> 31u32 == 1u32, !bits, bits | 0x8000_0000u32)
}

/// The number of such bits.
#[cube]
fn of_ordered(bits: u32) -> f32 {
    f32::reinterpret(select(bits >> 31u32 == 1u32, bits & 0x7fff_ffffu32, !bits))
}

/// The id that stands for none.
const NONE: u32 = u32::MAX;

/// The first of what the units of a row have found, ordered bits and an id each. Every unit of the
/// cube must call this.
#[cube]
fn first_of_row(bits: u32, id: u32, #[comptime] rows: Rows) -> (u32, u32) {
    let first = reduce::<u32, Maximum>(bits, rows);
    let id = reduce::<u32, Minimum>(select(bits == first, id, comptime!(NONE).runtime()), rows);
    (first, id)
}

/// `lists` is `[rows, slices, top, 2]`: bits and ids. `sums` is `[rows, slices]`, relative to the
/// slice's greatest.
#[kernel]
fn top_logprobs_slices<X: Int>(
    logits: &[X],
    lists: &mut [u32],
    sums: &mut [f32],
    sizes: Sizes,
    #[comptime] dtype: FloatType,
    #[comptime] of: Rows,
) {
    let slice = rows::row(of) as u32;
    let exists = slice < sizes.rows * sizes.slices;
    let slice = select(exists, slice, 0u32);
    let lane = rows::lane_in_row(of) as u32;
    let row = slice / sizes.slices * sizes.len;
    let begin = slice % sizes.slices * sizes.slice;
    let end = min(begin + sizes.slice, sizes.len);
    // The logit and the id that the last round took; before the first, more than all.
    let mut last_bits = comptime!(u32::MAX).runtime();
    let mut last_id = comptime!(NONE).runtime();
    let mut round = 0u32.runtime();
    while round < sizes.top {
        let mut found_bits = 0u32.runtime();
        let mut found_id = comptime!(NONE).runtime();
        let mut id = begin + lane;
        while id < end {
            let bits = ordered(read(logits, (row + id) as usize, dtype));
            let follows = bits < last_bits || (bits == last_bits && id > last_id);
            // Of equal ones the unit meets the lowest id first.
            if follows && bits > found_bits {
                found_bits = bits;
                found_id = id;
            }
            id += comptime!(rows::lanes_per_row(of) as u32);
        }
        let (first_bits, first_id) = first_of_row(found_bits, found_id, of);
        last_bits = first_bits;
        last_id = first_id;
        if round == 0u32 {
            let greatest = of_ordered(last_bits);
            let mut sum = 0.0f32;
            let mut id = begin + lane;
            while id < end {
                let distance = read(logits, (row + id) as usize, dtype) - greatest;
                // Of a slice of -inf alone it is NaN.
                sum += select(greatest == f32::reinterpret(0xff80_0000u32), 0.0f32, exp(distance));
                id += comptime!(rows::lanes_per_row(of) as u32);
            }
            let sum = reduce::<f32, Sum>(sum, of);
            if exists && lane == 0u32 {
                sums[slice as usize] = sum;
            }
        }
        if exists && lane == 0u32 {
            let at = 2u32 * (slice * sizes.top + round);
            lists[at as usize] = last_bits;
            lists[(at + 1u32) as usize] = last_id;
        }
        round += 1u32;
    }
}

/// `y` is `[rows, 2 + 2 top]`, as `RowLogprobs::of_words` reads it. A unit has a slice at most.
#[kernel]
fn top_logprobs_merge<X: Int>(
    logits: &[X],
    tokens: &[u32],
    lists: &[u32],
    sums: &[f32],
    y: &mut [u32],
    sizes: Sizes,
    #[comptime] dtype: FloatType,
    #[comptime] of: Rows,
) {
    let row = CUBE_POS as u32;
    let exists = row < sizes.rows;
    let row = select(exists, row, 0u32);
    let lane = rows::lane_in_row(of) as u32;
    let has = lane < sizes.slices;
    let slice = row * sizes.slices + select(has, lane, 0u32);
    let to = row * 2u32 * (sizes.top + 1u32);
    // The place in the slice's list.
    let mut place = 0u32.runtime();
    let mut greatest = 0.0f32;
    let mut round = 0u32.runtime();
    while round < sizes.top {
        let mut bits = 0u32.runtime();
        let mut id = comptime!(NONE).runtime();
        if has && place < sizes.top {
            let at = 2u32 * (slice * sizes.top + place);
            bits = lists[at as usize];
            id = lists[(at + 1u32) as usize];
        }
        let (first_bits, first_id) = first_of_row(bits, id, of);
        if bits == first_bits && id == first_id {
            place += 1u32;
        }
        if round == 0u32 {
            greatest = of_ordered(first_bits);
            let mut sum = 0.0f32;
            if has {
                let of_slice = of_ordered(lists[(2u32 * slice * sizes.top) as usize]);
                // exp(-inf) is 0.
                sum = sums[slice as usize] * exp(of_slice - greatest);
            }
            let sum = reduce::<f32, Sum>(sum, of);
            if exists && lane == 0u32 {
                let token = tokens[row as usize];
                let within = token < sizes.len;
                let logit = read(logits, (row * sizes.len + select(within, token, 0u32)) as usize, dtype);
                let distance = u32::reinterpret(logit - greatest);
                y[to as usize] = u32::reinterpret(sum);
                y[(to + 1u32) as usize] = select(within, distance, 0x7fc0_0000u32);
            }
        }
        if exists && lane == 0u32 {
            let at = to + 2u32 * (round + 1u32);
            y[at as usize] = first_id;
            y[(at + 1u32) as usize] = u32::reinterpret(of_ordered(first_bits) - greatest);
        }
        round += 1u32;
    }
}

fn compiled_slices(target: &Target, dtype: FloatType, of: Rows) -> Kernel<TopLogprobsSlices<'static>> {
    with_storage!(dtype, X => TopLogprobsSlices::kernel::<X>(target, of.units, dtype, of))
}

fn compiled_merge(target: &Target, dtype: FloatType, of: Rows) -> Kernel<TopLogprobsMerge<'static>> {
    with_storage!(dtype, X => TopLogprobsMerge::kernel::<X>(target, of.units, dtype, of))
}

/// A plane for each slice where there are planes, and a cube for each row.
fn distribution(target: &Target) -> [Rows; 2] {
    [Rows::new(target, [usize::MAX, 1], 1), Rows { rows: 1, ..Rows::new(target, [1, SLICES], 1) }]
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Both kernels for each type.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let [slices, merge] = distribution(target);
    let both =
        |dtype| [compiled_slices(target, dtype, slices).code(), compiled_merge(target, dtype, merge).code()];
    crate::ops::testing::FLOATS.into_iter().flat_map(both).collect()
}

/// See [`super::top_logprobs`]; everything was checked.
pub(super) fn launch(
    gpu: &Gpu,
    (logits, dtype): (&Tensor, FloatType),
    tokens: &Tensor,
    top: usize,
) -> Result<LogprobRows, KernelError> {
    let [of_slices, of_rows] = distribution(gpu.target());
    let (count, len, top_of_slice) = (logits.dim(0), logits.dim(1), top.max(1));
    let slice = len.div_ceil(SLICES.min(rows::lanes_per_row(of_rows)));
    let slices = len.div_ceil(slice);
    let row = 2 * (top_of_slice + 1);
    let make = |shape: &[usize], dtype| Tensor::allocate(shape, dtype, logits.device());
    let lists = make(&[count, slices, top_of_slice, 2], DType::U32)?;
    let sums = make(&[count, slices], DType::F32)?;
    let y = make(&[count, row], DType::U32)?;
    for tensor in [logits, &lists, &y] {
        CHECK.index(tensor.len())?;
    }
    let [rows, len, slice, cut, rounds] =
        [count, len, slice, slices, top_of_slice].map(|size| CHECK.index(size));
    let sizes = Sizes { rows: rows?, len: len?, slice: slice?, slices: cut?, top: rounds? };
    let arguments =
        TopLogprobsSlices { logits: logits.buffer()?, lists: lists.buffer()?, sums: sums.buffer()?, sizes };
    let kernel = compiled_slices(gpu.target(), dtype, of_slices);
    // SAFETY: the slices are all of the logits; lists and sums have a place for each.
    unsafe { gpu.launch(kernel, of_slices.cubes(count * slices), arguments)? };
    let arguments = TopLogprobsMerge {
        logits: logits.buffer()?,
        tokens: tokens.buffer()?,
        lists: lists.buffer()?,
        sums: sums.buffer()?,
        y: y.buffer()?,
        sizes,
    };
    let kernel = compiled_merge(gpu.target(), dtype, of_rows);
    // SAFETY: each row has a token, lists and sums of its slices, no more than a cube has units,
    // and a row of y; a token beyond the logits is not looked up.
    unsafe { gpu.launch(kernel, rows::cubes(count), arguments)? };
    let (memory, start) = y.memory()?;
    Ok(LogprobRows::coming(gpu.read_later(memory, start, y.len())?, row, top))
}
