//! Brings tiles of keys and values to shared memory: a group of planes copies, two tiles of each
//! have room, and barriers say which tile has arrived and which has been read.

use super::super::rows::place;
use super::config::{BARRIER, COPYING, MULTIPLYING, STAGES, WgmmaConfig};
use crate::gpu::cuda::ptx::{
    arrive_once, arrive_with_copies, barrier, copy_from, pointer, register, wait, wait_copies,
};
use crate::ops::attention::gpu::operands::{Inputs, VisibleKeys};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The cube's tiles, in the order in which it takes them: those that some rows do not wholly see,
/// from both ends of the keys, and then the others.
#[derive(CubeType)]
pub(super) struct Tiles {
    begin: u32,
    pub end: u32,
    pub count: u32,
    /// The number of them that come from the end.
    upper: u32,
    /// The number of tiles that some rows do not wholly see.
    pub masked: u32,
}

#[cube]
pub(super) fn tiles(visible: &VisibleKeys, #[comptime] config: WgmmaConfig) -> Tiles {
    let keys = comptime!(config.keys as u32);
    let (begin, end) = (visible.begin, visible.end);
    let count = (end - begin).div_ceil(keys);
    // Tiles from `lower` to `upper` are wholly seen.
    let mut lower = (max(visible.all_begin, begin) - begin).div_ceil(keys);
    let mut upper = (max(min(visible.all_end, end), begin) - begin) / keys;
    if upper <= lower {
        lower = 0u32;
        upper = 0u32;
    }
    Tiles { begin, end, count, upper: count - upper, masked: count - (upper - lower) }
}

#[cube]
impl Tiles {
    /// The first key of the `i`-th tile.
    pub fn first(&self, i: u32, #[comptime] config: WgmmaConfig) -> u32 {
        let tile = select(i < self.upper, self.count - 1u32 - i, i - self.upper);
        self.begin + tile * comptime!(config.keys as u32)
    }
}

/// The addresses of tiles and barriers.
#[derive(CubeType)]
pub(super) struct Pipe {
    memory: u32,
    /// The row of the head's first key.
    base: u32,
}

/// The operand that a tile is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Of {
    Keys,
    Values,
}

impl Of {
    fn width(self, config: WgmmaConfig) -> usize {
        if self == Of::Keys { config.width } else { config.value_width }
    }

    /// Bytes of a tile.
    fn tile(self, config: WgmmaConfig) -> usize {
        2 * config.keys * self.width(config)
    }

    /// Bytes before its tiles.
    fn tiles(self, config: WgmmaConfig) -> usize {
        config.queries() + if self == Of::Keys { 0 } else { STAGES * config.k_tile() }
    }

    /// Bytes before the barriers that say that its tiles are there; those that they were read come
    /// behind.
    fn barriers(self, config: WgmmaConfig) -> usize {
        config.tiles_end() + if self == Of::Keys { 0 } else { 2 * STAGES * BARRIER }
    }
}

/// At `memory`. All units must meet before they use it.
#[cube]
pub(super) fn open(memory: u32, base: u32, #[comptime] config: WgmmaConfig) -> Pipe {
    if UNIT_POS_X == 0u32 {
        #[unroll]
        for i in 0..comptime!(2 * STAGES) {
            let of = comptime!(if i < STAGES { Of::Keys } else { Of::Values });
            let at = memory + comptime!((of.barriers(config) + i % STAGES * BARRIER) as u32);
            barrier(at, COPYING);
            barrier(at + comptime!((STAGES * BARRIER) as u32), comptime!(MULTIPLYING / 32));
        }
    }
    Pipe { memory, base }
}

#[cube]
impl Pipe {
    /// The address of the `i`-th tile.
    pub fn tile(&self, i: u32, #[comptime] of: Of, #[comptime] config: WgmmaConfig) -> u32 {
        self.memory
            + comptime!(of.tiles(config) as u32)
            + i % comptime!(STAGES as u32) * comptime!(of.tile(config) as u32)
    }

