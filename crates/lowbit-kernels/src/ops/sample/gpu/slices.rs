//! The kernels that go through all logits: the penalties, each slice's greatest logit, keys and
//! weights, and the sums of the weights that are kept.
//!
//! A slice is a cube of one plane, whose units stride through it. The greatest logit of all is not
//! stored by a kernel of its own: whoever needs it takes the greatest of the slices'
//! ([`greatest_key`]).

#![allow(unsafe_code)] // Launches.

use super::config::{Draw, Filters, SampleConfig, Sizes, all_sum, all_sum_wide};
use super::search::{Counters, limits};
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{key, of_key};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::exp;
use crate::gpu::{Gpu, Memory};
use crate::ops::check::Check;
use crate::ops::sample::SampleParams;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Overwrites the logits of the history's tokens in `penalised`, a copy of the logits. They are
/// computed from the original ones, so that a token which comes up twice gets the same value twice.
/// `counts` says whether there is a frequency penalty.
#[kernel]
fn sample_penalise<X: Int>(
    logits: &[X],
    history: &[u32],
    penalised: &mut [f32],
    len: u32,
    context: u32,
    penalties: Penalties,
    #[comptime] dtype: FloatType,
    #[comptime] counts: bool,
) {
    let mut i = ABSOLUTE_POS;
    while i < context as usize {
        let id = history[i];
        if id < len {
            let logit = read(logits, id as usize, dtype);
            let repetition = f32::reinterpret(penalties.repetition);
            let mut less = f32::reinterpret(penalties.presence);
            if comptime!(counts) {
                let mut count = 0u32.runtime();
                for j in 0..context {
                    count += select(history[j as usize] == id, 1u32, 0u32);
                }
                less = fma(f32::cast_from(count), f32::reinterpret(penalties.frequency), less);
            }
            let below = fma(logit, repetition, -less);
            penalised[id as usize] = select(logit < 0.0f32, below, logit / repetition - less);
        }
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// Those of [`SampleParams`], each an f32.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Penalties {
    repetition: u32,
    presence: u32,
    frequency: u32,
}

fn penalise_compiled(target: &Target, dtype: FloatType, counts: bool) -> Kernel<SamplePenalise<'static>> {
    with_storage!(dtype, X => SamplePenalise::kernel::<X>(target, UNITS, dtype, counts))
}

/// The logits in f32 with those of `history` penalised; `None` when that changes nothing.
pub(super) fn penalised(
    check: Check,
    gpu: &Gpu,
    logits: &Tensor,
    history: &Tensor,
    params: &SampleParams,
) -> Result<Option<Tensor>, KernelError> {
    if !params.penalises() || history.is_empty() {
        return Ok(None);
    }
    let dtype = check.float("logits", logits)?;
    let copy = gpu.convert(logits.buffer()?, logits.len(), (dtype, FloatType::F32))?;
    let copy = logits.over(copy, DType::F32);
    let arguments = SamplePenalise {
        logits: logits.buffer()?,
        history: history.buffer()?,
        penalised: copy.buffer()?,
        len: check.index(logits.len())?,
        context: check.index(history.len())?,
        penalties: Penalties {
            repetition: params.repetition_penalty.to_bits(),
            presence: params.presence_penalty.to_bits(),
            frequency: params.frequency_penalty.to_bits(),
        },
    };
    let kernel = penalise_compiled(gpu.target(), dtype, params.frequency_penalty != 0.0);
    // SAFETY: the copy has as many logits, and ids of the history that are none of theirs are not
    // read.
    unsafe { gpu.launch(kernel, cubes(history.len()), arguments)? };
    Ok(Some(copy))
}

/// `exp((x - greatest) * rate)` in units of 2^-40.
#[cube]
pub(super) fn weight(x: f32, greatest: f32, rate: f32) -> u64 {
    let share = exp((x - greatest) * rate) * 1_048_576.0f32;
    let high = u32::cast_from(share);
    let low = u32::cast_from((share - f32::cast_from(high)) * 1_048_576.0f32);
    (u64::cast_from(high) << 20u64) + u64::cast_from(low)
}

