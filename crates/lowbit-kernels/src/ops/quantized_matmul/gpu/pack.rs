//! Lays rows of x out as the tensor cores read them, see `tensor_core.rs`.

use super::super::CHECK;
use super::tensor_core::{BLOCK, Tiles, WRONG};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::layout::RUN;
use crate::gpu::{Dispatch, Gpu, Memory};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Units of a cube at the most.
const UNITS: usize = 256;

/// A unit takes a run of one row of a tile of `rows` rows: `[8 steps, rows / 8, 2, 8 rows, 4 runs]` words, where half
/// `h` of step `s` is pair `q = 2 s + h` of the run: value `q / apart * 2 apart + q % apart`, and the one `apart` values
/// on. Rows that are not there are left out. With a list, row `i` of the tile is row `list[.. + i] / share` of x.
#[cube(launch_unchecked)]
fn pack(
    x: &[Vector<u32, Const<4>>],
    list: &[u32],
    y: &mut [u32],
    blocks: u32,
    m: u32,
    tiles_a_batch: u32,
    share: u32,
    #[comptime] rows: usize,
    #[comptime] apart: usize,
    #[comptime] listed: bool,
) {
    let (block, tile) = (CUBE_POS_X, CUBE_POS_Y);
    let rows = comptime!(rows as u32);
    let batch = if comptime!(listed) { list[tile as usize] } else { 0u32.runtime() };
    if batch >= WRONG {
        terminate!();
    }
    let mut i = UNIT_POS_X;
    while i < rows * 4u32 {
        let row = i / 4u32;
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
        // What is left of other rows there is multiplied, and not stored.
        if from != u32::MAX {
            let to = (tile * blocks + block) * rows * 64u32 + row / 8u32 * 64u32 + row % 8u32 * 4u32;
            pack_run(x, (from * blocks + block) * 4u32 + i % 4u32, y, to + i % 4u32, rows, apart);
        }
        i += CUBE_DIM_X;
    }
}

#[cube]
fn pack_run(
    x: &[Vector<u32, Const<4>>],
    run: u32,
    y: &mut [u32],
    to: u32,
    #[comptime] rows: u32,
    #[comptime] apart: usize,
) {
    let mut words = Array::<u32>::new(comptime!(RUN / 2));
    #[unroll]
    for j in 0..comptime!(RUN / 8) {
        let vector = x[(run * comptime!(RUN as u32 / 8)) as usize + j];
        #[unroll]
        for k in 0..4usize {
            words[j * 4 + k] = vector.extract(k);
        }
    }
    #[unroll]
    for q in 0..comptime!(RUN / 2) {
        let first = comptime!(q / apart * 2 * apart + q % apart);
        let low = half(&words, first);
        let high = half(&words, comptime!(first + apart));
        let offset = comptime!((q / 2) as u32 * rows * 8 + (q % 2) as u32 * 32);
        y[(to + offset) as usize] = low | (high << 16u32);
    }
}

#[cube]
fn half(words: &Array<u32>, #[comptime] i: usize) -> u32 {
    match comptime!(i % 2) {
        0 => words[comptime!(i / 2)] & 0xffffu32,
        _ => words[comptime!(i / 2)] >> 16u32,
    }
}

pub(super) fn kernel(target: &Target, rows: usize, apart: usize, listed: bool) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start((rows * 4).min(UNITS) as u32);
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
        apart,
        listed,
    ))
}

/// The rows of `x`, of `k` values, in `tiles`.
pub(super) fn pack_rows(
    gpu: &Gpu,
    x: &Tensor,
    k: usize,
    apart: usize,
    tiles: &Tiles<'_>,
) -> Result<Memory, KernelError> {
    let index = |value: usize| CHECK.index(value);
    let (rows, blocks) = (tiles.rows, k / BLOCK);
    index(tiles.count * rows * k)?;
    let packed = gpu.allocate(tiles.count * rows * k * 2)?;
    let (list, share) = tiles.list.unwrap_or((&packed, 1));
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), rows, apart, tiles.list.is_some()),
        cubes: [index(blocks)?, index(tiles.count)?, 1],
        buffers: vec![x.memory()?, (list, 0), (&packed, 0)],
        scalars: vec![index(blocks)?, index(tiles.m)?, index(tiles.m.div_ceil(rows).max(1))?, index(share)?],
    })?;
    Ok(packed)
}
