//! The threshold of top-p and top-k, found without sorting.
//!
//! **What it computes.** Logits are compared by their [`key`], a u32 in the order of floats. The
//! threshold is the least key for which the logits with greater keys weigh less than top-p's mass
//! together, and are fewer than k. Logits with greater keys are kept; of those with the key itself
//! all, or, with top-k, as many as it has room for, the lowest ids first.
//!
//! **How.** A search in the range of keys, 4 bits per pass, 8 passes. Before a pass it is known
//! that the threshold is among the `2^(32 - 4 pass)` keys from `begin` on. The pass cuts this range
//! into 16 parts of the same size, and for each part adds up what is *above* its last key: the
//! weights and the number of logits with greater keys. Where this is still too much (the mass is
//! reached, or k), the threshold lies above the part. So the threshold lies in the part whose index
//! is the number of such parts ([`parts_below`]), which is the next pass's range. After the last
//! pass a part is one key.
//!
//! **Who computes it.** A launch of `sample_narrow_threshold` per pass: each cube counters its
//! slice of the logits and adds to the pass's counters atomically. Nobody waits for all cubes
//! within a launch, so the answer of a pass is not stored by the pass itself: every cube of the
//! next pass, and every user of [`limits`], recomputes it from the counters. The first unit of a
//! pass writes `begin` and the mass into the pass's own counters, for the launch after.
//!
//! ```text
//! a pass's counters, in words   0..64   for each of 16 parts: the weights above it, in three words of 22 bits each; how many
//!                                       logits are above it
//!                               64      `begin` (BEGIN)
//!                               65..67  the mass, low and high word (MASS)
//! ```
//!
//! **Invariants.**
//! - Weights are integers, so that the sums are exact in any order. The sum of a slice is below
//!   2^62, and of all slices (512 at most) each word stays below 2^32: three words of 22 bits need
//!   no 64-bit atomics.
//! - Counters start as zeros. `begin` and the mass of pass 0 are 0 until it computes them: its
//!   range begins at key 0, and its last part counters all logits, so that pass 1 has the sum of
//!   all weights, of which top-p wants a share.
//! - What depends on top-p or top-k is compiled in only where they are on; counters of the other
//!   are 0 and not read.

#![allow(unsafe_code)] // Launches.

use super::config::{Draw, SampleConfig, all_sum, all_sum_wide};
use crate::KernelError;
use crate::gpu::Memory;
use crate::gpu::compile::Target;
use crate::gpu::key::{key, of_key};
use crate::gpu::launch::{Buffer, Kernel, LaunchArgs, kernel};
use crate::ops::sample::cpu::share;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Parts of a pass's range.
const PARTS: usize = 16;
/// Keys have 32 bits, of which a pass finds 4.
const PASSES: usize = 8;
/// The word of a pass's counters that holds where its range begins.
const BEGIN: usize = 4 * PARTS;
/// The words that hold the mass.
const MASS: usize = BEGIN + 1;
/// Bytes from a pass's counters to the next one's: every device can begin a buffer at multiples of
/// it.
const STRIDE: usize = 512;

/// A pass's counters, which are a part of their memory.
pub(super) struct Counters {
    memory: Memory,
    start: usize,
}

impl Counters {
    pub fn buffer(&self) -> Buffer<'_> {
        Buffer::at(&self.memory, self.start)
    }
}

/// The sum of the weights above the last key of part `part`.
#[cube]
fn weight_above(counters: &[u32], part: usize) -> u64 {
    u64::cast_from(counters[part * 4])
        + (u64::cast_from(counters[part * 4 + 1]) << 22u64)
        + (u64::cast_from(counters[part * 4 + 2]) << 44u64)
}

/// The mass that top-p wants: a share of all weights, whose sum pass 0 has for its last part. Later
/// passes hand it on.
#[cube]
fn wanted_mass(counters: &[u32], pass: u32, share: u32) -> u64 {
    let mut mass = u64::cast_from(counters[MASS]) + (u64::cast_from(counters[comptime!(MASS + 1)]) << 32u64);
    if pass == 0u32 {
        let total = weight_above(counters, comptime!(PARTS - 1));
        let low = ((total & 0xffff_ffffu64) * u64::cast_from(share)) >> 32u64;
        mass = max((total >> 32u64) * u64::cast_from(share) + low, 1u64);
    }
    mass
}

