//! Blocks of x on their way to shared memory: bulk copies fill a ring of stages, and planes say
//! when they have read one.

use super::config::{UNITS, Wgmma};
use crate::gpu::cuda::ptx::{arrive_once, barrier, publish, register, wait, wgmma};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The ring of a part of K.
#[derive(CubeType)]
pub(super) struct Pipe {
    /// The addresses of the stages in shared memory, and of two barriers for each: that a block has
    /// come, and that all planes have read it.
    stages: u32,
    barriers: u32,
    /// The first block of x of the tile, in vectors, and how many there are.
    from: u32,
    pub blocks: u32,
    /// True if this plane copies.
    leads: bool,
    /// The stage that is read next, and the parity of how often it was filled.
    stage: u32,
    phase: u32,
}

/// The ring of part `part` at `memory`, with those of the others, for tile `tile` of x. All units
/// of the cube meet.
#[cube]
pub(super) fn ring(memory: u32, part: u32, tile: u32, blocks: u32, #[comptime] config: Wgmma) -> Pipe {
    let barriers = memory + comptime!((config.parts * config.stages * config.block()) as u32);
    if UNIT_POS_X == 0u32 {
        #[unroll]
        for stage in 0..comptime!(config.parts * config.stages) {
            barrier(barriers + comptime!(stage as u32 * 16), 1usize);
            barrier(barriers + comptime!(stage as u32 * 16 + 8), comptime!(UNITS / 32));
        }
        publish();
    }
    sync_cube();
    Pipe {
        stages: memory + part * comptime!((config.stages * config.block()) as u32),
        barriers: barriers + part * comptime!(config.stages as u32 * 16),
        from: tile * blocks * comptime!(config.block() as u32 / 16),
        blocks,
        leads: UNIT_POS_X % UNITS as u32 / 32u32 == 0u32,
        stage: 0u32.runtime(),
        phase: 0u32.runtime(),
    }
}

#[cube]
impl Pipe {
    /// Begins to copy the first blocks of part `part`.
    pub fn begin(&self, x: &[Vector<u32, Const<4>>], part: u32, #[comptime] config: Wgmma) {
        if self.leads {
            #[unroll]
            for stage in 0..comptime!(config.stages) {
                let block = part + comptime!((stage * config.parts) as u32);
                if block < self.blocks {
                    self.copy(x, block, comptime!(stage as u32).runtime(), config);
                }
            }
        }
    }

    fn copy(&self, x: &[Vector<u32, Const<4>>], block: u32, stage: u32, #[comptime] config: Wgmma) {
        wgmma::copy(
            x,
            self.from + block * comptime!(config.block() as u32 / 16),
            self.stages + stage * comptime!(config.block() as u32),
            self.barriers + stage * 16u32,
            comptime!(config.block()),
        );
    }

    /// Waits for the next block, and says where it lies.
    pub fn wait(&self, #[comptime] config: Wgmma) -> u32 {
        wait(register(self.barriers + self.stage * 16u32), self.phase);
        self.stages + self.stage * comptime!(config.block() as u32)
    }

    /// The block that was waited for is the next no longer.
    pub fn advance(&mut self, #[comptime] config: Wgmma) {
        self.stage += 1u32;
        if self.stage == comptime!(config.stages as u32) {
            self.stage = 0u32;
            self.phase ^= 1u32;
        }
    }

    /// This plane has read the part's block before `block`, the next: when all have, another takes
    /// its place.
    pub fn release(&self, x: &[Vector<u32, Const<4>>], block: u32, #[comptime] config: Wgmma) {
        let parts = comptime!(config.parts as u32);
        let last = comptime!(config.stages as u32 - 1);
        if block >= parts {
            let wraps = self.stage == 0u32;
            let stage = select(wraps, last, self.stage - 1u32);
            let read = self.barriers + stage * 16u32 + 8u32;
            arrive_once(read);
            let next = block + last * parts;
            if self.leads && next < self.blocks {
                wait(register(read), select(wraps, self.phase ^ 1u32, self.phase));
                self.copy(x, next, stage, config);
            }
        }
    }
}
