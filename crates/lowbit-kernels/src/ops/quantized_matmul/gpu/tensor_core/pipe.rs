//! How blocks of x come to shared memory: bulk copies fill a ring of stages, and planes say when they have read one.

use super::super::ptx;
use super::{BLOCK, Shape, UNITS};
use crate::gpu::ptx::{arrive_once, barrier, publish, register, wait};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The ring of a part of K.
#[derive(CubeType)]
pub(super) struct Pipe {
    /// Where the stages lie in shared memory, and two barriers for each: that a block has come, and that all planes have
    /// read it.
    stages: u32,
    barriers: u32,
    /// The first block of x of the tile, in vectors, and how many there are.
    from: u32,
    pub blocks: u32,
    /// Whether this plane copies.
    leads: bool,
    /// The stage that is read next, and the parity of how often it was filled.
    stage: u32,
    phase: u32,
}

/// The ring of part `part` at `memory`, with those of the others, for tile `tile` of x. All units of the cube meet.
#[cube]
pub(super) fn ring(memory: u32, part: u32, tile: u32, blocks: u32, #[comptime] shape: Shape) -> Pipe {
    let barriers = memory + comptime!((shape.parts * shape.stages * shape.block()) as u32);
    if UNIT_POS_X == 0u32 {
        #[unroll]
        for stage in 0..comptime!(shape.parts * shape.stages) {
            barrier(barriers + comptime!(stage as u32 * 16), 1usize);
            barrier(barriers + comptime!(stage as u32 * 16 + 8), comptime!(UNITS / 32));
        }
        publish();
    }
    sync_cube();
    Pipe {
        stages: memory + part * comptime!((shape.stages * shape.block()) as u32),
        barriers: barriers + part * comptime!(shape.stages as u32 * 16),
        from: tile * blocks * comptime!(shape.block() as u32 / 16),
        blocks,
        leads: UNIT_POS_X % UNITS as u32 / 32u32 == 0u32,
        stage: 0u32.runtime(),
        phase: 0u32.runtime(),
    }
}

#[cube]
impl Pipe {
    /// Begins to copy the first blocks of part `part`.
    pub fn begin(&self, x: &[Vector<u32, Const<4>>], part: u32, #[comptime] shape: Shape) {
        if self.leads {
            #[unroll]
            for stage in 0..comptime!(shape.stages) {
                let block = part + comptime!((stage * shape.parts) as u32);
                if block < self.blocks {
                    self.copy(x, block, comptime!(stage as u32).runtime(), shape);
                }
            }
        }
    }

    fn copy(&self, x: &[Vector<u32, Const<4>>], block: u32, stage: u32, #[comptime] shape: Shape) {
        ptx::copy(
            x,
            self.from + block * comptime!(shape.block() as u32 / 16),
            self.stages + stage * comptime!(shape.block() as u32),
            self.barriers + stage * 16u32,
            comptime!(shape.block()),
        );
    }

    /// Waits for the next block, and says where it lies.
    pub fn wait(&self, #[comptime] shape: Shape) -> u32 {
        wait(register(self.barriers + self.stage * 16u32), self.phase);
        self.stages + self.stage * comptime!(shape.block() as u32)
    }

    /// The block that was waited for is the next no longer.
    pub fn advance(&mut self, #[comptime] shape: Shape) {
        self.stage += 1u32;
        if self.stage == comptime!(shape.stages as u32) {
            self.stage = 0u32;
            self.phase ^= 1u32;
        }
    }

    /// This plane has read the part's block before `block`, the next: when all have, another takes its place.
    pub fn release(&self, x: &[Vector<u32, Const<4>>], block: u32, #[comptime] shape: Shape) {
        let parts = comptime!(shape.parts as u32);
        let last = comptime!(shape.stages as u32 - 1);
        if block >= parts {
            let wraps = self.stage == 0u32;
            let stage = select(wraps, last, self.stage - 1u32);
            let read = self.barriers + stage * 16u32 + 8u32;
            arrive_once(read);
            let next = block + last * parts;
            if self.leads && next < self.blocks {
                wait(register(read), select(wraps, self.phase ^ 1u32, self.phase));
                self.copy(x, next, stage, shape);
            }
        }
    }
}

impl Shape {
    /// Bytes of a block of x.
    fn block(self) -> usize {
        self.rows * BLOCK * 2
    }

    /// Bytes of the rings of all parts.
    pub(super) fn rings(self) -> usize {
        self.parts * self.stages * (self.block() + 16)
    }
}
