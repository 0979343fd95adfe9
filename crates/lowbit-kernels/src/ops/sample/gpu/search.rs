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
//! **Who computes it.** A launch of `sample_narrow_threshold` per pass: each cube counts its slice
//! of a row's logits and adds to the row's counters of the pass atomically. Nobody waits for all
//! cubes within a launch, so the answer of a pass is not stored by the pass itself: every cube of
//! the next pass, and every user of [`limits`], recomputes it from the counters. The first unit of
//! a row's pass writes `begin` and the mass into the pass's own counters, for the launch after. A
//! slice without a logit above the first part ends at once: after few passes nearly all do.
//!
//! ```text
//! a row's counters of a pass,   0..64   for each of 16 parts: the weights above it, in three words of 22 bits each; how many
//! in words                              logits are above it
//!                               64      `begin` (BEGIN)
//!                               65..67  the mass, low and high word (MASS)
//!                               67      the key of the greatest logit (BEST)
//! ```
//!
//! A pass has those of all rows, one row after the other.
//!
//! **Invariants.**
//! - Weights are integers, so that the sums are exact in any order. The sum of a slice is below
//!   2^62, and of all slices (512 at most) each word stays below 2^32: three words of 22 bits need
//!   no 64-bit atomics.
//! - Counters start as zeros. `begin` and the mass of pass 0 are 0 until it computes them: its
//!   range begins at key 0, and its last part counts all logits, so that pass 1 has the sum of
//!   all weights, of which top-p wants a share.
//! - What depends on top-p or top-k is compiled in only where they are on in some row; counters of
//!   the other are 0 and not read. A row without the one has a mass, or a `top_k`, which is never
//!   reached.

#![allow(unsafe_code)] // Launches.

use super::super::batch::word::ALL;
use super::config::{
    Draw, Parameters, SampleConfig, Sizes, all_sum, all_sum_wide, greatest_at, greatest_key, parameters_of,
    weight,
};
use crate::KernelError;
use crate::gpu::Memory;
use crate::gpu::compile::Target;
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{key, of_key};
use crate::gpu::launch::{Buffer, Kernel, kernel};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Parts of a pass's range.
const PARTS: usize = 16;
/// Keys have 32 bits, of which a pass finds 4.
const PASSES: usize = 8;
/// The word of a pass's counters that holds where its range begins.
const BEGIN: usize = 4 * PARTS;
/// The words that hold the mass.
const MASS: usize = BEGIN + 1;
/// The word that holds the key of the greatest logit.
const BEST: usize = BEGIN + 3;
/// Bytes from a row's counters to the next one's: every device can begin a buffer at multiples of
/// it.
const STRIDE: usize = 512;

/// The counters of a pass, which are a part of their memory.
pub(super) struct Counters {
    memory: Memory,
    start: usize,
}

impl Counters {
    pub fn buffer(&self) -> Buffer<'_> {
        Buffer::at(&self.memory, self.start)
    }
}

/// The first word of the counters of the cube's row.
#[cube]
fn counters_at() -> usize {
    CUBE_POS_Y as usize * comptime!(STRIDE / 4)
}

/// The sum of the weights above the last key of part `part`.
#[cube]
fn weight_above(counters: &[u32], part: usize) -> u64 {
    let at = counters_at() + part * 4;
    u64::cast_from(counters[at])
        + (u64::cast_from(counters[at + 1]) << 22u64)
        + (u64::cast_from(counters[at + 2]) << 44u64)
}

/// The mass that top-p wants: a share of all weights, whose sum pass 0 has for its last part. Later
/// passes hand it on. Without top-p none is enough.
#[cube]
fn wanted_mass(counters: &[u32], pass: u32, share: u32) -> u64 {
    let at = counters_at() + MASS;
    let mut mass = u64::cast_from(counters[at]) + (u64::cast_from(counters[at + 1]) << 32u64);
    if pass == 0u32 {
        let total = weight_above(counters, comptime!(PARTS - 1));
        let low = ((total & 0xffff_ffffu64) * u64::cast_from(share)) >> 32u64;
        mass = max((total >> 32u64) * u64::cast_from(share) + low, 1u64);
        mass = select(share == ALL, u64::MAX.runtime(), mass);
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
            below = below || counters[counters_at() + part * 4 + 3] >= top_k;
        }
        parts += select(below, 1u32, 0u32);
        part += comptime!(config.lanes);
    }
    all_sum(parts, config.lanes)
}

/// The key of the greatest logit of the cube's row, which the last pass's counters have if there
/// was a search.
#[cube]
pub(super) fn best_of_row(
    greatest: &[u32],
    counters: &[u32],
    slices: u32,
    of: &Parameters,
    #[comptime] config: SampleConfig,
) -> u32 {
    if comptime!(config.searches()) {
        let mut best = 0u32.runtime();
        if of.searches {
            best = counters[counters_at() + BEST];
        }
        if !of.searches {
            best = greatest_key(greatest, slices, config.lanes);
        }
        best
    } else {
        greatest_key(greatest, slices, config.lanes)
    }
}

/// The kept logits: those with keys above `threshold`; of those with the key itself all, or the
/// first `room` where they are `tied`.
#[derive(CubeType)]
pub(super) struct Limits {
    pub threshold: u32,
    pub tied: bool,
    pub room: u32,
}

