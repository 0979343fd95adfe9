//! The cut of a product with few rows of x among cubes: the rows of y that each computes, and the
//! batch of the weight that they take.

use super::super::input::CHECK;
use super::super::problem::{Operands, Problem, Routing};
use crate::KernelError;
use crate::gpu::CUBES;
use crate::gpu::launch::LaunchArgs;
use crate::gpu::layout::RUN;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The sizes of a product with few rows of x, of which each cube takes some. Where there are
/// experts, it computes
/// `y[p * pairs + t, n] = sum over k of x[t / share, k] * weight[p * experts + ids[t], n, k]`, and
/// NaN for an id that is none of them; else
/// `y[b * m + t, n] = sum over k of x[b * m + t, k] * weight[b, n, k]`.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(in super::super) struct Sizes {
    pub n: u32,
    /// Runs of a row of the weight.
    pub runs: u32,
    /// Batches: rows of y where there are experts.
    pub batches: u32,
    /// Rows of x per batch: 1 where there are experts.
    pub m: u32,
    /// 0 where there are none.
    pub experts: u32,
    pub pairs: u32,
    pub share: u32,
}

impl Sizes {
    /// For a product whose sizes were checked to fit 32 bits, as all indices are.
    pub fn new(problem: &Problem) -> Result<Self, KernelError> {
        let routing = problem.routing.unwrap_or(Routing { experts: 0, pairs: 1, share: 1 });
        Ok(Self {
            n: CHECK.index(problem.n)?,
            runs: CHECK.index(problem.runs())?,
            batches: CHECK.index(problem.batches)?,
            m: CHECK.index(problem.m)?,
            experts: CHECK.index(routing.experts)?,
            pairs: CHECK.index(routing.pairs)?,
            share: CHECK.index(routing.share)?,
        })
    }
}

/// The multiple of [`CUBES`], rounded up, that the tiles of `n_tile` rows among `n` take: a
/// compile-time constant of kernels for every device.
pub(in super::super) fn folds(n: usize, n_tile: usize) -> usize {
    n.div_ceil(n_tile).div_ceil(CUBES).max(1)
}

/// Cubes for a product of which each takes `m_tile` rows of x of one batch and `n_tile` of the
/// weight. Tiles of the weight lie along x, in `folds` parts, which lie along z with what is left
/// of the rows of x.
pub(in super::super) fn cubes(
    problem: &Problem,
    [m_tile, n_tile]: [usize; 2],
    folds: usize,
) -> Result<[u32; 3], KernelError> {
    let tiles = problem.batches * problem.m.div_ceil(m_tile);
    let across = problem.n.div_ceil(n_tile);
    let across = if folds > 1 { across.min(CUBES) } else { across };
    let index = |value: usize| CHECK.index(value);
    Ok([index(across)?, index(tiles.min(CUBES))?, index(tiles.div_ceil(CUBES) * folds)?])
}

/// This cube's tile of the weight, of all that [`cubes`] launches: one past the last has no rows.
#[cube]
pub(in super::super) fn tile_of_cube(#[comptime] folds: usize) -> usize {
    if comptime!(folds > 1) {
        CUBE_POS_Z as usize % folds * comptime!(CUBES) + CUBE_POS_X as usize
    } else {
        CUBE_POS_X as usize
    }
}

/// That all indices of a product fit 32 bits: into the weight's components, x and y.
///
/// # Errors
/// [`KernelError::Value`] when one does not.
pub(in super::super) fn check_indices(problem: &Problem, operands: &Operands<'_>) -> Result<(), KernelError> {
    let (layout, runs) = (problem.layout, problem.runs());
    // Scales have two elements per run at most, and codes no fewer.
    CHECK.index(operands.weight.rows() * runs * (layout.bits / layout.vector()).max(2))?;
    CHECK.index(problem.m * problem.batches * runs * RUN)?;
    CHECK.index(operands.y.len()).map(drop)
}

/// The rows of y that a cube computes.
#[derive(CubeType)]
pub(in super::super) struct CubeRows {
    /// The first row of y, and how many.
    pub t0: usize,
    pub count: usize,
    /// The row of x for the first.
    pub x_row: usize,
    /// The batch of the weight that they take, if it is known.
    pub batch: usize,
    pub known: bool,
    /// The initial value of sums: NaN for an id that is none of the experts'.
    pub initial: f32,
}

/// This cube's rows: `m_tile` at most, or one where there are experts. `folds` is that of
/// [`cubes`].
#[cube]
pub(in super::super) fn cube_rows(
    ids: &[u32],
    sizes: &Sizes,
    #[comptime] m_tile: usize,
    #[comptime] folds: usize,
) -> CubeRows {
    let m = sizes.m as usize;
    let part = if comptime!(folds > 1) { CUBE_POS_Z as usize / folds } else { CUBE_POS_Z as usize };
    let tile = part * comptime!(CUBES) + CUBE_POS_Y as usize;
    let tiles = (m + comptime!(m_tile - 1)) / m_tile;
    let mut batch = tile / tiles;
    let row0 = tile % tiles * m_tile;
    let t0 = batch * m + row0;
    // Cubes past the last row of x have nothing to read and to write.
    let mut known = batch < sizes.batches as usize;
    let count = select(known, min(m - row0, m_tile), 0usize);
    let mut initial = 0.0f32;
    let mut x_row = t0;
    if known && sizes.experts > 0 {
        let pair = t0 as u32 % sizes.pairs;
        let expert = ids[pair as usize];
        batch = (t0 as u32 / sizes.pairs * sizes.experts + expert) as usize;
        x_row = (pair / sizes.share) as usize;
        if expert >= sizes.experts {
            known = false;
            initial = f32::reinterpret(0x7fc0_0000u32);
        }
    }
    CubeRows { t0, count, x_row, batch, known, initial }
}
