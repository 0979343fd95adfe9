//! The threshold of top-p and top-k, as a [`key`]: the least for which the logits above it have less than the mass
//! together and are fewer than k.
//!
//! Every pass cuts the range that the threshold lies in into [`WAYS`] parts, and the slices count and weigh what is above
//! the last key of each. The threshold lies behind all parts whose last key is too small. Whoever needs a pass's answer
//! makes it of its counters; one writes down where the range begins then, and the mass.
//!
//! ```text
//! a pass's counters   WAYS x (weight above, in three parts of 22 bits; how many are above); where the range begins;
//!                     the mass, in two words
//! ```

use super::slices::{all_sum, all_sum_wide};
use super::{Draw, Shape};
use crate::KernelError;
use crate::gpu::Memory;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::key::{key, of_key};
use crate::ops::sample::cpu::share;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

const WAYS: usize = 16;
/// Keys have 32 bits, a pass finds 4.
const PASSES: usize = 8;
const BEGIN: usize = 4 * WAYS;
const MASS: usize = BEGIN + 1;
/// Bytes from a pass's counters to the next one's: every device can begin a buffer at such places.
const STRIDE: usize = 512;

/// The sum of the weights above the last key of part `way`.
#[cube]
fn weight_above(counts: &[u32], way: usize) -> u64 {
    u64::cast_from(counts[way * 4])
        + (u64::cast_from(counts[way * 4 + 1]) << 22u64)
        + (u64::cast_from(counts[way * 4 + 2]) << 44u64)
}

/// What top-p wants of all weights. The first pass's last part has the sum of these.
#[cube]
fn wanted_mass(counts: &[u32], pass: u32, share: u32) -> u64 {
    let mut mass = u64::cast_from(counts[MASS]) + (u64::cast_from(counts[comptime!(MASS + 1)]) << 32u64);
    if pass == 0u32 {
        let total = weight_above(counts, comptime!(WAYS - 1));
        let low = ((total & 0xffff_ffffu64) * u64::cast_from(share)) >> 32u64;
        mass = max((total >> 32u64) * u64::cast_from(share) + low, 1u64);
    }
    mass
}

/// In how many parts of pass `pass` the threshold is not: these are the first.
#[cube]
fn parts_before(counts: &[u32], mass: u64, top_k: u32, #[comptime] shape: Shape) -> u32 {
    let mut parts = 0u32.runtime();
    let mut way = UNIT_POS_X as usize;
    // The threshold is in the last part if in no other.
    while way < comptime!(WAYS - 1) {
        let mut before = false.runtime();
        if comptime!(shape.mass) {
            before = weight_above(counts, way) >= mass;
        }
        if comptime!(shape.count) {
            before = before || counts[way * 4 + 3] >= top_k;
        }
        parts += select(before, 1u32, 0u32);
        way += comptime!(shape.lanes);
    }
    all_sum(parts, shape.lanes)
}

/// The key from which on logits are kept; whether of those that have it only some are, and how many. `counts` are the
/// last pass's.
#[cube]
pub(super) fn limits(
    counts: &[u32],
    greatest: u32,
    floor: u32,
    top_k: u32,
    #[comptime] shape: Shape,
) -> (u32, bool, u32) {
    // Minus infinity where min-p is 0.
    let mut threshold = key(of_key(greatest) + f32::reinterpret(floor));
    let mut tied = false.runtime();
    let mut room = 0u32.runtime();
    if comptime!(shape.filtered()) {
        let mass = wanted_mass(counts, comptime!(PASSES as u32 - 1), 0u32);
        let parts = parts_before(counts, mass, top_k, shape);
        let found = counts[BEGIN] + parts;
        if comptime!(shape.count) {
            tied = found >= threshold;
            room = top_k - min(counts[parts as usize * 4 + 3], top_k);
        }
        threshold = max(threshold, found);
    }
    (threshold, tied, room)
}

