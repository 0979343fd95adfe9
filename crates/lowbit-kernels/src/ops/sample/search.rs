//! The filters on a GPU: which logits are kept, and what they weigh.
//!
//! A key is *enough* when fewer than `top_k` keys are greater, and these have less than `top_p` of the probability. The
//! least key that is enough is found four bits at a time, from the highest: the cubes count and weigh what is above
//! each of 15 keys, and the next launch adds up the blocks' figures. (With a sort all logits would move several times.)

use super::SampleParams;
use super::gpu::{BLOCKS, Prepared, greatest, units};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::key::{key, of_key};
use crate::gpu::{Dispatch, Gpu};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

/// Keys that a launch looks at.
const DIGITS: usize = 16;
/// Launches: 32 bits, four at a time.
const ROUNDS: usize = 8;
/// Stands for no limit.
const ALL: u32 = u32::MAX;

/// What passes the filters, by block.
pub(super) struct Kept {
    /// f32 `[2, BLOCKS]`: the weights above the threshold; what one at the threshold weighs.
    pub weights: Tensor,
    /// u32 `[2, BLOCKS]`: how many are above the threshold, and how many at it; then the threshold's key.
    pub counts: Tensor,
}

/// The sum over all blocks of `column` of `figures`, `[BLOCKS, DIGITS]`.
#[cube]
fn count_all(figures: &[u32], column: usize) -> u32 {
    let mut sum = 0u32;
    let mut i = UNIT_POS_X as usize;
    while i < BLOCKS {
        sum += figures[i * DIGITS + column];
        i += CUBE_DIM_X as usize;
    }
    plane_sum(sum)
}

/// As [`count_all`].
#[cube]
fn weigh_all(figures: &[f32], column: usize) -> f32 {
    let mut sum = 0.0f32;
    let mut i = UNIT_POS_X as usize;
    while i < BLOCKS {
        sum += figures[i * DIGITS + column];
        i += CUBE_DIM_X as usize;
    }
    plane_sum(sum)
}

/// The greatest key found not to be enough: `before` with the digit that the last round's figures give.
#[cube]
fn refined(
    counts: &[u32],
    masses: &[f32],
    before: u32,
    top_k: u32,
    top_p: f32,
    #[comptime] shift: u32,
) -> u32 {
    // Column 0 has the figures of everything.
    let mass = top_p * weigh_all(masses, 0usize);
    let mut digit = 0u32;
    #[unroll]
    for d in 1..DIGITS {
        let many = count_all(counts, d) >= top_k;
        let much = weigh_all(masses, d) >= mass;
        if many || much {
            digit = comptime!(d as u32);
        }
    }
    before | (digit << shift)
}

/// Counts and weighs what is above each of the keys that round `round` looks at.
#[cube(launch_unchecked)]
fn weigh(
    logits: &[f32],
    keys: &[u32],
    last_counts: &[u32],
    last_masses: &[f32],
    counts: &mut [u32],
    masses: &mut [f32],
    found: &mut [u32],
    len: u32,
    block: u32,
    top_k: u32,
    top_p: u32,
    #[comptime] round: usize,
) {
    let top_p = f32::reinterpret(top_p);
    let shift = comptime!(28 - 4 * round as u32);
    let mut base = 0u32;
    if comptime!(round > 0) {
        let before = found[comptime!(round - 1)];
        base = refined(last_counts, last_masses, before, top_k, top_p, comptime!(shift + 4));
    }
    if CUBE_POS_X == 0 && UNIT_POS_X == 0 {
        found[round] = base;
    }
    let most = of_key(greatest(keys));
    let mut count = Array::<u32>::new(DIGITS);
    let mut mass = Array::<f32>::new(DIGITS);
    #[unroll]
    for d in 0..DIGITS {
        count[d] = 0u32;
        mass[d] = 0.0f32;
    }
    let end = min((CUBE_POS_X + 1u32) * block, len);
    let mut i = CUBE_POS_X * block + UNIT_POS_X;
    while i < end {
        let x = logits[i as usize];
        let own = key(x);
        let weight = (x - most).exp();
        mass[0] += weight;
        #[unroll]
        for d in 1..DIGITS {
            if own > base | comptime!((d as u32) << shift) {
                count[d] += 1u32;
                mass[d] += weight;
            }
        }
        i += CUBE_DIM_X;
    }
    #[unroll]
    for d in 0..DIGITS {
        let (count, mass) = (plane_sum(count[d]), plane_sum(mass[d]));
        if UNIT_POS_X == 0 {
            counts[CUBE_POS_X as usize * DIGITS + d] = count;
            masses[CUBE_POS_X as usize * DIGITS + d] = mass;
        }
    }
}

