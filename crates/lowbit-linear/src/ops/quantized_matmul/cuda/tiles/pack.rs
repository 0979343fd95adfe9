//! Lays rows of x out as the tensor cores read them.

#![allow(unsafe_code)] // Launches.

use super::super::super::gpu::sorted::{Tiles, WRONG};
use super::super::super::input::CHECK;
use super::BLOCK;
use crate::gpu::compile::Target;
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::layout::RUN;
use crate::gpu::{Gpu, Memory};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Units of a cube at the most.
const UNITS: usize = 256;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Runs of a row.
    runs: u32,
    /// Blocks of a row, the last of which may be a part of one.
    blocks: u32,
    /// Rows of x per batch of the weight.
    m: u32,
    /// Tiles of these rows.
    m_tiles: u32,
    /// Listed rows that have the same row of x.
    share: u32,
}

/// A unit takes a run of one row of a tile of `rows` rows: `[8 steps, rows / 8, 2, 8 rows, 4 runs]`
/// words, where half `h` of step `s` is pair `q = 2 s + h` of the run: value
/// `q / apart * 2 apart + q % apart`, and the one `apart` values on. Rows that are not there are
/// left out, and runs past a row's last are zeros. With a list, row `i` of the tile is row
/// `list[.. + i] / share` of x.
#[kernel]
fn quantized_matmul_pack(
    x: &[Vector<u32, Const<4>>],
    list: &[u32],
    y: &mut [u32],
    sizes: Sizes,
    #[comptime] rows: usize,
    #[comptime] apart: usize,
    #[comptime] listed: bool,
) {
    let (block, tile) = (CUBE_POS_X, CUBE_POS_Y);
    let (blocks, m) = (sizes.blocks, sizes.m);
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
                from = pair / sizes.share;
            }
        } else {
            let of_batch = tile % sizes.m_tiles * rows + row;
            if of_batch < m {
                from = tile / sizes.m_tiles * m + of_batch;
            }
        }
        // Stale values of other rows there are multiplied, and not stored.
        if from != u32::MAX {
            let to = (tile * blocks + block) * rows * 64u32 + row / 8u32 * 64u32 + row % 8u32 * 4u32;
            let run = block * 4u32 + i % 4u32;
            if run < sizes.runs {
                pack_run(x, from * sizes.runs + run, y, to + i % 4u32, rows, apart);
            } else {
                #[unroll]
                for q in 0..comptime!(RUN / 2) {
                    y[(to + i % 4u32 + place(q, rows)) as usize] = 0u32;
                }
            }
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
        y[(to + place(q, rows)) as usize] = low | (high << 16u32);
    }
}

/// The words from a run's first pair to pair `q`.
#[cube]
fn place(#[comptime] q: usize, #[comptime] rows: u32) -> u32 {
    comptime!((q / 2) as u32 * rows * 8 + (q % 2) as u32 * 32).runtime()
}

#[cube]
fn half(words: &Array<u32>, #[comptime] i: usize) -> u32 {
    match comptime!(i % 2) {
        0 => words[comptime!(i / 2)] & 0xffffu32,
        _ => words[comptime!(i / 2)] >> 16u32,
    }
}

fn compiled(
    target: &Target,
    m_tile: usize,
    apart: usize,
    listed: bool,
) -> Kernel<QuantizedMatmulPack<'static>> {
    QuantizedMatmulPack::kernel(target, (m_tile * 4).min(UNITS), m_tile, apart, listed)
}

/// With a list and without.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> [Box<dyn CubeKernel>; 2] {
    [false, true].map(|listed| compiled(target, 64, 4, listed).code())
}

/// The rows of `x`, of `k` values, in `tiles` of `m_tile` rows; values that are decoded together
/// lie `apart`.
pub(super) fn pack_rows(
    gpu: &Gpu,
    x: &Tensor,
    [k, m_tile, apart]: [usize; 3],
    tiles: &Tiles<'_>,
) -> Result<Memory, KernelError> {
    let index = |value: usize| CHECK.index(value);
    let (count, blocks) = (tiles.count, k.div_ceil(BLOCK));
    let values = count * m_tile * blocks * BLOCK;
    index(values)?;
    let packed = gpu.allocate(values * 2)?;
    let (list, share) = tiles.list.unwrap_or((&packed, 1));
    let arguments = QuantizedMatmulPack {
        x: x.buffer()?,
        list: list.into(),
        y: (&packed).into(),
        sizes: Sizes {
            runs: index(k / RUN)?,
            blocks: index(blocks)?,
            m: index(tiles.m)?,
            m_tiles: index(tiles.m.div_ceil(m_tile).max(1))?,
            share: index(share)?,
        },
    };
    let kernel = compiled(gpu.target(), m_tile, apart, tiles.list.is_some());
    // SAFETY: `packed` holds all tiles, and rows that x has not are left out.
    unsafe { gpu.launch(kernel, [index(blocks)?, index(count)?, 1], arguments)? };
    Ok(packed)
}