/// Pass `pass`, a slice a cube; `last` are the counters of the pass before.
#[cube(launch_unchecked)]
fn narrow_down(
    keys: &[u32],
    weights: &[u64],
    last: &[u32],
    counts: &mut [Atomic<u32>],
    len: u32,
    slice: u32,
    pass: u32,
    share: u32,
    top_k: u32,
    #[comptime] shape: Shape,
) {
    let mut begin = 0u32.runtime();
    let bits = 28u32 - 4u32 * pass;
    if pass > 0u32 {
        let mut mass = 0u64.runtime();
        if comptime!(shape.mass) {
            mass = wanted_mass(last, pass - 1u32, share);
        }
        begin = last[BEGIN] + (parts_before(last, mass, top_k, shape) << (bits + 4u32));
        if ABSOLUTE_POS == 0 {
            counts[BEGIN].store(begin);
            counts[MASS].store(u32::cast_from(mass));
            counts[comptime!(MASS + 1)].store(u32::cast_from(mass >> 32u64));
        }
    }
    let mut sums = Array::<u64>::new(WAYS);
    let mut above = Array::<u32>::new(WAYS);
    #[unroll]
    for way in 0..WAYS {
        sums[way] = 0u64;
        above[way] = 0u32;
    }
    let mut i = CUBE_POS * slice as usize + UNIT_POS_X as usize;
    let end = min((CUBE_POS + 1) * slice as usize, len as usize);
    while i < end {
        let key = keys[i];
        let mut weight = 0u64.runtime();
        if comptime!(shape.mass) {
            weight = weights[i];
        }
        #[unroll]
        for way in 0..WAYS {
            // Nothing is above the last part of the first pass: there all are summed up.
            let last = begin + (comptime!(way as u32 + 1).runtime() << bits) - 1u32;
            let is_above = key > last || (comptime!(way == WAYS - 1) && pass == 0u32);
            if comptime!(shape.mass) {
                sums[way] += select(is_above, weight, 0u64.runtime());
            }
            if comptime!(shape.count) {
                above[way] += select(is_above, 1u32, 0u32);
            }
        }
        i += comptime!(shape.lanes);
    }
    add(&sums, &above, counts, shape);
}

/// Adds the units' sums to a pass's counters. Each unit adds some of them, so that neighbours go to memory together.
#[cube]
fn add(sums: &Array<u64>, above: &Array<u32>, counts: &mut [Atomic<u32>], #[comptime] shape: Shape) {
    let mut mine = Array::<u32>::new(comptime!(BEGIN.div_ceil(shape.lanes)));
    #[unroll]
    for way in 0..WAYS {
        let mut sum = 0u64.runtime();
        if comptime!(shape.mass) {
            sum = all_sum_wide(sums[way], shape.lanes);
        }
        let mut parts = Array::<u32>::new(4usize);
        parts[0usize] = u32::cast_from(sum) & 0x3f_ffffu32;
        parts[1usize] = u32::cast_from(sum >> 22u64) & 0x3f_ffffu32;
        parts[2usize] = u32::cast_from(sum >> 44u64);
        parts[3usize] = 0u32;
        if comptime!(shape.count) {
            parts[3usize] = all_sum(above[way], shape.lanes);
        }
        #[unroll]
        for which in 0..4usize {
            let unit = comptime!(((way * 4 + which) % shape.lanes) as u32);
            let place = comptime!((way * 4 + which) / shape.lanes);
            if comptime!(unit == 0) {
                mine[place] = parts[which];
            } else {
                mine[place] = select(UNIT_POS_X == unit, parts[which], mine[place]);
            }
        }
    }
    #[unroll]
    for place in 0..comptime!(BEGIN.div_ceil(shape.lanes)) {
        counts[place * comptime!(shape.lanes) + UNIT_POS_X as usize].fetch_add(mine[place]);
    }
}

pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    // The keys have the logits' type no more.
    let shape = Shape { dtype: lowbit_formats::FloatType::F32, ..shape };
    let (settings, properties, registers) = target.start(shape.lanes as u32);
    let [a, b, c, d] = [(); 4].map(|()| buffer());
    Box::new(narrow_down::NarrowDown::new(
        settings,
        properties,
        registers,
        a,
        b,
        c,
        d,
        (),
        (),
        (),
        (),
        (),
        shape,
    ))
}

impl Draw<'_> {
    /// The counters of the last pass, and where in their memory they begin; anything when there is nothing to search.
    pub(super) fn search(&self) -> Result<(Memory, usize), KernelError> {
        if !self.shape.filtered() {
            return Ok((self.greatest.clone(), 0));
        }
        let counts = self.gpu.filled(STRIDE * PASSES, 0)?;
        let [keys, weights] = self.weigh()?;
        for pass in 0..PASSES {
            let last = (&counts, pass.saturating_sub(1) * STRIDE);
            self.launch(
                kernel(self.gpu.target(), self.shape),
                self.slices,
                vec![(&keys, 0), (&weights, 0), last, (&counts, pass * STRIDE)],
                vec![self.len, self.slice, pass as u32, share(self.params.top_p), self.top_k()],
            )?;
        }
        Ok((counts, (PASSES - 1) * STRIDE))
    }
}
