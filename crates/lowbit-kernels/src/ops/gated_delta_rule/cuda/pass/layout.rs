//! The layout of a cube's shared memory.

use super::super::config::{CHUNK, COLUMNS, ChunkConfig, GATES, PLANES};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Offsets and sizes in bytes. First come the stages of state planes: keys, `T`, values and gates.
/// Then those of output planes: queries, `P` and the first half of the gates. Then, twice for each
/// state plane, what it hands over to its output plane: the state before a chunk, and `delta`.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedLayout {
    pub transform: usize,
    pub values: usize,
    pub key_gates: usize,
    key_stage: usize,
    pub pairs: usize,
    pub query_gates: usize,
    query_stage: usize,
    pub delta: usize,
    handover: usize,
    stages: usize,
}

impl SharedLayout {
    pub fn of(config: ChunkConfig) -> Self {
        let (tile, square) = (CHUNK * config.key_dim * 2, CHUNK * CHUNK * 2);
        let values = tile + square;
        let key_gates = values + CHUNK * COLUMNS * 2;
        let query_gates = tile + square;
        let delta = 32 * config.key_dim;
        Self {
            transform: tile,
            values,
            key_gates,
            key_stage: key_gates + GATES * 4,
            pairs: tile,
            query_gates,
            query_stage: query_gates + GATES * 2,
            delta,
            handover: delta + 32 * CHUNK,
            stages: config.stages,
        }
    }

    pub fn size(self) -> usize {
        self.stages * (self.key_stage + self.query_stage) + 2 * PLANES * self.handover
    }
}

/// The address of a chunk's keys and what comes with them.
#[cube]
pub(super) fn key_stage(base: u32, chunk: usize, #[comptime] config: ChunkConfig) -> u32 {
    base + (chunk % config.stages * comptime!(SharedLayout::of(config).key_stage)) as u32
}

/// The address of a chunk's queries and what comes with them.
#[cube]
pub(super) fn query_stage(base: u32, chunk: usize, #[comptime] config: ChunkConfig) -> u32 {
    let first = comptime!((config.stages * SharedLayout::of(config).key_stage) as u32);
    base + first + (chunk % config.stages * comptime!(SharedLayout::of(config).query_stage)) as u32
}

/// The address at which a unit of a state plane leaves its words for the same unit of its output
/// plane.
#[cube]
pub(super) fn handover(base: u32, chunk: usize, #[comptime] config: ChunkConfig) -> u32 {
    let layout = comptime!(SharedLayout::of(config));
    let first = comptime!((config.stages * (layout.key_stage + layout.query_stage)) as u32);
    let which = chunk % 2usize * PLANES + plane();
    base + first + (which * comptime!(layout.handover)) as u32 + UNIT_POS_X % 32u32 * 16u32
}

/// A state or output plane's number among those of its role.
#[cube]
pub(super) fn plane() -> usize {
    UNIT_POS_X as usize / 32usize % PLANES
}
