//! What goes through the logits slice by slice: their greatest, their weights, and the sums of those that are kept.

use super::search::limits;
use super::{Draw, Shape};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{key, of_key};
use crate::gpu::math::exp;
use crate::gpu::{Dispatch, Gpu, Memory};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Writes the logits of the history's tokens anew, from what they were before.
#[cube(launch_unchecked)]
fn penalise<X: Int>(
    logits: &[X],
    history: &[u32],
    penalised: &mut [f32],
    len: u32,
    context: u32,
    penalty: u32,
    #[comptime] dtype: FloatType,
) {
    if ABSOLUTE_POS < context as usize {
        let id = history[ABSOLUTE_POS];
        if id < len {
            let logit = read(logits, id as usize, dtype);
            let penalty = f32::reinterpret(penalty);
            penalised[id as usize] = select(logit < 0.0f32, logit * penalty, logit / penalty);
        }
    }
}

fn penalise_kernel(target: &Target, dtype: FloatType) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(dtype, X => Box::new(penalise::Penalise::<X>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), (), (), (), dtype,
    )))
}

/// The logits in f32 with those of `history` penalised; `None` when that changes nothing.
pub(super) fn penalised(
    check: Check,
    gpu: &Gpu,
    logits: &Tensor,
    history: &Tensor,
    penalty: f32,
) -> Result<Option<Tensor>, KernelError> {
    if penalty == 1.0 || history.is_empty() {
        return Ok(None);
    }
    let dtype = check.float("logits", logits)?;
    let copy = gpu.convert(logits.memory()?, logits.len(), (dtype, FloatType::F32))?;
    let copy = logits.over(copy, DType::F32);
    gpu.launch(Dispatch {
        kernel: penalise_kernel(gpu.target(), dtype),
        cubes: cubes(history.len()),
        buffers: vec![logits.memory()?, history.memory()?, copy.memory()?],
        scalars: vec![check.index(logits.len())?, check.index(history.len())?, penalty.to_bits()],
    })?;
    Ok(Some(copy))
}

/// The sum over the plane, for all its units.
#[cube]
pub(super) fn all_sum(x: u32, #[comptime] lanes: usize) -> u32 {
    if comptime!(lanes == 1) { x } else { plane_sum(x) }
}

/// The sum over the plane of numbers below 2^62, for all its units: in parts, because not every device adds 64 bits up.
#[cube]
pub(super) fn all_sum_wide(x: u64, #[comptime] lanes: usize) -> u64 {
    if comptime!(lanes == 1) {
        x
    } else {
        let low = plane_sum(u32::cast_from(x) & 0x3f_ffffu32);
        let middle = plane_sum(u32::cast_from(x >> 22u64) & 0x3f_ffffu32);
        let high = plane_sum(u32::cast_from(x >> 44u64));
        u64::cast_from(low) + (u64::cast_from(middle) << 22u64) + (u64::cast_from(high) << 44u64)
    }
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
pub(super) fn greatest_key(greatest: &[u32], slices: u32, #[comptime] shape: Shape) -> u32 {
    let mut best = 0u32.runtime();
    let mut i = UNIT_POS_X as usize;
    while i < slices as usize {
        best = max(best, greatest[i]);
        i += comptime!(shape.lanes);
    }
    if comptime!(shape.lanes == 1) { best } else { plane_max(best) }
}

/// Each slice's greatest key, and the lowest id that has it.
#[cube(launch_unchecked)]
fn find<X: Int>(logits: &[X], greatest: &mut [u32], len: u32, slice: u32, #[comptime] shape: Shape) {
    let (mut best, mut best_id) = (0u32.runtime(), u32::MAX.runtime());
    let mut i = CUBE_POS * slice as usize + UNIT_POS_X as usize;
    let end = min((CUBE_POS + 1) * slice as usize, len as usize);
    while i < end {
        let key = key(read(logits, i, shape.dtype));
        if key > best {
            best = key;
            best_id = i as u32;
        }
        i += comptime!(shape.lanes);
    }
    let (mut all, mut id) = (best, best_id);
    if comptime!(shape.lanes > 1) {
        all = plane_max(best);
        id = plane_min(select(best == all, best_id, u32::MAX.runtime()));
    }
    if UNIT_POS_X == 0u32 {
        greatest[CUBE_POS] = all;
        greatest[CUBE_COUNT_X as usize + CUBE_POS] = id;
    }
}

fn find_kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let shape = Shape { mass: false, count: false, ..shape };
    let (settings, properties, registers) = target.start(shape.lanes as u32);
    with_storage!(shape.dtype, X => Box::new(find::Find::<X>::new(
        settings, properties, registers, buffer(), buffer(), (), (), shape,
    )))
}

