//! The last step: a plane per row finds its token, and moves the row on to it.
//!
//! `sample_take_greatest` is for temperature 0. `sample_pick` draws: the random number is a share
//! `r` of the sum of all weights that are kept, and the token is the first whose weight, added to
//! those of the ids before it, passes `r`. A prefix sum over the slices' sums finds the slice, a
//! prefix sum over its logits the id. Of the logits at the threshold perhaps only the first `room`
//! are kept (ties), which both count on the way.

#![allow(unsafe_code)] // Launches.

use super::super::batch::word;
use super::config::{
    Draw, SampleConfig, Sizes, State, StateArgs, all_sum, all_sum_wide, append_token, greatest_at,
    greatest_key, parameters_of, weight,
};
use super::search::{Counters, Limits, best_of_row, limits};
use super::slices::SliceSums;
use crate::KernelError;
use crate::gpu::compile::Target;
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{INFINITE, NOTHING, key, of_key};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Takes the lowest id of each row's greatest logit and moves the row on to it.
#[kernel]
pub(super) fn sample_take_greatest(
    greatest: &[u32],
    parameters: &[u32],
    state: &mut State,
    sizes: Sizes,
    places: u32,
    #[comptime] lanes: usize,
) {
    let row = CUBE_POS_Y;
    let of = parameters_of(parameters, row);
    if !of.is_used {
        terminate!();
    }
    let best = greatest_key(greatest, sizes.slices, lanes);
    let id = lowest_of(greatest, best, sizes.slices, lanes);
    if UNIT_POS_X == 0u32 {
        let id = select(is_bad(best), u32::MAX.runtime(), id);
        append_token(id, row, parameters, state, places);
    }
}

/// The lowest id of the cube's row whose key is `best`, the greatest.
#[cube]
fn lowest_of(greatest: &[u32], best: u32, slices: u32, #[comptime] lanes: usize) -> u32 {
    let at = greatest_at(slices);
    let mut id = u32::MAX.runtime();
    let mut i = UNIT_POS_X;
    while i < slices {
        if greatest[(at + i) as usize] == best {
            id = min(id, greatest[(at + slices + i) as usize]);
        }
        i += comptime!(lanes as u32);
    }
    if comptime!(lanes > 1) {
        id = plane_min(id);
    }
    id
}

/// True if the greatest key says that nothing can be drawn: it is that of NaN, infinity or
/// -infinity.
#[cube]
fn is_bad(key: u32) -> bool {
    key >= comptime!(INFINITE) || key <= comptime!(NOTHING)
}

/// The share `word / 2^64` of `total`: the upper half of their product.
#[cube]
fn share_of(word: u64, total: u64) -> u64 {
    let mask = 0xffff_ffffu64;
    let (a, b) = (word >> 32u64, word & mask);
    let (c, d) = (total >> 32u64, total & mask);
    let (ad, bc) = (a * d, b * c);
    let middle = ((b * d) >> 32u64) + (ad & mask) + (bc & mask);
    a * c + (ad >> 32u64) + (bc >> 32u64) + (middle >> 32u64)
}

/// The random word of a step: Philox4x32-10, as `philox.rs` has it.
#[cube]
fn philox(step: u32, seed_low: u32, seed_high: u32) -> u64 {
    let (mut a, mut b, mut c, mut d) = (step, 0u32.runtime(), 0u32.runtime(), 0u32.runtime());
    let (mut low, mut high) = (seed_low, seed_high);
    #[unroll]
    for _ in 0..10 {
        let (p, q) = (0xd251_1f53u32.runtime(), 0xcd9e_8d57u32.runtime());
        let (p_low, p_high) = (a * p, a.mul_hi(p));
        let (q_low, q_high) = (c * q, c.mul_hi(q));
        a = q_high ^ b ^ low;
        b = q_low;
        c = p_high ^ d ^ high;
        d = p_low;
        low += 0x9e37_79b9u32;
        high += 0xbb67_ae85u32;
    }
    (u64::cast_from(a) << 32u64) + u64::cast_from(b)
}

/// The sum over the units before this one.
#[cube]
fn before(x: u32, #[comptime] lanes: usize) -> u32 {
    if comptime!(lanes == 1) { 0u32.runtime() } else { plane_exclusive_sum(x) }
}

