//! The code that the kernels for many rows of x on tensor cores share ([`wgmma`](super::wgmma),
//! [`mma_tile`](super::mma_tile)): they multiply rows of the weight, decoded in registers, with a
//! tile of rows of x in shared memory.
//!
//! Four units share a row of the weight. A unit decodes whole runs, which are not what the tensor
//! cores want of it. But K may go in any order that both operands share: `pack.rs` lays x out in
//! the order in which the units have their values, in pieces of [`BLOCK`] values of all rows of a
//! tile, so that a piece is copied as it lies. Where K ends within a block, the rest of x is zeros,
//! and the units that have no run there take their row's last.

#![allow(unsafe_code)] // Launches.

pub(super) mod fragment;
mod pack;

use super::super::gpu::sorted::{self, Tiles};
use super::super::input::CHECK;
use super::super::problem::{Operands, Problem, Routing};
use super::parts::{Ends, place};
use crate::KernelError;
use crate::gpu::caps::Caps;
use crate::gpu::float::narrow;
use crate::gpu::launch::LaunchArgs;
use crate::gpu::layout::{Codes, Layout, RUN};
use crate::gpu::{Gpu, Memory};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Values of a row of x that are copied at once: a run for each of the four units that share a row
/// of the weight.
pub(super) const BLOCK: usize = 4 * RUN;
/// Values that the tensor cores take at once.
pub(super) const STEP: usize = 16;
/// Rows of the weight per cube.
pub(super) const N_TILE: usize = 128;

/// Layouts whose values the tensor cores can have: floats of another type would not be rounded but
/// misread.
pub(super) fn takes(layout: Layout, dtype: FloatType) -> bool {
    dtype != FloatType::F32 && !matches!(layout.codes, Codes::Float(float) if float != dtype)
}

/// True if tiles take the product's sizes and types.
fn supports(problem: &Problem) -> bool {
    problem.source.is_none()
        && takes(problem.layout, problem.x_type)
        && problem.k > 0
        && problem.k.is_multiple_of(RUN)
        && problem.n.is_multiple_of(2)
}

/// True if tiles take a product whose rows of x follow each other.
pub(in super::super) fn fits(problem: &Problem) -> bool {
    problem.routing.is_none() && supports(problem)
}

/// The routing of a product of routed experts that tiles take, where there are enough pairs for
/// sorting them by expert to pay.
pub(super) fn fits_experts(caps: &Caps, problem: &Problem) -> Option<Routing> {
    sorted::sortable(caps, problem).filter(|_| supports(problem))
}

/// Of `m_tiles`, the rows per tile that suit pairs of a token and an expert, sorted by expert.
/// `decode` is what a tile costs beside its rows, in rows.
pub(super) fn experts_tile(routing: Routing, m_tiles: &[usize], decode: usize) -> usize {
    m_tiles.iter().copied().min_by_key(|&rows| routing.likely_tiles(rows) * (rows + decode)).unwrap_or(64)
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Sizes {
    pub n: u32,
    /// Runs of a row of the weight.
    pub runs: u32,
    /// Blocks of K, the last of which may be a part of one.
    pub blocks: u32,
    /// Rows of x per batch of the weight.
    pub m: u32,
    /// Tiles of these rows.
    pub m_tiles: u32,
    pub ends: Ends,
}

/// The destination of pairs of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stored {
    pub dtype: FloatType,
    pub m_tile: usize,
    /// True if a list says where rows go.
    pub listed: bool,
}

/// Writes sums of the tile's row `row` for two neighbouring rows of the weight, `column` and the
/// next, where there are such.
#[cube]
pub(super) fn store_pair(
    list: &[u32],
    y: &mut [u32],
    sizes: &Sizes,
    at: (u32, u32, u32),
    pair: u32,
    #[comptime] stored: Stored,
) {
    let (tile, row, column) = at;
    let (n, m) = (sizes.n, sizes.m);
    let rows = comptime!(stored.m_tile as u32);
    let batch = tile / sizes.m_tiles;
    let tile_row = tile % sizes.m_tiles * rows;
    if comptime!(stored.listed) {
        let to = list[(CUBE_COUNT_X + tile * rows + row) as usize];
        if to != u32::MAX && column < n {
            y[((to * n + column) / 2u32) as usize] = pair;
        }
    } else if tile_row + row < m && column < n {
        let at = batch * m * n + place(&sizes.ends, m, n, tile_row + row, column);
        y[(at / 2u32) as usize] = pair;
    }
}

/// Two sums as they are stored.
#[cube]
pub(super) fn narrow_pair(low: f32, high: f32, #[comptime] dtype: FloatType) -> u32 {
    narrow(low, dtype) | (narrow(high, dtype) << 16u32)
}

/// The arguments that both kernels are launched with.
pub(super) struct Prepared {
    pub packed: Memory,
    pub sizes: Sizes,
    pub cubes: [u32; 3],
}

/// Packs x for tiles of `m_tile` rows, and checks that all can be indexed.
pub(super) fn prepare(
    gpu: &Gpu,
    m_tile: usize,
    tiles: &Tiles<'_>,
    operands: &Operands<'_>,
) -> Result<Prepared, KernelError> {
    let index = |value: usize| CHECK.index(value);
    let (weight, x, y) = (operands.weight, operands.x.x, operands.y);
    let (n, k, count) = (weight.n(), weight.k(), tiles.count);
    let (layout, blocks) = (Layout::of(weight.format()), k.div_ceil(BLOCK));
    let apart = fragment::apart(layout, CHECK.float("x", x)?);
    let packed = pack::pack_rows(gpu, x, [k, m_tile, apart], tiles)?;
    // Every index into the components is below the codes' words.
    index(weight.rows() * (k / RUN) * layout.bits)?;
    index(y.len().max(count * m_tile * blocks * BLOCK / 8))?;
    let sizes = Sizes {
        n: index(n)?,
        runs: index(k / RUN)?,
        blocks: index(blocks)?,
        m: index(tiles.m)?,
        m_tiles: index(tiles.m.div_ceil(m_tile).max(1))?,
        ends: Ends::new(operands.widths, n)?,
    };
    Ok(Prepared { packed, sizes, cubes: [index(count)?, index(n.div_ceil(N_TILE))?, 1] })
}

/// The kernel that packs rows of x.
#[cfg(test)]
pub(in super::super) fn kernels(target: &crate::gpu::compile::Target) -> Vec<Box<dyn CubeKernel>> {
    if !target.caps().tensor_cores {
        return Vec::new();
    }
    pack::kernels(target).into_iter().collect()
}
