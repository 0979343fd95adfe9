//! Combines the partial results of the cubes that shared a row's keys: the second step of split-K
//! attention.
//!
//! Each of the `splits` cubes of a row leaves, in f32, Dv sums of weighted values
//! (`parts[split, row, Dv]`), and its greatest score and the sum of its weights
//! (`scales[row, split, 2]`). The result is
//! `sum_s exp(score_s - greatest) parts_s / sum_s exp(score_s - greatest) weights_s`. Sinks are
//! added to the denominator here and nowhere else: with them, rows of one part are combined, too.
//! With keys in pages, a row's position says how many parts it has; others were not written.

#![allow(unsafe_code)] // Launches.

use super::operands::{reciprocal, reciprocal_with, seen_from};
use super::{Call, Output};
use crate::KernelError;
use crate::gpu::CUBES;
use crate::gpu::compile::Target;
use crate::gpu::float::{with_storage, write};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::rows::cubes;
use crate::ops::attention::CHECK;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The greatest score of no keys: below all scores, and finite, so that a difference with it is a
/// number.
pub(super) const NO_SCORE: f32 = -3.0e38;

/// True if a part whose weights have this sum (at least 1, NaN, or exactly 0) saw any keys. Bits
/// are compared, since some compilers assume that floats are numbers.
#[cube]
fn has_keys(weights: f32) -> bool {
    u32::reinterpret(weights) != 0u32
}

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CombineConfig {
    /// Dv.
    pub width: usize,
    /// The type of y.
    pub dtype: FloatType,
    /// Units of a plane, or a divisor of that.
    pub plane: usize,
    /// True if there are sinks.
    sinks: bool,
    /// True if keys are in pages: a row's position says how many parts it has (`parts.rs`).
    paged: bool,
    /// Groups of [`Self::lanes`] units; group `i` takes the parts from `i` on, strided by the
    /// number of groups.
    groups: usize,
}

impl CombineConfig {
    /// For `splits` parts of each row: a group for as many of them as a unit loads at once.
    pub fn new(width: usize, dtype: FloatType, splits: usize, plane: usize) -> Self {
        let one = Self { width, dtype, plane, sinks: false, paged: false, groups: 1 };
        // Devices of small planes share no memory within a cube.
        let most = if plane < 32 { 1 } else { 512 / one.lanes() };
        Self { groups: splits.div_ceil(PREFETCH).next_power_of_two().min(most).max(1), ..one }
    }

    /// With sinks or without.
    pub fn with_sinks(self, sinks: bool) -> Self {
        Self { sinks, ..self }
    }

    /// For keys in pages or contiguous ones.
    pub fn in_pages(self, paged: bool) -> Self {
        Self { paged, ..self }
    }

    /// Elements that a unit takes.
    fn vector(self) -> usize {
        if self.width.is_multiple_of(4) { 4 } else { 1 }
    }

    /// Units that a row's elements are given to.
    fn lanes(self) -> usize {
        (self.width / self.vector()).next_multiple_of(self.plane)
    }

    /// Units of a cube.
    fn units(self) -> usize {
        self.lanes() * self.groups
    }
}

/// Parts that a unit loads before it uses the first.
const PREFETCH: usize = 4;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct CombineSizes {
    rows: u32,
    /// Query heads.
    heads: u32,
    /// Parts that a row has memory for.
    splits: u32,
    /// Positions that pages have room for.
    capacity: u32,
    /// The most keys that a query sees.
    window: u32,
}

