//! Lays rows of x out as the tensor cores read them, see `tensor_core.rs`.

use super::super::CHECK;
use super::tensor_core::{BLOCK, Tiles, WRONG};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::{Dispatch, Gpu, Memory};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;

/// A cube takes one block of one tile of `rows` rows: `[8 steps, rows / 8, 2, 8 rows, 8 values]`, where value `v` of
/// half `h` of step `s` is value `v / 2 * 32 + 4 s + 2 h + v % 2` of the block. Rows that are not there become zeros.
/// With a list, row `i` of the tile is row `list[.. + i] / share` of x.
#[cube(launch_unchecked)]
fn pack(
    x: &[u32],
    list: &[u32],
    y: &mut [Vector<u32, Const<4>>],
    blocks: u32,
    m: u32,
    tiles_a_batch: u32,
    share: u32,
    #[comptime] rows: usize,
    #[comptime] listed: bool,
) {
    let (block, tile) = (CUBE_POS_X, CUBE_POS_Y);
    let rows = comptime!(rows as u32);
    let mut i = UNIT_POS_X;
    let batch = if comptime!(listed) { list[tile as usize] } else { 0u32.runtime() };
    if batch >= WRONG {
        terminate!();
    }
    while i < rows * 16u32 {
        // [8 steps, rows / 8, 2, 8 rows]
        let row = i / 16u32 % (rows / 8u32) * 8u32 + i % 8u32;
        let first = i / (rows * 2u32) * 2u32 + i / 8u32 % 2u32;
        let mut from = u32::MAX.runtime();
        if comptime!(listed) {
            let pair = list[(CUBE_COUNT_Y + tile * rows + row) as usize];
            if pair != u32::MAX {
                from = pair / share;
            }
        } else {
            let of_batch = tile % tiles_a_batch * rows + row;
            if of_batch < m {
                from = tile / tiles_a_batch * m + of_batch;
            }
        }
        let mut vector = Vector::<u32, Const<4>>::new(0u32);
        if from != u32::MAX {
            let at = (from * blocks + block) * comptime!(BLOCK as u32 / 2) + first;
            #[unroll]
            for j in 0..4usize {
                vector.insert(j, x[(at + comptime!(16 * j as u32)) as usize]);
            }
        }
        y[((tile * blocks + block) * rows * 16u32 + i) as usize] = vector;
        i += UNITS;
    }
}

pub(super) fn kernel(target: &Target, rows: usize, listed: bool) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    Box::new(pack::Pack::new(
        settings,
        properties,
        registers,
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        (),
        (),
        rows,
        listed,
    ))
}

/// The rows of `x`, of `k` values, in `tiles`.
pub(super) fn pack_rows(gpu: &Gpu, x: &Tensor, k: usize, tiles: &Tiles<'_>) -> Result<Memory, KernelError> {
    let index = |value: usize| CHECK.index(value);
    let (rows, blocks) = (tiles.rows, k / BLOCK);
    index(tiles.count * rows * k)?;
    let packed = gpu.allocate(tiles.count * rows * k * 2)?;
    let (list, share) = tiles.list.unwrap_or((&packed, 1));
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), rows, tiles.list.is_some()),
        cubes: [index(blocks)?, index(tiles.count)?, 1],
        buffers: vec![x.memory()?, (list, 0), (&packed, 0)],
        scalars: vec![index(blocks)?, index(tiles.m)?, index(tiles.m.div_ceil(rows).max(1))?, index(share)?],
    })?;
    Ok(packed)
}
