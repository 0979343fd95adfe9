//! The kernels that go through all logits: the penalties, each slice's greatest logit, and the sums
//! of the weights that are kept.
//!
//! A slice is a cube of one plane, whose units stride through it. The greatest logit of all is not
//! stored by a kernel of its own: whoever needs it takes the greatest of the slices'
//! ([`greatest_key`]).

#![allow(unsafe_code)] // Launches.

use super::super::batch::word;
use super::config::{Draw, SampleConfig, Sizes, all_sum, all_sum_wide, greatest_at, parameters_of, weight};
use super::search::{Counters, best_of_row, limits};
use crate::gpu::Memory;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{key, of_key};
use crate::gpu::launch::{Kernel, kernel};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The loads that are under way at a time.
const AHEAD: usize = 8;

/// Overwrites the logits of the histories' tokens in `penalised`, a copy of the logits. They are
/// computed from the original ones, so that a token which comes up twice gets the same value twice.
/// `places` are those of a row's history.
#[kernel]
fn sample_penalise<X: Int>(
    logits: &[X],
    histories: &[u32],
    parameters: &[u32],
    penalised: &mut [f32],
    sizes: Sizes,
    places: u32,
    #[comptime] dtype: FloatType,
) {
    let row = CUBE_POS_Y;
    let of = row as usize * word::COUNT;
    let repetition = f32::reinterpret(parameters[of + word::REPETITION]);
    let presence = f32::reinterpret(parameters[of + word::PRESENCE]);
    let frequency = f32::reinterpret(parameters[of + word::FREQUENCY]);
    let changes = repetition != 1.0f32 || presence != 0.0f32 || frequency != 0.0f32;
    let window = select(changes, min(parameters[of + word::WINDOW], places), 0u32.runtime());
    let (first, logits_at) = (row * places, CUBE_POS_Y * sizes.len);
    let mut i = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    while i < window {
        let id = histories[(first + i) as usize];
        if id < sizes.len {
            let logit = read(logits, (logits_at + id) as usize, dtype);
            let mut less = presence;
            if frequency != 0.0f32 {
                let mut count = 0u32.runtime();
                for j in 0..window {
                    count += select(histories[(first + j) as usize] == id, 1u32, 0u32);
                }
                less = fma(f32::cast_from(count), frequency, less);
            }
            let below = fma(logit, repetition, -less);
            penalised[(logits_at + id) as usize] = select(logit < 0.0f32, below, logit / repetition - less);
        }
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

fn penalise_compiled(target: &Target, dtype: FloatType) -> Kernel<SamplePenalise<'static>> {
    with_storage!(dtype, X => SamplePenalise::kernel::<X>(target, UNITS, dtype))
}

/// Each slice's greatest key, and the lowest id that has it.
#[kernel]
fn sample_find_greatest<X: Int>(
    logits: &[X],
    parameters: &[u32],
    greatest: &mut [u32],
    sizes: Sizes,
    #[comptime] dtype: FloatType,
    #[comptime] lanes: usize,
) {
    let of = parameters_of(parameters, CUBE_POS_Y);
    if !of.is_used {
        terminate!();
    }
    let row = CUBE_POS_Y * sizes.len;
    let start = CUBE_POS_X * sizes.slice;
    let end = min(start + sizes.slice, sizes.len);
    let (mut best, mut best_id) = (0u32.runtime(), u32::MAX.runtime());
    let mut i = start + UNIT_POS_X;
    while i < end {
        // Units beyond the end read its last logit once more.
        let mut ahead = Array::<f32>::new(AHEAD);
        #[unroll]
        for j in 0..AHEAD {
            let id = min(i + comptime!((j * lanes) as u32), end - 1u32);
            ahead[j] = read(logits, (row + id) as usize, dtype);
        }
        #[unroll]
        for j in 0..AHEAD {
            let key = key(ahead[j]);
            if key > best {
                best = key;
                best_id = min(i + comptime!((j * lanes) as u32), end - 1u32);
            }
        }
        i += comptime!((AHEAD * lanes) as u32);
    }
    let (mut all, mut id) = (best, best_id);
    if comptime!(lanes > 1) {
        all = plane_max(best);
        id = plane_min(select(best == all, best_id, u32::MAX.runtime()));
    }
    if UNIT_POS_X == 0u32 {
        let at = greatest_at(sizes.slices) + CUBE_POS_X;
        greatest[at as usize] = all;
        greatest[(at + sizes.slices) as usize] = id;
    }
}

fn find_greatest_compiled(target: &Target, config: SampleConfig) -> Kernel<SampleFindGreatest<'static>> {
    let SampleConfig { dtype, lanes, .. } = config;
    with_storage!(dtype, X => SampleFindGreatest::kernel::<X>(target, lanes, dtype, lanes))
}