/// The number of parts of a pass below the threshold.
#[cube]
fn parts_below(counters: &[u32], mass: u64, top_k: u32, #[comptime] config: SampleConfig) -> u32 {
    let mut parts = 0u32.runtime();
    let mut part = UNIT_POS_X as usize;
    // The threshold is in the last part if in no other.
    while part < comptime!(PARTS - 1) {
        let mut below = false.runtime();
        if comptime!(config.top_p) {
            below = weight_above(counters, part) >= mass;
        }
        if comptime!(config.top_k) {
            below = below || counters[part * 4 + 3] >= top_k;
        }
        parts += select(below, 1u32, 0u32);
        part += comptime!(config.lanes);
    }
    all_sum(parts, config.lanes)
}

/// The kept logits: those with keys above `threshold`; of those with the key itself all, or the
/// first `room` where they are `tied`.
#[derive(CubeType)]
pub(super) struct Limits {
    pub threshold: u32,
    pub tied: bool,
    pub room: u32,
}

/// The limits of all filters, from the key of the greatest logit and the last pass's counters.
#[cube]
pub(super) fn limits(
    counters: &[u32],
    greatest: u32,
    floor: u32,
    top_k: u32,
    #[comptime] config: SampleConfig,
) -> Limits {
    // Minus infinity where min-p is 0.
    let mut threshold = key(of_key(greatest) + f32::reinterpret(floor));
    let mut tied = false.runtime();
    let mut room = 0u32.runtime();
    if comptime!(config.searches()) {
        let mass = wanted_mass(counters, comptime!(PASSES as u32 - 1), 0u32);
        let parts = parts_below(counters, mass, top_k, config);
        let found = counters[BEGIN] + parts;
        if comptime!(config.top_k) {
            tied = found >= threshold;
            room = top_k - min(counters[parts as usize * 4 + 3], top_k);
        }
        threshold = max(threshold, found);
    }
    Limits { threshold, tied, room }
}

/// A pass, and what it is to find.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Pass {
    /// Logits.
    len: u32,
    /// Logits per slice.
    slice: u32,
    /// The pass's number.
    pass: u32,
    /// top_p in units of 2^-32.
    share: u32,
    top_k: u32,
}

/// One pass over the keys and weights of all logits, one cube per slice. `last` are the counters of
/// the pass before.
#[kernel]
pub(super) fn sample_narrow_threshold(
    keys: &[u32],
    weights: &[u64],
    last: &[u32],
    counters: &mut [Atomic<u32>],
    of: Pass,
    #[comptime] config: SampleConfig,
) {
    let (slice, pass) = (of.slice, of.pass);
    let mut begin = 0u32.runtime();
    let bits = 28u32 - 4u32 * pass;
    if pass > 0u32 {
        let mut mass = 0u64.runtime();
        if comptime!(config.top_p) {
            mass = wanted_mass(last, pass - 1u32, of.share);
        }
        begin = last[BEGIN] + (parts_below(last, mass, of.top_k, config) << (bits + 4u32));
        if ABSOLUTE_POS == 0 {
            counters[BEGIN].store(begin);
            counters[MASS].store(u32::cast_from(mass));
            counters[comptime!(MASS + 1)].store(u32::cast_from(mass >> 32u64));
        }
    }
    let mut sums = Array::<u64>::new(PARTS);
    let mut above = Array::<u32>::new(PARTS);
    #[unroll]
    for part in 0..PARTS {
        sums[part] = 0u64;
        above[part] = 0u32;
    }
    let mut i = CUBE_POS * slice as usize + UNIT_POS_X as usize;
    let end = min((CUBE_POS + 1) * slice as usize, of.len as usize);
    while i < end {
        let key = keys[i];
        let mut weight = 0u64.runtime();
        if comptime!(config.top_p) {
            weight = weights[i];
        }
        #[unroll]
        for part in 0..PARTS {
            // Nothing is above the last part of pass 0, which counts all instead.
            let last = begin + (comptime!(part as u32 + 1).runtime() << bits) - 1u32;
            let is_above = key > last || (comptime!(part == PARTS - 1) && pass == 0u32);
            if comptime!(config.top_p) {
                sums[part] += select(is_above, weight, 0u64.runtime());
            }
            if comptime!(config.top_k) {
                above[part] += select(is_above, 1u32, 0u32);
            }
        }
        i += comptime!(config.lanes);
    }
    add_to_counters(&sums, &above, counters, config);
}