/// `y` from the parts of each row; row r has query head `r % heads` of token `r / heads`. One cube
/// per row.
#[kernel]
pub(super) fn attention_combine<Y: Int, V: Size>(
    parts: &[Vector<f32, V>],
    scales: &[f32],
    sinks: &[f32],
    positions: &[u32],
    y: &mut [Y],
    sizes: CombineSizes,
    #[comptime] config: CombineConfig,
) {
    let (rows, heads, splits) = (sizes.rows, sizes.heads, sizes.splits);
    let lanes = comptime!(config.lanes() as u32);
    let vectors = comptime!((config.width / config.vector()) as u32);
    let vector = comptime!(config.vector());
    let step = comptime!(config.groups as u32);
    // Cubes past the last row do it again.
    let row = min(CUBE_POS_Y * comptime!(CUBES as u32) + CUBE_POS_X, rows - 1u32);
    let scales_at = row * splits * 2u32;
    let mut greatest = NO_SCORE.runtime();
    let mut written = 0u32.runtime();
    let mut part = UNIT_POS_X % comptime!(config.plane as u32);
    let mut end = splits;
    if comptime!(config.paged) {
        // Nothing was written of parts that there are not.
        end = seen_from(positions[(row / heads) as usize], sizes.capacity, sizes.window).parts();
    }
    while part < end {
        let at = (scales_at + 2u32 * part) as usize;
        greatest = max(greatest, scales[at]);
        written = select(has_keys(scales[at + 1]), part + 1u32, written);
        part += comptime!(config.plane as u32);
    }
    greatest = plane_max(greatest);
    // Keys are dealt out from the first part on (`VisibleKeys::keep_split`): the parts behind the
    // last one with keys may have none, and the sums of such a part were never written.
    written = plane_max(written);
    let column = min(UNIT_POS_X % lanes, vectors - 1u32);
    let group = UNIT_POS_X / lanes;
    let mut sums = Array::<f32>::new(vector);
    #[unroll]
    for i in 0..vector {
        sums[i] = 0.0;
    }
    let mut weights = 0.0f32;
    let mut first = 0u32.runtime();
    while first < written {
        #[unroll]
        for ahead in 0..PREFETCH {
            let part = first + group + comptime!(ahead as u32) * step;
            let at = min(part, written - 1u32);
            let values = parts[((at * rows + row) * vectors + column) as usize];
            let scale = (scales[(scales_at + 2u32 * at) as usize] - greatest).exp();
            let weight = scales[(scales_at + 2u32 * at + 1u32) as usize];
            let some = part < written && has_keys(weight);
            weights += select(some, weight * scale, 0.0f32);
            #[unroll]
            for i in 0..vector {
                sums[i] += select(some, values.extract(i) * scale, 0.0f32);
            }
        }
        first += comptime!(PREFETCH as u32) * step;
    }
    let mut sink = 0.0f32;
    if comptime!(config.sinks) {
        sink = (sinks[(row % heads) as usize] - greatest).exp();
    }
    add_groups_and_store::<Y>(&mut sums, (weights, sink), y, row, config);
}

/// Adds up what the groups have, and stores the row. `found` is a group's sum of weights, and the
/// sink's weight.
#[cube]
fn add_groups_and_store<Y: Int>(
    sums: &mut Array<f32>,
    found: (f32, f32),
    y: &mut [Y],
    row: u32,
    #[comptime] config: CombineConfig,
) {
    let lanes = comptime!(config.lanes() as u32);
    let vector = comptime!(config.vector());
    let stride = comptime!(config.lanes() * (config.vector() + 1));
    let column = UNIT_POS_X % lanes;
    let (weights, sink) = found;
    let mut weights = weights;
    if comptime!(config.groups > 1) {
        let mut shared = Shared::<[f32]>::new_slice(comptime!(config.groups * stride));
        let at = (UNIT_POS_X / lanes) as usize * stride + column as usize;
        #[unroll]
        for i in 0..vector {
            shared[at + comptime!(i * config.lanes())] = sums[i];
        }
        shared[at + comptime!(vector * config.lanes())] = weights;
        sync_cube();
        weights = 0.0f32;
        #[unroll]
        for i in 0..vector {
            sums[i] = 0.0;
        }
        if UNIT_POS_X < lanes {
            #[unroll]
            for group in 0..comptime!(config.groups) {
                let at = comptime!(group * stride) + column as usize;
                #[unroll]
                for i in 0..vector {
                    sums[i] += shared[at + comptime!(i * config.lanes())];
                }
                weights += shared[at + comptime!(vector * config.lanes())];
            }
        }
    }
    if UNIT_POS_X < comptime!((config.width / config.vector()) as u32) {
        let mut factor = reciprocal(weights);
        if comptime!(config.sinks) {
            factor = reciprocal_with(weights, weights + sink);
        }
        #[unroll]
        for i in 0..vector {
            let element = column * comptime!(vector as u32) + comptime!(i as u32);
            let at = row * comptime!(config.width as u32) + element;
            write(y, at as usize, sums[i] * factor, config.dtype);
        }
    }
}

pub(super) fn compiled(target: &Target, config: CombineConfig) -> Kernel<AttentionCombine<'static>> {
    with_storage!(config.dtype, Y => {
        AttentionCombine::kernel::<Y>(target, config.units(), config.vector(), config)
    })
}

/// Combines the parts that `splits` cubes per row have left in `parts` into y.
pub(super) fn launch(
    call: &Call,
    config: CombineConfig,
    parts: Output,
    splits: usize,
) -> Result<(), KernelError> {
    let (rows, heads, sizes) = (call.y.dim(0) * call.y.dim(1), call.y.dim(1), call.sizes()?);
    let arguments = AttentionCombine {
        parts: parts.y.buffer()?,
        scales: parts.scales.buffer()?,
        // An unused operand gets a placeholder buffer.
        sinks: call.sinks.unwrap_or(parts.scales).buffer()?,
        positions: call.positions().buffer()?,
        y: call.y.buffer()?,
        sizes: CombineSizes {
            rows: CHECK.index(rows)?,
            heads: CHECK.index(heads)?,
            splits: CHECK.index(splits)?,
            capacity: sizes.capacity,
            window: sizes.window,
        },
    };
    // SAFETY: there are `splits` parts and scales per row of y, whose heads each have a sink if
    // there are any, and cubes past the last row take that.
    unsafe { call.gpu.launch(compiled(call.gpu.target(), config), cubes(rows), arguments) }
}
