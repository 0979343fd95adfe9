//! The last step: one plane finds the id that the random number falls on.

use super::search::limits;
use super::slices::{all_sum, all_sum_wide, greatest_key, weight};
use super::{Draw, Shape, take_up};
use crate::KernelError;
use crate::gpu::Memory;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{INFINITE, NOTHING, key, of_key};
use crate::ops::sample::DecodeState;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The lowest id of the greatest logit.
#[cube(launch_unchecked)]
fn take(
    greatest: &[u32],
    token: &mut [u32],
    position: &mut [u32],
    step: &mut [u32],
    history: &mut [u32],
    slices: u32,
    window: u32,
    #[comptime] shape: Shape,
) {
    let best = greatest_key(greatest, slices, shape);
    let mut id = u32::MAX.runtime();
    let mut i = UNIT_POS_X as usize;
    while i < slices as usize {
        if greatest[i] == best {
            id = min(id, greatest[slices as usize + i]);
        }
        i += comptime!(shape.lanes);
    }
    if comptime!(shape.lanes > 1) {
        id = plane_min(id);
    }
    if UNIT_POS_X == 0u32 {
        let id = select(is_bad(best), u32::MAX.runtime(), id);
        take_up(id, token, position, step, history, window);
    }
}

/// Whether the greatest key says that nothing can be drawn.
#[cube]
fn is_bad(key: u32) -> bool {
    key >= comptime!(INFINITE) || key <= comptime!(NOTHING)
}

/// The upper half of `word * total`.
#[cube]
fn part(word: u64, total: u64) -> u64 {
    let mask = 0xffff_ffffu64;
    let (a, b) = (word >> 32u64, word & mask);
    let (c, d) = (total >> 32u64, total & mask);
    let (ad, bc) = (a * d, b * c);
    let middle = ((b * d) >> 32u64) + (ad & mask) + (bc & mask);
    a * c + (ad >> 32u64) + (bc >> 32u64) + (middle >> 32u64)
}

/// The random word of a step.
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

/// How many of `ties` that come after `seen` others are kept.
#[cube]
fn kept(ties: u32, seen: u32, room: u32) -> u32 {
    min(ties, room - min(room, seen))
}

#[cube(launch_unchecked)]
fn pick<X: Int>(
    logits: &[X],
    greatest: &[u32],
    counts: &[u32],
    sums: &[u64],
    ties: &[u32],
    token: &mut [u32],
    position: &mut [u32],
    step: &mut [u32],
    history: &mut [u32],
    len: u32,
    slice: u32,
    slices: u32,
    rate: u32,
    floor: u32,
    top_k: u32,
    seed_low: u32,
    seed_high: u32,
    window: u32,
    #[comptime] shape: Shape,
) {
    let best = greatest_key(greatest, slices, shape);
    let limits = limits(counts, best, floor, top_k, shape);
    let scale = (of_key(best), f32::reinterpret(rate));
    let of_tie = weight(of_key(limits.0), scale.0, scale.1);
    let word = philox(step[0usize], seed_low, seed_high);
    let (found, left, seen) = find_slice(sums, ties, slices, of_tie, limits.2, word, shape.lanes);
    let first = found * slice;
    let slice = (first, min(first + slice, len));
    let id = find_id(logits, slice, scale, limits, left, seen, shape);
    if UNIT_POS_X == 0u32 {
        let id = select(is_bad(best), u32::MAX.runtime(), id);
        take_up(id, token, position, step, history, window);
    }
}

/// The slice that `word` of 2^64 parts of all weights end in, what is left of them there, and the ties before it. Each
/// unit takes slices that lie together.
#[allow(clippy::needless_range_loop)] // CubeCL has no iterators.
#[cube]
fn find_slice(
    sums: &[u64],
    ties: &[u32],
    slices: u32,
    of_tie: u64,
    room: u32,
    word: u64,
    #[comptime] lanes: usize,
) -> (u32, u64, u32) {
    let each = (slices as usize).div_ceil(lanes);
    let first = min(UNIT_POS_X as usize * each, slices as usize);
    let end = min(first + each, slices as usize);
    let mut my_ties = 0u32.runtime();
    for i in first..end {
        my_ties += ties[i];
    }
    let mut seen = before(my_ties, lanes);
    let seen_before = seen;
    let mut mine = 0u64.runtime();
    for i in first..end {
        mine += sums[i] + of_tie * u64::cast_from(kept(ties[i], seen, room));
        seen += ties[i];
    }
    let start = before_wide(mine, lanes);
    let target = part(word, all_sum_wide(mine, lanes));
    let (mut found, mut left, mut passed) = (0u32.runtime(), 0u64.runtime(), 0u32.runtime());
    if start <= target && target < start + mine {
        let mut rest = target - start;
        let mut seen = seen_before;
        let mut open = true.runtime();
        for i in first..end {
            let sum = sums[i] + of_tie * u64::cast_from(kept(ties[i], seen, room));
            if open && rest < sum {
                open = false;
                found = i as u32;
                left = rest;
                passed = seen;
            }
            rest -= select(open, sum, 0u64.runtime());
            seen += ties[i];
        }
    }
    (all_sum(found, lanes), all_sum_wide(left, lanes), all_sum(passed, lanes))
}