/// Adds what a cube has counted to the pass's counters. Each unit adds some of them, so that
/// neighbours go to memory together.
#[cube]
fn add_to_counters(
    sums: &Array<u64>,
    above: &Array<u32>,
    counters: &mut [Atomic<u32>],
    #[comptime] config: SampleConfig,
) {
    let mut mine = Array::<u32>::new(comptime!(BEGIN.div_ceil(config.lanes)));
    #[unroll]
    for part in 0..PARTS {
        let mut sum = 0u64.runtime();
        if comptime!(config.top_p) {
            sum = all_sum_wide(sums[part], config.lanes);
        }
        let mut words = Array::<u32>::new(4usize);
        words[0usize] = u32::cast_from(sum) & 0x3f_ffffu32;
        words[1usize] = u32::cast_from(sum >> 22u64) & 0x3f_ffffu32;
        words[2usize] = u32::cast_from(sum >> 44u64);
        words[3usize] = 0u32;
        if comptime!(config.top_k) {
            words[3usize] = all_sum(above[part], config.lanes);
        }
        #[unroll]
        for which in 0..4usize {
            let unit = comptime!(((part * 4 + which) % config.lanes) as u32);
            let place = comptime!((part * 4 + which) / config.lanes);
            if comptime!(unit == 0) {
                mine[place] = words[which];
            } else {
                mine[place] = select(UNIT_POS_X == unit, words[which], mine[place]);
            }
        }
    }
    #[unroll]
    for place in 0..comptime!(BEGIN.div_ceil(config.lanes)) {
        counters[place * comptime!(config.lanes) + UNIT_POS_X as usize].fetch_add(mine[place]);
    }
}

pub(super) fn compiled(target: &Target, config: SampleConfig) -> Kernel<SampleNarrowThreshold<'static>> {
    // The kernel reads keys: it is the same for every type of logits.
    let config = SampleConfig { dtype: FloatType::F32, ..config };
    SampleNarrowThreshold::kernel(target, config.lanes, config)
}

impl Draw<'_> {
    /// Searches the threshold. Gives the last pass's counters, or a placeholder where neither top-p
    /// nor top-k is on.
    pub(super) fn search(&self) -> Result<Counters, KernelError> {
        if !self.config.searches() {
            return Ok(Counters { memory: self.greatest.clone(), start: 0 });
        }
        let counters = self.gpu.filled(STRIDE * PASSES, 0)?;
        let [keys, weights] = self.weigh()?;
        let of_pass = |pass: usize| Buffer::at(&counters, pass * STRIDE);
        for pass in 0..PASSES {
            let arguments = SampleNarrowThreshold {
                keys: (&keys).into(),
                weights: (&weights).into(),
                last: of_pass(pass.saturating_sub(1)),
                counters: of_pass(pass),
                of: Pass {
                    len: self.sizes.len,
                    slice: self.sizes.slice,
                    pass: pass as u32,
                    share: share(self.params.top_p),
                    top_k: self.top_k(),
                },
            };
            // SAFETY: there is a key per logit, and a weight where weights are read; counters are
            // STRIDE bytes per pass.
            unsafe { self.gpu.launch(compiled(self.gpu.target(), self.config), self.cubes(), arguments)? };
        }
        Ok(Counters { memory: counters, start: (PASSES - 1) * STRIDE })
    }
}
