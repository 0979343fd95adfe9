//! The pairs of a token and an expert, sorted by expert by each cube for itself, into chunks of as
//! many rows as a cube takes at a time. Ids are a few kilobytes: a launch that sorts them, and that
//! the product waits for, takes longer.

use super::{Sizes, StreamExperts};
use crate::gpu::compile::overlap;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Shared memory that holds the sorted pairs.
#[derive(CubeType)]
pub(super) struct Chunks {
    /// The pairs of each expert, and behind them those whose id is none: counted, then counted
    /// down as pairs find their places.
    counts: Shared<[Atomic<u32>]>,
    /// The first place of each expert's pairs, and the end of all.
    starts: Shared<[u32]>,
    /// Each pair, by its place: its number, and its row of x in the upper half.
    pub pairs: Shared<[u32]>,
    /// The place of each chunk's first pair, and its expert in the upper half.
    chunks: Shared<[u32]>,
    /// The number of chunks.
    pub count: Shared<[u32]>,
    /// The pairs and chunks of each plane's experts.
    planes: Shared<[u32]>,
}

/// Pairs of one expert.
#[derive(CubeType)]
pub(super) struct Chunk {
    /// The number of experts if their id is none.
    pub expert: u32,
    /// The place of the first.
    pub first: u32,
    pub count: u32,
}

/// The most chunks of `m_tile` pairs.
fn most_chunks(experts: usize, pairs: usize, m_tile: usize) -> usize {
    pairs / m_tile + pairs.min(experts + 1)
}

/// Bytes of shared memory that [`Chunks`] take.
pub(super) fn bytes(experts: usize, pairs: usize, m_tile: usize) -> usize {
    // Each of the six begins at a whole vector.
    4 * (2 * (experts + 1) + 1 + pairs + most_chunks(experts, pairs, m_tile) + 1 + 32) + 6 * 16
}

/// Planes of a cube, 32 at the most.
fn planes(config: StreamExperts) -> usize {
    config.rows.units() / 32
}

#[cube]
impl Chunks {
    pub fn new(#[comptime] config: StreamExperts) -> Chunks {
        let most = comptime!(most_chunks(config.experts, config.pairs, config.rows.m_tile()));
        Chunks {
            counts: Shared::<[Atomic<u32>]>::new_slice(comptime!(config.experts + 1)),
            starts: Shared::<[u32]>::new_slice(comptime!(config.experts + 2)),
            pairs: Shared::<[u32]>::new_slice(config.pairs),
            chunks: Shared::<[u32]>::new_slice(most),
            count: Shared::<[u32]>::new_slice(1usize),
            planes: Shared::<[u32]>::new_slice(comptime!(planes(config))),
        }
    }

    /// The `chunk`-th chunk.
    pub fn at(&self, chunk: u32, #[comptime] config: StreamExperts) -> Chunk {
        let word = self.chunks[chunk as usize];
        let (expert, first) = (word >> 16u32, word & 0xffffu32);
        let end = self.starts[expert as usize + 1];
        Chunk { expert, first, count: min(end - first, comptime!(config.rows.m_tile() as u32)) }
    }
}

/// Sorts the pairs. All units of the cube do it, and then all find them; before they read the ids
/// they wait for the last launch.
#[cube]
pub(super) fn sort(ids: &[u32], sizes: &Sizes, to: &mut Chunks, #[comptime] config: StreamExperts) {
    let units = comptime!(config.rows.units() as u32);
    let (experts, m_tile) = comptime!((config.experts as u32, config.rows.m_tile() as u32));
    // Pairs of a unit.
    let together = comptime!(config.pairs.div_ceil(config.rows.units()));
    let mut i = UNIT_POS_X;
    while i <= experts {
        to.counts[i as usize].store(0u32);
        i += units;
    }
    sync_cube();
    overlap();
    let mut chosen = Array::<u32>::new(together);
    #[unroll]
    for i in 0..together {
        let pair = UNIT_POS_X + comptime!(i as u32 * units);
        chosen[i] = min(ids[min(pair, sizes.pairs - 1u32) as usize], experts);
    }
    #[unroll]
    for i in 0..together {
        if UNIT_POS_X + comptime!(i as u32 * units) < sizes.pairs {
            to.counts[chosen[i] as usize].fetch_add(1u32);
        }
    }
    sync_cube();
    place_experts(to, config);
    sync_cube();
    #[unroll]
    for i in 0..together {
        let pair = UNIT_POS_X + comptime!(i as u32 * units);
        if pair < sizes.pairs {
            let expert = chosen[i] as usize;
            let place = to.starts[expert] + to.counts[expert].fetch_sub(1u32) - 1u32;
            to.pairs[place as usize] = word(pair, sizes);
        }
    }
    sync_cube();
    // All cubes must have the same chunks of an expert that has several: its pairs in order.
    let mut places = Array::<u32>::new(together);
    #[unroll]
    for i in 0..together {
        let pair = UNIT_POS_X + comptime!(i as u32 * units);
        places[i] = u32::MAX.runtime();
        if pair < sizes.pairs {
            let (start, end) = (to.starts[chosen[i] as usize], to.starts[chosen[i] as usize + 1]);
            if end - start > m_tile {
                let own = word(pair, sizes);
                let mut place = start;
                for at in start..end {
                    if to.pairs[at as usize] < own {
                        place += 1u32;
                    }
                }
                places[i] = place;
            }
        }
    }
    sync_cube();
    #[unroll]
    for i in 0..together {
        if places[i] < u32::MAX {
            to.pairs[places[i] as usize] = word(UNIT_POS_X + comptime!(i as u32 * units), sizes);
        }
    }
    sync_cube();
}

/// A pair's number, and its row of x in the upper half.
#[cube]
fn word(pair: u32, sizes: &Sizes) -> u32 {
    ((pair / sizes.share) << 16u32) | pair
}

/// Gives each expert the places of its pairs, and its chunks. Each unit has some experts.
#[cube]
fn place_experts(to: &mut Chunks, #[comptime] config: StreamExperts) {
    let (experts, m_tile) = comptime!((config.experts as u32, config.rows.m_tile() as u32));
    let (units, planes) = comptime!((config.rows.units() as u32, planes(config)));
    let each = comptime!((config.experts as u32 + 1).div_ceil(units));
    let first = UNIT_POS_X * each;
    let end = min(first + each, comptime!(experts + 1));
    // Pairs, and chunks in the upper half.
    let mut own = 0u32;
    let mut expert = first;
    while expert < end {
        let count = to.counts[expert as usize].load();
        own += count | (count.div_ceil(m_tile) << 16u32);
        expert += 1u32;
    }
    let mut before = plane_exclusive_sum(own);
    let plane = UNIT_POS_X / 32u32;
    if UNIT_POS_X % 32u32 == 31u32 {
        to.planes[plane as usize] = before + own;
    }
    sync_cube();
    #[unroll]
    for i in 0..planes {
        let of_plane = to.planes[i];
        before += select(plane > comptime!(i as u32), of_plane, 0u32);
    }
    let mut start = before & 0xffffu32;
    let mut chunk = before >> 16u32;
    expert = first;
    while expert < end {
        to.starts[expert as usize] = start;
        let next = start + to.counts[expert as usize].load();
        while start < next {
            to.chunks[chunk as usize] = (expert << 16u32) | start;
            chunk += 1u32;
            start += m_tile;
        }
        start = next;
        expert += 1u32;
    }
    if UNIT_POS_X == comptime!(units - 1) {
        to.starts[comptime!(config.experts + 1)] = start;
        to.count[0usize] = chunk;
    }
}