/// The key of the greatest logit, from those of all slices.
#[cube]
pub(super) fn greatest_key(greatest: &[u32], slices: u32, #[comptime] config: SampleConfig) -> u32 {
    let mut best = 0u32.runtime();
    let mut i = UNIT_POS_X as usize;
    while i < slices as usize {
        best = max(best, greatest[i]);
        i += comptime!(config.lanes);
    }
    if comptime!(config.lanes == 1) { best } else { plane_max(best) }
}

/// Each slice's greatest key, and the lowest id that has it.
#[kernel]
fn sample_find_greatest<X: Int>(
    logits: &[X],
    greatest: &mut [u32],
    len: u32,
    slice: u32,
    #[comptime] config: SampleConfig,
) {
    let (mut best, mut best_id) = (0u32.runtime(), u32::MAX.runtime());
    let mut i = CUBE_POS * slice as usize + UNIT_POS_X as usize;
    let end = min((CUBE_POS + 1) * slice as usize, len as usize);
    while i < end {
        let key = key(read(logits, i, config.dtype));
        if key > best {
            best = key;
            best_id = i as u32;
        }
        i += comptime!(config.lanes);
    }
    let (mut all, mut id) = (best, best_id);
    if comptime!(config.lanes > 1) {
        all = plane_max(best);
        id = plane_min(select(best == all, best_id, u32::MAX.runtime()));
    }
    if UNIT_POS_X == 0u32 {
        greatest[CUBE_POS] = all;
        greatest[CUBE_COUNT_X as usize + CUBE_POS] = id;
    }
}

fn find_greatest_compiled(target: &Target, config: SampleConfig) -> Kernel<SampleFindGreatest<'static>> {
    let config = SampleConfig { top_p: false, top_k: false, ..config };
    with_storage!(config.dtype, X => SampleFindGreatest::kernel::<X>(target, config.lanes, config))
}

/// Each logit's key, and, for top-p, its weight at temperature 1.
#[kernel]
fn sample_weigh<X: Int>(
    logits: &[X],
    greatest: &[u32],
    keys: &mut [u32],
    weights: &mut [u64],
    sizes: Sizes,
    #[comptime] config: SampleConfig,
) {
    let slice = sizes.slice;
    let most = of_key(greatest_key(greatest, sizes.slices, config));
    let mut i = CUBE_POS * slice as usize + UNIT_POS_X as usize;
    let end = min((CUBE_POS + 1) * slice as usize, sizes.len as usize);
    while i < end {
        let logit = read(logits, i, config.dtype);
        keys[i] = key(logit);
        if comptime!(config.top_p) {
            weights[i] = weight(logit, most, 1.0f32.runtime());
        }
        i += comptime!(config.lanes);
    }
}

fn weigh_compiled(target: &Target, config: SampleConfig) -> Kernel<SampleWeigh<'static>> {
    with_storage!(config.dtype, X => SampleWeigh::kernel::<X>(target, config.lanes, config))
}

/// For each slice, the sum of the weights of the logits above the threshold, and how many are at
/// the threshold where not all of those are kept; otherwise their weights belong to the sum.
#[kernel]
pub(super) fn sample_sum_slices<X: Int>(
    logits: &[X],
    greatest: &[u32],
    counters: &[u32],
    sums: &mut [u64],
    ties: &mut [u32],
    sizes: Sizes,
    filters: Filters,
    #[comptime] config: SampleConfig,
) {
    let slice = sizes.slice;
    let best = greatest_key(greatest, sizes.slices, config);
    let limits = limits(counters, best, filters.floor, filters.top_k, config);
    let most = of_key(best);
    let (mut sum, mut ties_here) = (0u64.runtime(), 0u32.runtime());
    let mut i = CUBE_POS * slice as usize + UNIT_POS_X as usize;
    let end = min((CUBE_POS + 1) * slice as usize, sizes.len as usize);
    while i < end {
        let logit = read(logits, i, config.dtype);
        let key = key(logit);
        if key > limits.threshold || (key == limits.threshold && !limits.tied) {
            sum += weight(logit, most, f32::reinterpret(filters.rate));
        }
        if key == limits.threshold && limits.tied {
            ties_here += 1u32;
        }
        i += comptime!(config.lanes);
    }
    let sum = all_sum_wide(sum, config.lanes);
    let ties_here = all_sum(ties_here, config.lanes);
    if UNIT_POS_X == 0u32 {
        sums[CUBE_POS] = sum;
        ties[CUBE_POS] = ties_here;
    }
}