/// The sum over the units before this one, of numbers below 2^62.
#[cube]
fn before_wide(x: u64, #[comptime] lanes: usize) -> u64 {
    let low = before(u32::cast_from(x) & 0x3f_ffffu32, lanes);
    let middle = before(u32::cast_from(x >> 22u64) & 0x3f_ffffu32, lanes);
    let high = before(u32::cast_from(x >> 44u64), lanes);
    u64::cast_from(low) + (u64::cast_from(middle) << 22u64) + (u64::cast_from(high) << 44u64)
}

/// The number of `ties` logits at the threshold that are kept, if `seen` come before them.
#[cube]
fn kept(ties: u32, seen: u32, room: u32) -> u32 {
    min(ties, room - min(room, seen))
}

/// The results of the steps before.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Found {
    greatest: Box<[u32]>,
    counters: Box<[u32]>,
    sums: Box<[u64]>,
    ties: Box<[u32]>,
}

/// Draws the tokens and moves the rows on to them.
#[kernel]
pub(super) fn sample_pick<X: Int>(
    logits: &[X],
    parameters: &[u32],
    found: &Found,
    state: &mut State,
    sizes: Sizes,
    places: u32,
    #[comptime] config: SampleConfig,
) {
    let row = CUBE_POS_Y;
    let of = parameters_of(parameters, row);
    if !of.is_used {
        terminate!();
    }
    let best = best_of_row(&found.greatest, &found.counters, sizes.slices, &of, config);
    let mut id = 0u32.runtime();
    if of.rate == 0u32 {
        id = lowest_of(&found.greatest, best, sizes.slices, config.lanes);
    }
    if of.rate != 0u32 {
        let limits = limits(&found.counters, best, &of, config);
        let scale = (of_key(best), f32::reinterpret(of.rate));
        let of_tie = weight(of_key(limits.threshold), scale.0, scale.1);
        let seed = row as usize * word::COUNT + word::SEED;
        let word = philox(state.steps[row as usize], parameters[seed], parameters[seed + 1]);
        let (at, left, seen) = find_slice(found, sizes.slices, of_tie, limits.room, word, config.lanes);
        let first = at * sizes.slice;
        let slice = (first, min(first + sizes.slice, sizes.len));
        id = find_id(logits, slice, (CUBE_POS_Y * sizes.len, left, seen), scale, &limits, config);
    }
    if UNIT_POS_X == 0u32 {
        let id = select(is_bad(best), u32::MAX.runtime(), id);
        append_token(id, row, parameters, state, places);
    }
}

/// The slice of the cube's row that the share `word / 2^64` of all weights ends in, how much of the
/// share is left at its start, and the ties before it. Each unit takes slices that lie together.
#[allow(clippy::needless_range_loop)] // CubeCL has no iterators.
#[cube]
fn find_slice(
    of: &Found,
    slices: u32,
    of_tie: u64,
    room: u32,
    word: u64,
    #[comptime] lanes: usize,
) -> (u32, u64, u32) {
    let each = slices.div_ceil(comptime!(lanes as u32));
    let begin = CUBE_POS_Y * slices;
    let first = begin + min(UNIT_POS_X * each, slices);
    let end = min(first + each, begin + slices);
    let mut my_ties = 0u32.runtime();
    for i in first..end {
        my_ties += of.ties[i as usize];
    }
    let mut seen = before(my_ties, lanes);
    let seen_before = seen;
    let mut mine = 0u64.runtime();
    for i in first..end {
        mine += of.sums[i as usize] + of_tie * u64::cast_from(kept(of.ties[i as usize], seen, room));
        seen += of.ties[i as usize];
    }
    let start = before_wide(mine, lanes);
    let target = share_of(word, all_sum_wide(mine, lanes));
    let (mut found, mut left, mut passed) = (0u32.runtime(), 0u64.runtime(), 0u32.runtime());
    if start <= target && target < start + mine {
        let mut rest = target - start;
        let mut seen = seen_before;
        let mut open = true.runtime();
        for i in first..end {
            let ties = of.ties[i as usize];
            let sum = of.sums[i as usize] + of_tie * u64::cast_from(kept(ties, seen, room));
            if open && rest < sum {
                open = false;
                found = i - begin;
                left = rest;
                passed = seen;
            }
            rest -= select(open, sum, 0u64.runtime());
            seen += of.ties[i as usize];
        }
    }
    (all_sum(found, lanes), all_sum_wide(left, lanes), all_sum(passed, lanes))
}