/// Each logit's key, and its weight at temperature 1 where top-p asks for it.
#[cube(launch_unchecked)]
fn weigh<X: Int>(
    logits: &[X],
    greatest: &[u32],
    keys: &mut [u32],
    weights: &mut [u64],
    len: u32,
    slice: u32,
    slices: u32,
    #[comptime] shape: Shape,
) {
    let most = of_key(greatest_key(greatest, slices, shape));
    let mut i = CUBE_POS * slice as usize + UNIT_POS_X as usize;
    let end = min((CUBE_POS + 1) * slice as usize, len as usize);
    while i < end {
        let logit = read(logits, i, shape.dtype);
        keys[i] = key(logit);
        if comptime!(shape.mass) {
            weights[i] = weight(logit, most, 1.0f32.runtime());
        }
        i += comptime!(shape.lanes);
    }
}

fn weigh_kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.lanes as u32);
    with_storage!(shape.dtype, X => Box::new(weigh::Weigh::<X>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), (), (), (), shape,
    )))
}

/// Each slice's sum of the weights that are kept for certain, and how many of the logits are at a threshold that keeps
/// only some.
#[cube(launch_unchecked)]
fn add_up<X: Int>(
    logits: &[X],
    greatest: &[u32],
    counts: &[u32],
    sums: &mut [u64],
    ties: &mut [u32],
    len: u32,
    slice: u32,
    slices: u32,
    rate: u32,
    floor: u32,
    top_k: u32,
    #[comptime] shape: Shape,
) {
    let best = greatest_key(greatest, slices, shape);
    let (threshold, tied, _) = limits(counts, best, floor, top_k, shape);
    let most = of_key(best);
    let (mut sum, mut ties_here) = (0u64.runtime(), 0u32.runtime());
    let mut i = CUBE_POS * slice as usize + UNIT_POS_X as usize;
    let end = min((CUBE_POS + 1) * slice as usize, len as usize);
    while i < end {
        let logit = read(logits, i, shape.dtype);
        let key = key(logit);
        if key > threshold || (key == threshold && !tied) {
            sum += weight(logit, most, f32::reinterpret(rate));
        }
        if key == threshold && tied {
            ties_here += 1u32;
        }
        i += comptime!(shape.lanes);
    }
    let sum = all_sum_wide(sum, shape.lanes);
    let ties_here = all_sum(ties_here, shape.lanes);
    if UNIT_POS_X == 0u32 {
        sums[CUBE_POS] = sum;
        ties[CUBE_POS] = ties_here;
    }
}

pub(super) fn sums_kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.lanes as u32);
    with_storage!(shape.dtype, X => Box::new(add_up::AddUp::<X>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), buffer(), (), (), (), (), (), (), shape,
    )))
}

#[cfg(test)]
pub(super) fn kernels(target: &Target, shape: Shape) -> Vec<Box<dyn CubeKernel>> {
    vec![
        penalise_kernel(target, shape.dtype),
        find_kernel(target, shape),
        weigh_kernel(target, shape),
        sums_kernel(target, shape),
    ]
}

impl Draw<'_> {
    pub(super) fn find_greatest(&self) -> Result<(), KernelError> {
        self.launch(
            find_kernel(self.gpu.target(), self.shape),
            self.slices,
            vec![self.logits.memory()?, (&self.greatest, 0)],
            vec![self.len, self.slice],
        )
    }

    /// Each logit's key and weight.
    pub(super) fn weigh(&self) -> Result<[Memory; 2], KernelError> {
        let keys = self.gpu.allocate(4 * self.len as usize)?;
        let weights = if self.shape.mass { self.gpu.allocate(8 * self.len as usize)? } else { keys.clone() };
        self.launch(
            weigh_kernel(self.gpu.target(), self.shape),
            self.slices,
            vec![self.logits.memory()?, (&self.greatest, 0), (&keys, 0), (&weights, 0)],
            vec![self.len, self.slice, self.slices],
        )?;
        Ok([keys, weights])
    }

    /// Each slice's sum and ties.
    pub(super) fn add_up(&self, (counts, start): &(Memory, usize)) -> Result<[Memory; 2], KernelError> {
        let sums =
            [self.gpu.allocate(8 * self.slices as usize)?, self.gpu.allocate(4 * self.slices as usize)?];
        self.launch(
            sums_kernel(self.gpu.target(), self.shape),
            self.slices,
            vec![self.logits.memory()?, (&self.greatest, 0), (counts, *start), (&sums[0], 0), (&sums[1], 0)],
            vec![self.len, self.slice, self.slices, self.rate(), self.floor(), self.top_k()],
        )?;
        Ok(sums)
    }
}