pub(super) fn sum_slices_compiled(target: &Target, config: SampleConfig) -> Kernel<SampleSumSlices<'static>> {
    with_storage!(config.dtype, X => SampleSumSlices::kernel::<X>(target, config.lanes, config))
}

#[cfg(test)]
pub(super) fn kernels(target: &Target, config: SampleConfig) -> Vec<Box<dyn CubeKernel>> {
    vec![
        penalise_compiled(target, config.dtype, false).code(),
        penalise_compiled(target, config.dtype, true).code(),
        find_greatest_compiled(target, config).code(),
        weigh_compiled(target, config).code(),
        sum_slices_compiled(target, config).code(),
    ]
}

/// Each slice's sum of weights and its ties.
pub(super) struct SliceSums {
    pub sums: Memory,
    pub ties: Memory,
}

impl Draw<'_> {
    pub(super) fn find_greatest(&self) -> Result<(), KernelError> {
        let Sizes { len, slice, .. } = self.sizes;
        let greatest = (&self.greatest).into();
        let arguments = SampleFindGreatest { logits: self.logits.buffer()?, greatest, len, slice };
        let kernel = find_greatest_compiled(self.gpu.target(), self.config);
        // SAFETY: the slices end with the logits, and each has two words in `greatest`.
        unsafe { self.gpu.launch(kernel, self.cubes(), arguments) }
    }

    /// Each logit's key and weight. Where there is no top-p, the keys' buffer stands for the
    /// weights' as a placeholder.
    pub(super) fn weigh(&self) -> Result<[Memory; 2], KernelError> {
        let len = self.sizes.len as usize;
        let keys = self.gpu.allocate(4 * len)?;
        let weights = if self.config.top_p { self.gpu.allocate(8 * len)? } else { keys.clone() };
        let arguments = SampleWeigh {
            logits: self.logits.buffer()?,
            greatest: (&self.greatest).into(),
            keys: (&keys).into(),
            weights: (&weights).into(),
            sizes: self.sizes,
        };
        let kernel = weigh_compiled(self.gpu.target(), self.config);
        // SAFETY: the slices end with the logits; there is a key for each, and a weight where
        // weights are written.
        unsafe { self.gpu.launch(kernel, self.cubes(), arguments)? };
        Ok([keys, weights])
    }

    pub(super) fn sum_slices(&self, counters: &Counters) -> Result<SliceSums, KernelError> {
        let slices = self.sizes.slices as usize;
        let of_slices =
            SliceSums { sums: self.gpu.allocate(8 * slices)?, ties: self.gpu.allocate(4 * slices)? };
        let arguments = SampleSumSlices {
            logits: self.logits.buffer()?,
            greatest: (&self.greatest).into(),
            counters: counters.buffer(),
            sums: (&of_slices.sums).into(),
            ties: (&of_slices.ties).into(),
            sizes: self.sizes,
            filters: self.filters(),
        };
        let kernel = sum_slices_compiled(self.gpu.target(), self.config);
        // SAFETY: the slices end with the logits, and each has a sum and its ties; counters are
        // read where there was a search.
        unsafe { self.gpu.launch(kernel, self.cubes(), arguments)? };
        Ok(of_slices)
    }
}