/// What each block keeps, and what that weighs at the temperature.
#[cube(launch_unchecked)]
fn keep(
    logits: &[f32],
    keys: &[u32],
    last_counts: &[u32],
    last_masses: &[f32],
    found: &[u32],
    weights: &mut [f32],
    counts: &mut [u32],
    len: u32,
    block: u32,
    top_k: u32,
    top_p: u32,
    floor: u32,
    temperature: u32,
    #[comptime] searched: bool,
) {
    let most = of_key(greatest(keys));
    // min-p: the floor is how far below the greatest a logit may be.
    let mut threshold = key(most + f32::reinterpret(floor));
    if comptime!(searched) {
        let before = found[comptime!(ROUNDS - 1)];
        let less = refined(last_counts, last_masses, before, top_k, f32::reinterpret(top_p), 0u32);
        threshold = max(threshold, less + 1u32);
    }
    let temperature = f32::reinterpret(temperature);
    let mut weight = 0.0f32;
    let mut above = 0u32;
    let mut level = 0u32;
    let end = min((CUBE_POS_X + 1u32) * block, len);
    let mut i = CUBE_POS_X * block + UNIT_POS_X;
    while i < end {
        let x = logits[i as usize];
        let own = key(x);
        if own > threshold {
            weight += ((x - most) / temperature).exp();
            above += 1u32;
        }
        if own == threshold {
            level += 1u32;
        }
        i += CUBE_DIM_X;
    }
    let (weight, above, level) = (plane_sum(weight), plane_sum(above), plane_sum(level));
    if UNIT_POS_X == 0 {
        let place = CUBE_POS_X as usize;
        weights[place] = weight;
        counts[place] = above;
        counts[BLOCKS + place] = level;
        if place == 0 {
            weights[BLOCKS] = ((of_key(threshold) - most) / temperature).exp();
            counts[comptime!(2 * BLOCKS)] = threshold;
        }
    }
}

/// The id at `uniform` of the way through the weights of all that is kept, in the order of ids.
#[cube]
pub(super) fn draw(
    logits: &[f32],
    weights: &[f32],
    counts: &[u32],
    scale: (f32, f32),
    uniform: f32,
    len: u32,
    block: u32,
    top_k: u32,
) -> u32 {
    let (most, temperature) = scale;
    let threshold = counts[comptime!(2 * BLOCKS)];
    let level_weight = weights[BLOCKS];
    let mut above = 0u32;
    let mut level = 0u32;
    let mut total = 0.0f32;
    for place in 0..BLOCKS {
        above += counts[place];
        level += counts[BLOCKS + place];
        total += weights[place];
    }
    // Of those at the threshold the lowest ids.
    let allowed = min(level, top_k - min(above, top_k));
    let mut left = uniform * (total + f32::cast_from(allowed) * level_weight);

    // The block that it falls into, or the last one that weighs anything.
    let mut ties = allowed;
    let mut chosen = 0u32;
    let mut chosen_ties = 0u32;
    let mut chosen_left = 0.0f32;
    let mut open = true;
    for place in 0..BLOCKS {
        let own = min(ties, counts[BLOCKS + place]);
        let weight = weights[place] + f32::cast_from(own) * level_weight;
        if open && weight > 0.0f32 {
            chosen = place as u32;
            chosen_ties = ties;
            chosen_left = left;
            open = left >= weight;
            left -= weight;
        }
        ties -= own;
    }

    let end = min((chosen + 1u32) * block, len);
    let mut id = 0xffff_ffffu32.runtime();
    let mut last = 0u32;
    let mut start = chosen * block;
    while start < end && id == 0xffff_ffffu32 {
        let i = start + UNIT_POS_X;
        let mut weight = 0.0f32;
        let mut tie = 0u32;
        if i < end {
            let own = key(logits[i as usize]);
            if own > threshold {
                weight = ((logits[i as usize] - most) / temperature).exp();
            }
            if own == threshold {
                tie = 1u32;
            }
        }
        if tie == 1u32 && plane_exclusive_sum(tie) < chosen_ties {
            weight = level_weight;
        }
        chosen_ties -= min(chosen_ties, plane_sum(tie));
        let passed = plane_inclusive_sum(weight);
        let here = select(weight > 0.0f32 && passed > chosen_left, i, 0xffff_ffffu32.runtime());
        id = plane_min(here);
        last = max(last, plane_max(select(weight > 0.0f32, i + 1u32, 0u32)));
        chosen_left -= plane_sum(weight);
        start += CUBE_DIM_X;
    }
    // Rounding may leave a rest: it belongs to the last one that can be drawn.
    select(id == 0xffff_ffffu32, last - 1u32, id)
}