    /// The barrier of the `i`-th tile.
    fn barrier(&self, i: u32, #[comptime] of: Of, #[comptime] config: WgmmaConfig) -> u32 {
        register(
            self.memory
                + comptime!(of.barriers(config) as u32)
                + i % comptime!(STAGES as u32) * comptime!(BARRIER as u32),
        )
    }

    /// Waits until the `i`-th tile is there. Products that read it need
    /// [`show_writes`](crate::gpu::cuda::ptx::show_writes).
    pub fn wait(&self, i: u32, #[comptime] of: Of, #[comptime] config: WgmmaConfig) {
        wait(self.barrier(i, of, config), i / comptime!(STAGES as u32) % 2u32);
    }

    /// This plane has read the `i`-th tile.
    pub fn release(&self, i: u32, #[comptime] of: Of, #[comptime] config: WgmmaConfig) {
        arrive_once(self.barrier(i, of, config) + comptime!((STAGES * BARRIER) as u32));
    }

    /// Begins to copy the `i`-th tile of `x`, when all planes have read what it replaces. For keys
    /// past the end it copies the last one, unless the tile is `whole`.
    fn copy(
        &self,
        x: &[Vector<u32, Const<4>>],
        tiles: &Tiles,
        i: u32,
        #[comptime] of: Of,
        #[comptime] whole: bool,
        #[comptime] config: WgmmaConfig,
    ) {
        let stages = comptime!(STAGES as u32);
        if i >= stages {
            let read = self.barrier(i, of, config) + comptime!((STAGES * BARRIER) as u32);
            wait(register(read), (i / stages - 1u32) % 2u32);
        }
        let width = comptime!(of.width(config));
        let vectors = comptime!(width / 8);
        let unit = UNIT_POS_X % comptime!(COPYING as u32);
        let (row, column) = (unit / comptime!(vectors as u32), unit % comptime!(vectors as u32));
        // Rows that all units copy at once, a vector each, and how many times until vectors are
        // swizzled as at first.
        let pass = comptime!(COPYING / vectors);
        let turns = comptime!(8usize.div_ceil(pass));
        let mut to = Array::<u32>::new(turns);
        #[unroll]
        for turn in 0..turns {
            let at = place(row + comptime!((turn * pass) as u32), column, config.layout());
            to[turn] = register(self.tile(i, of, config) + at);
        }
        let first = self.base + tiles.first(i, config) + row;
        let last = self.base + tiles.end - 1u32;
        let mut from = pointer(x, first * comptime!(vectors as u32) + column, 4usize);
        #[unroll]
        for n in 0..comptime!(config.keys / pass) {
            let to_offset = comptime!(n / turns * turns * pass * 128);
            if comptime!(whole) {
                copy_from(from, comptime!(n * pass * vectors), to[comptime!(n % turns)], to_offset);
            } else {
                let key = min(first + comptime!((n * pass) as u32), last);
                from = pointer(x, key * comptime!(vectors as u32) + column, 4usize);
                copy_from(from, 0usize, to[comptime!(n % turns)], to_offset);
            }
        }
        arrive_with_copies(self.barrier(i, of, config));
    }
}

/// Copies all of the cube's tiles.
#[cube]
pub(super) fn copy_tiles(
    inputs: &Inputs<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
    pipe: &Pipe,
    tiles: &Tiles,
    #[comptime] config: WgmmaConfig,
) {
    let mut i = 0u32.runtime();
    while i < tiles.masked {
        pipe.copy(&inputs.k, tiles, i, Of::Keys, false, config);
        pipe.copy(&inputs.v, tiles, i, Of::Values, false, config);
        i += 1u32;
    }
    while i < tiles.count {
        pipe.copy(&inputs.k, tiles, i, Of::Keys, true, config);
        pipe.copy(&inputs.v, tiles, i, Of::Values, true, config);
        i += 1u32;
    }
    wait_copies();
}