/// The id in which `left` of the weights from the first of a slice on end, after `seen` ties. Each unit takes ids that lie
/// together.
#[cube]
fn find_id<X: Int>(
    logits: &[X],
    slice: (u32, u32),
    scale: (f32, f32),
    limits: (u32, bool, u32),
    left: u64,
    seen: u32,
    #[comptime] shape: Shape,
) -> u32 {
    let (start, end) = slice;
    let each = (end - start).div_ceil(comptime!(shape.lanes as u32));
    let first = min(start + UNIT_POS_X * each, end);
    let end = min(first + each, end);
    let mut my_ties = 0u32.runtime();
    for i in first..end {
        let key = key(read(logits, i as usize, shape.dtype));
        my_ties += select(limits.1 && key == limits.0, 1u32, 0u32);
    }
    let seen_before = seen + before(my_ties, shape.lanes);
    let mut seen = seen_before;
    let mut mine = 0u64.runtime();
    for i in first..end {
        let (weight, is_tie) = weight_kept(read(logits, i as usize, shape.dtype), scale, limits, seen);
        mine += weight;
        seen += is_tie;
    }
    let start = before_wide(mine, shape.lanes);
    let mut id = 0u32.runtime();
    if start <= left && left < start + mine {
        let mut rest = left - start;
        let mut seen = seen_before;
        let mut open = true.runtime();
        for i in first..end {
            let (weight, is_tie) = weight_kept(read(logits, i as usize, shape.dtype), scale, limits, seen);
            if open && rest < weight {
                open = false;
                id = i;
            }
            rest -= select(open, weight, 0u64.runtime());
            seen += is_tie;
        }
    }
    all_sum(id, shape.lanes)
}

/// What a logit weighs if it is kept, or nothing; and 1 for a tie. `seen` ties come before it.
#[cube]
fn weight_kept(logit: f32, scale: (f32, f32), limits: (u32, bool, u32), seen: u32) -> (u64, u32) {
    let key = key(logit);
    let (threshold, tied, room) = limits;
    let level = key == threshold;
    let keep = key > threshold || (level && (!tied || seen < room));
    let weight = weight(logit, scale.0, scale.1);
    (select(keep, weight, 0u64.runtime()), select(tied && level, 1u32, 0u32))
}

/// It knows nothing of the logits' type.
pub(super) fn take_kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.lanes as u32);
    Box::new(take::Take::new(
        settings,
        properties,
        registers,
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        shape,
    ))
}

pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.lanes as u32);
    let [a, b, c, d, e, f, g, h, i] = [(); 9].map(|()| buffer());
    with_storage!(shape.dtype, X => Box::new(pick::Pick::<X>::new(
        settings, properties, registers, a, b, c, d, e, f, g, h, i, (), (), (), (), (), (), (), (), (), shape,
    )))
}

impl Draw<'_> {
    pub(super) fn take_greatest(&self, state: &DecodeState) -> Result<(), KernelError> {
        let [token, position, step, history] = state.tensors();
        self.launch(
            take_kernel(self.gpu.target(), self.shape),
            1,
            vec![(&self.greatest, 0), token.memory()?, position.memory()?, step.memory()?, history.memory()?],
            vec![self.slices, state.window() as u32],
        )
    }

    pub(super) fn pick(
        &self,
        (counts, start): &(Memory, usize),
        [sums, ties]: &[Memory; 2],
        state: &DecodeState,
    ) -> Result<(), KernelError> {
        let [token, position, step, history] = state.tensors();
        self.launch(
            kernel(self.gpu.target(), self.shape),
            1,
            vec![
                self.logits.memory()?,
                (&self.greatest, 0),
                (counts, *start),
                (sums, 0),
                (ties, 0),
                token.memory()?,
                position.memory()?,
                step.memory()?,
                history.memory()?,
            ],
            vec![
                self.len,
                self.slice,
                self.slices,
                self.rate(),
                self.floor(),
                self.top_k(),
                self.params.seed as u32,
                (self.params.seed >> 32) as u32,
                state.window() as u32,
            ],
        )
    }
}