fn weigh_kernel(target: &Target, round: usize) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(units(target));
    let [logits, keys, last_counts, last_masses] = [buffer(), buffer(), buffer(), buffer()];
    let [counts, masses, found] = [buffer(), buffer(), buffer()];
    Box::new(weigh::Weigh::new(
        settings,
        properties,
        registers,
        logits,
        keys,
        last_counts,
        last_masses,
        counts,
        masses,
        found,
        (),
        (),
        (),
        (),
        round,
    ))
}

fn keep_kernel(target: &Target, searched: bool) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(units(target));
    let [logits, keys, last_counts, last_masses] = [buffer(), buffer(), buffer(), buffer()];
    let [found, weights, counts] = [buffer(), buffer(), buffer()];
    Box::new(keep::Keep::new(
        settings,
        properties,
        registers,
        logits,
        keys,
        last_counts,
        last_masses,
        found,
        weights,
        counts,
        (),
        (),
        (),
        (),
        (),
        (),
        searched,
    ))
}

/// Every kernel here.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let rounds = (0..ROUNDS).map(|round| weigh_kernel(target, round));
    rounds.chain([false, true].map(|searched| keep_kernel(target, searched))).collect()
}

/// How many top-k keeps.
pub(super) fn top_k(params: &SampleParams, len: u32) -> u32 {
    match params.top_k {
        0 => ALL,
        k if k >= len as usize => ALL,
        k => k as u32,
    }
}

/// Records the filters' launches.
pub(super) fn search(gpu: &Gpu, prepared: &Prepared, params: &SampleParams) -> Result<Kept, KernelError> {
    let Prepared { logits, keys, len, block } = prepared;
    let device = logits.device();
    let new = |shape: &[usize], dtype| Tensor::allocate(shape, dtype, device);
    let top_k = top_k(params, *len);
    let searched = params.top_p < 1.0 || top_k != ALL;
    // Without top-p no sum is as large as this.
    let top_p = if params.top_p < 1.0 { params.top_p } else { f32::INFINITY };
    let figures = || -> Result<_, KernelError> {
        Ok((new(&[BLOCKS, DIGITS], DType::U32)?, new(&[BLOCKS, DIGITS], DType::F32)?))
    };
    let (mut last, mut next, found) = (figures()?, figures()?, new(&[ROUNDS], DType::U32)?);
    for round in 0..if searched { ROUNDS } else { 0 } {
        gpu.launch(Dispatch {
            kernel: weigh_kernel(gpu.target(), round),
            cubes: [BLOCKS as u32, 1, 1],
            buffers: vec![
                logits.memory()?,
                keys.memory()?,
                last.0.memory()?,
                last.1.memory()?,
                next.0.memory()?,
                next.1.memory()?,
                found.memory()?,
            ],
            scalars: vec![*len, *block, top_k, top_p.to_bits()],
        })?;
        std::mem::swap(&mut last, &mut next);
    }
    let floor = if params.min_p > 0.0 { params.min_p.ln() } else { f32::NEG_INFINITY };
    let kept = Kept { weights: new(&[BLOCKS + 1], DType::F32)?, counts: new(&[2 * BLOCKS + 1], DType::U32)? };
    gpu.launch(Dispatch {
        kernel: keep_kernel(gpu.target(), searched),
        cubes: [BLOCKS as u32, 1, 1],
        buffers: vec![
            logits.memory()?,
            keys.memory()?,
            last.0.memory()?,
            last.1.memory()?,
            found.memory()?,
            kept.weights.memory()?,
            kept.counts.memory()?,
        ],
        scalars: vec![*len, *block, top_k, top_p.to_bits(), floor.to_bits(), params.temperature.to_bits()],
    })?;
    Ok(kept)
}
