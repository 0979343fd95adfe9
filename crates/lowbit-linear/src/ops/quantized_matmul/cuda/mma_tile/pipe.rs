//! Pieces of x on their way to shared memory: asynchronous copies of 16 bytes fill a ring of
//! stages, and all units of a cube meet before a piece is read.

use super::config::{MmaTile, PIECES, UNITS};
use crate::gpu::cuda::ptx::{copy_vector, end_copy_group, wait_copy_groups};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The ring of a part of K.
#[derive(CubeType)]
pub(super) struct Pipe {
    /// The address of the stages in shared memory.
    stages: u32,
    /// The first vector of the tile that this unit copies.
    from: u32,
    /// Blocks of x, of which the part has every `parts`-th.
    pub blocks: u32,
    /// The index of this unit in its part.
    unit: u32,
    /// The stage that is read next, and the one that is filled next.
    read: u32,
    fill: u32,
}

/// The vectors of a piece.
fn vectors(config: MmaTile) -> usize {
    config.piece() / 16
}

/// The ring of part `part` at `memory`, with those of the others, for tile `tile` of x.
#[cube]
pub(super) fn ring(memory: u32, part: u32, tile: u32, blocks: u32, #[comptime] config: MmaTile) -> Pipe {
    let unit = UNIT_POS_X % UNITS as u32;
    Pipe {
        stages: memory + part * comptime!((config.stages * config.piece()) as u32),
        from: tile * blocks * comptime!((PIECES * vectors(config)) as u32) + unit,
        blocks,
        unit,
        read: 0u32.runtime(),
        fill: 0u32.runtime(),
    }
}

#[cube]
impl Pipe {
    /// Begins to copy the first pieces of part `part`: one less than there are stages.
    pub fn begin(&mut self, x: &[Vector<u32, Const<4>>], part: u32, #[comptime] config: MmaTile) {
        #[unroll]
        for piece in 0..comptime!(config.stages - 1) {
            let block = part + comptime!((piece / PIECES * config.parts) as u32);
            self.copy(x, block, comptime!(piece % PIECES), config);
        }
    }

    /// Begins to copy piece `piece` of block `block`, if there is such a block, to the stage that
    /// is filled next. A group of copies ends in any case, so that groups count pieces.
    fn copy(
        &mut self,
        x: &[Vector<u32, Const<4>>],
        block: u32,
        #[comptime] piece: usize,
        #[comptime] config: MmaTile,
    ) {
        let count = comptime!(vectors(config));
        if block < self.blocks {
            let from = self.from
                + (block * comptime!(PIECES as u32) + comptime!(piece as u32)) * comptime!(count as u32);
            let to = self.stages + self.fill * comptime!(config.piece() as u32) + self.unit * 16u32;
            #[unroll]
            for i in 0..comptime!(count.div_ceil(UNITS)) {
                // A tile of 16 rows has a vector for each unit: no piece leaves a unit without one.
                copy_vector(x, from + comptime!((i * UNITS) as u32), to + comptime!((i * UNITS * 16) as u32));
            }
        }
        end_copy_group();
        self.fill = next(self.fill, config);
    }

    /// Waits for piece `piece` of block `block`, begins the copy that takes the place of the piece
    /// before it, and says where the piece lies. All units of the cube meet.
    pub fn wait(
        &mut self,
        x: &[Vector<u32, Const<4>>],
        block: u32,
        #[comptime] piece: usize,
        #[comptime] config: MmaTile,
    ) -> u32 {
        wait_copy_groups(comptime!(config.stages - 2));
        // The piece is there for all units, and all have read the one before.
        sync_cube();
        let ahead = comptime!(piece + config.stages - 1);
        self.copy(
            x,
            block + comptime!((ahead / PIECES * config.parts) as u32),
            comptime!(ahead % PIECES),
            config,
        );
        let at = self.stages + self.read * comptime!(config.piece() as u32);
        self.read = next(self.read, config);
        at
    }
}

/// The stage after a stage.
#[cube]
fn next(stage: u32, #[comptime] config: MmaTile) -> u32 {
    let last = stage == comptime!(config.stages as u32 - 1);
    select(last, 0u32, stage + 1u32)
}