/// For each slice, the sum of the weights of the logits above the threshold, and how many are at
/// the threshold where not all of those are kept; otherwise their weights belong to the sum.
#[kernel]
pub(super) fn sample_sum_slices<X: Int>(
    logits: &[X],
    parameters: &[u32],
    greatest: &[u32],
    counters: &[u32],
    sums: &mut [u64],
    ties: &mut [u32],
    sizes: Sizes,
    #[comptime] config: SampleConfig,
) {
    let of = parameters_of(parameters, CUBE_POS_Y);
    if !of.is_used || of.rate == 0u32 {
        terminate!();
    }
    let best = best_of_row(greatest, counters, sizes.slices, &of, config);
    let limits = limits(counters, best, &of, config);
    let most = of_key(best);
    let row = CUBE_POS_Y * sizes.len;
    let (mut sum, mut ties_here) = (0u64.runtime(), 0u32.runtime());
    let mut i = CUBE_POS_X * sizes.slice + UNIT_POS_X;
    let mut end = min((CUBE_POS_X + 1) * sizes.slice, sizes.len);
    if greatest[(greatest_at(sizes.slices) + CUBE_POS_X) as usize] < limits.threshold {
        end = 0u32;
    }
    while i < end {
        let logit = read(logits, (row + i) as usize, config.dtype);
        let key = key(logit);
        if key > limits.threshold || (key == limits.threshold && !limits.tied) {
            sum += weight(logit, most, f32::reinterpret(of.rate));
        }
        if key == limits.threshold && limits.tied {
            ties_here += 1u32;
        }
        i += comptime!(config.lanes as u32);
    }
    let sum = all_sum_wide(sum, config.lanes);
    let ties_here = all_sum(ties_here, config.lanes);
    if UNIT_POS_X == 0u32 {
        let at = CUBE_POS_Y * sizes.slices + CUBE_POS_X;
        sums[at as usize] = sum;
        ties[at as usize] = ties_here;
    }
}

pub(super) fn sum_slices_compiled(target: &Target, config: SampleConfig) -> Kernel<SampleSumSlices<'static>> {
    with_storage!(config.dtype, X => SampleSumSlices::kernel::<X>(target, config.lanes, config))
}

#[cfg(test)]
pub(super) fn kernels(target: &Target, config: SampleConfig) -> Vec<Box<dyn CubeKernel>> {
    vec![penalise_compiled(target, config.dtype).code(), find_greatest_compiled(target, config).code()]
}

/// Of each row, each slice's sum of weights and its ties.
pub(super) struct SliceSums {
    pub sums: Memory,
    pub ties: Memory,
}

impl Draw<'_> {
    /// The logits in f32 with those of the histories penalised; `None` without windows.
    pub(super) fn penalised(&self) -> Result<Option<Tensor>, KernelError> {
        if self.batch.window() == 0 {
            return Ok(None);
        }
        let [_, _, _, histories, parameters] = self.batch.tensors();
        let (logits, dtype) = (self.logits, self.config.dtype);
        let copy = self.gpu.convert(logits.buffer()?, logits.len(), (dtype, FloatType::F32))?;
        let copy = logits.over(copy, DType::F32);
        let arguments = SamplePenalise {
            logits: logits.buffer()?,
            histories: histories.buffer()?,
            parameters: parameters.buffer()?,
            penalised: copy.buffer()?,
            sizes: self.sizes,
            places: self.places(),
        };
        let [x, ..] = cubes(self.batch.window());
        let kernel = penalise_compiled(self.gpu.target(), dtype);
        // SAFETY: the copy has as many logits, the batch has the rows, and ids of a history that
        // are none of the logits' are not read.
        unsafe { self.gpu.launch(kernel, [x, self.rows as u32, 1], arguments)? };
        Ok(Some(copy))
    }

    pub(super) fn find_greatest(&self) -> Result<(), KernelError> {
        let arguments = SampleFindGreatest {
            logits: self.logits.buffer()?,
            parameters: self.batch.tensors()[4].buffer()?,
            greatest: (&self.greatest).into(),
            sizes: self.sizes,
        };
        let kernel = find_greatest_compiled(self.gpu.target(), self.config);
        // SAFETY: the slices end with a row's logits, each has two words in `greatest`, and the
        // batch has the rows.
        unsafe { self.gpu.launch(kernel, self.cubes(), arguments) }
    }

    pub(super) fn sum_slices(&self, counters: &Counters) -> Result<SliceSums, KernelError> {
        let slices = self.sizes.slices as usize * self.rows;
        let of_slices =
            SliceSums { sums: self.gpu.allocate(8 * slices)?, ties: self.gpu.allocate(4 * slices)? };
        let arguments = SampleSumSlices {
            logits: self.logits.buffer()?,
            parameters: self.batch.tensors()[4].buffer()?,
            greatest: (&self.greatest).into(),
            counters: counters.buffer(),
            sums: (&of_slices.sums).into(),
            ties: (&of_slices.ties).into(),
            sizes: self.sizes,
        };
        let kernel = sum_slices_compiled(self.gpu.target(), self.config);
        // SAFETY: the slices end with a row's logits, and each has a sum and its ties; counters are
        // read where there was a search; the batch has the rows.
        unsafe { self.gpu.launch(kernel, self.cubes(), arguments)? };
        Ok(of_slices)
    }
}