/// The limits of all filters of the cube's row, from the key of its greatest logit and the last
/// pass's counters.
#[allow(clippy::collapsible_if)] // The outer one is decided when the kernel is compiled.
#[cube]
pub(super) fn limits(
    counters: &[u32],
    greatest: u32,
    of: &Parameters,
    #[comptime] config: SampleConfig,
) -> Limits {
    // Minus infinity where min-p is 0.
    let mut threshold = key(of_key(greatest) + f32::reinterpret(of.floor));
    let mut tied = false.runtime();
    let mut room = 0u32.runtime();
    if comptime!(config.searches()) {
        if of.searches {
            let mass = wanted_mass(counters, comptime!(PASSES as u32 - 1), 0u32);
            let parts = parts_below(counters, mass, of.top_k, config);
            let found = counters[counters_at() + BEGIN] + parts;
            if comptime!(config.top_k) {
                tied = found >= threshold;
                room = of.top_k - min(counters[counters_at() + parts as usize * 4 + 3], of.top_k);
            }
            threshold = max(threshold, found);
        }
    }
    Limits { threshold, tied, room }
}

/// Pass `pass` over a row's logits, one cube per slice. `last` are the counters of the pass before.
#[kernel]
pub(super) fn sample_narrow_threshold<X: Int>(
    logits: &[X],
    parameters: &[u32],
    greatest: &[u32],
    last: &[u32],
    counters: &mut [Atomic<u32>],
    sizes: Sizes,
    pass: u32,
    #[comptime] config: SampleConfig,
) {
    let of = parameters_of(parameters, CUBE_POS_Y);
    if !of.is_used || !of.searches {
        terminate!();
    }
    let bits = 28u32 - 4u32 * pass;
    let (mut begin, mut best, mut mass) = (0u32.runtime(), 0u32.runtime(), 0u64.runtime());
    if pass > 0u32 {
        if comptime!(config.top_p) {
            mass = wanted_mass(last, pass - 1u32, of.share);
        }
        let at = counters_at();
        begin = last[at + BEGIN] + (parts_below(last, mass, of.top_k, config) << (bits + 4u32));
        best = last[at + BEST];
    }
    if pass == 0u32 {
        best = greatest_key(greatest, sizes.slices, config.lanes);
    }
    if CUBE_POS_X == 0u32 && UNIT_POS_X == 0u32 {
        let at = counters_at();
        counters[at + BEGIN].store(begin);
        counters[at + MASS].store(u32::cast_from(mass));
        counters[at + comptime!(MASS + 1)].store(u32::cast_from(mass >> 32u64));
        counters[at + BEST].store(best);
    }
    // The last key of the first part.
    let floor = begin + (1u32 << bits) - 1u32;
    if pass > 0u32 && greatest[(greatest_at(sizes.slices) + CUBE_POS_X) as usize] <= floor {
        terminate!();
    }
    let mut sums = Array::<u64>::new(PARTS);
    let mut above = Array::<u32>::new(PARTS);
    #[unroll]
    for part in 0..PARTS {
        sums[part] = 0u64;
        above[part] = 0u32;
    }
    let row = CUBE_POS_Y * sizes.len;
    let mut i = CUBE_POS_X * sizes.slice + UNIT_POS_X;
    let end = min((CUBE_POS_X + 1) * sizes.slice, sizes.len);
    while i < end {
        let logit = read(logits, (row + i) as usize, config.dtype);
        let key = key(logit);
        if pass == 0u32 || key > floor {
            let mut own = 0u64.runtime();
            if comptime!(config.top_p) {
                own = weight(logit, of_key(best), 1.0f32.runtime());
            }
            #[unroll]
            for part in 0..PARTS {
                // Nothing is above the last part of pass 0, which counts all instead.
                let last = begin + (comptime!(part as u32 + 1).runtime() << bits) - 1u32;
                let is_above = key > last || (comptime!(part == PARTS - 1) && pass == 0u32);
                if comptime!(config.top_p) {
                    sums[part] += select(is_above, own, 0u64.runtime());
                }
                if comptime!(config.top_k) {
                    above[part] += select(is_above, 1u32, 0u32);
                }
            }
        }
        i += comptime!(config.lanes as u32);
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
        let at = counters_at() + place * comptime!(config.lanes) + UNIT_POS_X as usize;
        counters[at].fetch_add(mine[place]);
    }
}

pub(super) fn compiled(target: &Target, config: SampleConfig) -> Kernel<SampleNarrowThreshold<'static>> {
    with_storage!(config.dtype, X => SampleNarrowThreshold::kernel::<X>(target, config.lanes, config))
}

impl Draw<'_> {
    /// Searches the thresholds. Gives the last pass's counters, or a placeholder where neither
    /// top-p nor top-k is on.
    pub(super) fn search(&self) -> Result<Counters, KernelError> {
        if !self.config.searches() {
            return Ok(Counters { memory: self.greatest.clone(), start: 0 });
        }
        let of_pass = STRIDE * self.rows;
        let counters = self.gpu.filled(of_pass * PASSES, 0)?;
        for pass in 0..PASSES {
            let arguments = SampleNarrowThreshold {
                logits: self.logits.buffer()?,
                parameters: self.batch.tensors()[4].buffer()?,
                greatest: (&self.greatest).into(),
                last: Buffer::at(&counters, pass.saturating_sub(1) * of_pass),
                counters: Buffer::at(&counters, pass * of_pass),
                sizes: self.sizes,
                pass: pass as u32,
            };
            // SAFETY: the slices end with a row's logits, and each has two words in `greatest`;
            // counters are STRIDE bytes per row and pass; the batch has the rows.
            unsafe { self.gpu.launch(compiled(self.gpu.target(), self.config), self.cubes(), arguments)? };
        }
        Ok(Counters { memory: counters, start: (PASSES - 1) * of_pass })
    }
}