/// The id of a slice (first id, end) of the row that starts at logit `row`, at which `left` of the
/// slice's weights end, if `seen` ties come before it. `scale` is the greatest logit and
/// 1 / temperature. Each unit takes ids that lie together.
#[cube]
fn find_id<X: Int>(
    logits: &[X],
    slice: (u32, u32),
    of: (u32, u64, u32),
    scale: (f32, f32),
    limits: &Limits,
    #[comptime] config: SampleConfig,
) -> u32 {
    let (start, end) = slice;
    let (row, left, seen) = of;
    let each = (end - start).div_ceil(comptime!(config.lanes as u32));
    let first = min(start + UNIT_POS_X * each, end);
    let end = min(first + each, end);
    let mut my_ties = 0u32.runtime();
    for i in first..end {
        let key = key(read(logits, (row + i) as usize, config.dtype));
        my_ties += select(limits.tied && key == limits.threshold, 1u32, 0u32);
    }
    let seen_before = seen + before(my_ties, config.lanes);
    let mut seen = seen_before;
    let mut mine = 0u64.runtime();
    for i in first..end {
        let (weight, is_tie) =
            weight_kept(read(logits, (row + i) as usize, config.dtype), scale, limits, seen);
        mine += weight;
        seen += is_tie;
    }
    let start = before_wide(mine, config.lanes);
    let mut id = 0u32.runtime();
    if start <= left && left < start + mine {
        let mut rest = left - start;
        let mut seen = seen_before;
        let mut open = true.runtime();
        for i in first..end {
            let (weight, is_tie) =
                weight_kept(read(logits, (row + i) as usize, config.dtype), scale, limits, seen);
            if open && rest < weight {
                open = false;
                id = i;
            }
            rest -= select(open, weight, 0u64.runtime());
            seen += is_tie;
        }
    }
    all_sum(id, config.lanes)
}

/// A logit's weight, or 0 if it is not kept; and 1 if it is a tie. `seen` ties come before it.
#[cube]
fn weight_kept(logit: f32, scale: (f32, f32), limits: &Limits, seen: u32) -> (u64, u32) {
    let key = key(logit);
    let level = key == limits.threshold;
    let keep = key > limits.threshold || (level && (!limits.tied || seen < limits.room));
    let weight = weight(logit, scale.0, scale.1);
    (select(keep, weight, 0u64.runtime()), select(limits.tied && level, 1u32, 0u32))
}

pub(super) fn take_greatest_compiled(target: &Target, lanes: usize) -> Kernel<SampleTakeGreatest<'static>> {
    SampleTakeGreatest::kernel(target, lanes, lanes)
}

pub(super) fn pick_compiled(target: &Target, config: SampleConfig) -> Kernel<SamplePick<'static>> {
    with_storage!(config.dtype, X => SamplePick::kernel::<X>(target, config.lanes, config))
}

impl Draw<'_> {
    pub(super) fn take_greatest(&self) -> Result<(), KernelError> {
        let arguments = SampleTakeGreatest {
            greatest: (&self.greatest).into(),
            parameters: self.batch.tensors()[4].buffer()?,
            state: StateArgs::of(self.batch)?,
            sizes: self.sizes,
            places: self.places(),
        };
        let kernel = take_greatest_compiled(self.gpu.target(), self.config.lanes);
        // SAFETY: each slice has two words in `greatest`, and the batch has the rows, whose
        // histories have `places` places.
        unsafe { self.gpu.launch(kernel, self.cubes_of_rows(), arguments) }
    }

    pub(super) fn pick(&self, counters: &Counters, of_slices: &SliceSums) -> Result<(), KernelError> {
        let arguments = SamplePick {
            logits: self.logits.buffer()?,
            parameters: self.batch.tensors()[4].buffer()?,
            found: FoundArgs {
                greatest: (&self.greatest).into(),
                counters: counters.buffer(),
                sums: (&of_slices.sums).into(),
                ties: (&of_slices.ties).into(),
            },
            state: StateArgs::of(self.batch)?,
            sizes: self.sizes,
            places: self.places(),
        };
        let kernel = pick_compiled(self.gpu.target(), self.config);
        // SAFETY: the slices end with a row's logits, and each has its sum, its ties and two words
        // in `greatest`; counters are read where there was a search; the batch has the rows, whose
        // histories have `places` places.
        unsafe { self.gpu.launch(kernel, self.cubes_of_rows(), arguments) }
    }
}
