//! The planes that copy: the weight as soon as there is room, from before the last launch has
//! ended, and x after that.

use super::config::{COPIERS, StreamRows};
use super::{Ring, Sizes, Stages};
use crate::gpu::compile::overlap;
use crate::gpu::components::Components;
use crate::gpu::cuda::ptx;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Units that copy the weight, or x.
pub(in super::super) const UNITS: usize = 32 * COPIERS;

/// Copies rows of the weight, their scales and biases, stage by stage.
#[cube]
pub(super) fn copy_weight<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    sizes: &Sizes,
    stages: &Stages,
    ring: &mut Ring,
    #[comptime] config: StreamRows,
) {
    let groups = sizes.n.div_ceil(comptime!(config.rows() as u32));
    let half = sizes.n / 2u32;
    let columns = if comptime!(config.glu.is_some()) { half } else { sizes.n };
    let mut group = CUBE_POS_X;
    while group < groups {
        let rows = GroupRows {
            column: group * comptime!(config.columns() as u32),
            columns,
            first: 0u32.runtime(),
            apart: half,
        };
        copy_group(weight, &rows, sizes.blocks, stages, ring, config);
        group += CUBE_COUNT_X;
    }
}

/// A group of tiles: the rows of the weight for columns of the result from `column` on, of
/// `columns` in all, the first of which is the weight's row `first`. Rows for gates and those that
/// they are the gates of are `apart` rows apart.
#[derive(CubeType)]
pub(in super::super) struct GroupRows {
    pub column: u32,
    pub columns: u32,
    pub first: u32,
    pub apart: u32,
}

/// Copies a group of tiles, stage by stage.
#[cube]
pub(in super::super) fn copy_group<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    rows: &GroupRows,
    blocks: u32,
    stages: &Stages,
    ring: &mut Ring,
    #[comptime] config: StreamRows,
) {
    let layout = comptime!(config.layout);
    // Bytes of 4 blocks, of which there are whole numbers.
    let (code_bytes, scale_bytes, bias_bytes) = comptime!((
        4 * config.block_bytes(),
        layout.elements(8).0 * layout.scale_sizes().0,
        layout.elements(8).1 * layout.scale_sizes().1
    ));
    let mut first = 0u32;
    while first < blocks {
        ring.wait_empty();
        let part = Part { first, count: min(blocks - first, comptime!(config.blocks() as u32)), blocks };
        let at = ring.stage * comptime!(config.rows() as u32);
        let to = stages.codes + at * comptime!(config.code_pitch() as u32);
        copy_rows(&weight.codes, rows, &part, to, code_bytes, comptime!(config.code_pitch()), config);
        let (scale_pitch, bias_pitch) = comptime!(config.scale_pitches());
        let to = stages.scales + at * scale_pitch as u32;
        copy_rows(&weight.scales, rows, &part, to, scale_bytes, scale_pitch, config);
        if comptime!(bias_bytes > 0) {
            let to = stages.biases + at * bias_pitch as u32;
            copy_rows(&weight.biases, rows, &part, to, bias_bytes, bias_pitch, config);
        }
        ring.arrive_with_copies();
        ring.advance(config);
        first += comptime!(config.blocks() as u32);
    }
}

/// A stage's part of rows: `count` of their blocks from `first` on.
#[derive(CubeType)]
struct Part {
    first: u32,
    count: u32,
    blocks: u32,
}

/// Copies a unit's vectors of one component, of which 4 blocks have `bytes` bytes.
#[cube]
fn copy_rows<E: CubePrimitive>(
    data: &[E],
    rows: &GroupRows,
    part: &Part,
    to: u32,
    #[comptime] bytes: usize,
    #[comptime] pitch: usize,
    #[comptime] config: StreamRows,
) {
    let unit = UNIT_POS_X % comptime!(UNITS as u32);
    // Vectors of a stage's row.
    let vectors = comptime!((config.blocks() * bytes / 64) as u32);
    let there = part.count * bytes as u32 / 64u32;
    let a_row = part.blocks * bytes as u32 / 64u32;
    let from = part.first * bytes as u32 / 64u32;
    #[unroll]
    for i in 0..comptime!((config.rows() * vectors as usize).div_ceil(UNITS)) {
        let at = unit + comptime!((i * UNITS) as u32);
        let (r, v) = (at / vectors, at % vectors);
        if r < comptime!(config.rows() as u32) && v < there {
            // Rows past the last are computed and not stored.
            let mut row = rows.first + min(rows.column + r, rows.columns - 1u32);
            if comptime!(config.glu.is_some()) {
                // A tile has 8 rows of each half.
                let column = min(rows.column + r / 16u32 * 8u32 + r % 8u32, rows.columns - 1u32);
                row = rows.first + column + r / 8u32 % 2u32 * rows.apart;
            }
            ptx::copy_vector(data, row * a_row + from + v, to + r * pitch as u32 + v * 16u32);
        }
    }
}

/// Copies x, stage by stage.
#[cube]
pub(super) fn copy_x(
    x: &[Vector<u32, Const<4>>],
    sizes: &Sizes,
    stages: &Stages,
    ring: &mut Ring,
    #[comptime] config: StreamRows,
) {
    overlap();
    let unit = UNIT_POS_X % comptime!(UNITS as u32);
    let vectors = comptime!((config.stage / 8) as u32);
    let row0 = CUBE_POS_Y * comptime!(config.m_tile() as u32);
    let rows = min(sizes.m - row0, comptime!(config.m_tile() as u32));
    let groups = sizes.n.div_ceil(comptime!(config.rows() as u32));
    let mut group = CUBE_POS_X;
    while group < groups {
        let mut first = 0u32;
        while first < sizes.blocks {
            ring.wait_empty();
            let there = min(sizes.blocks - first, comptime!(config.blocks() as u32)) * 8u32;
            let to = stages.x + ring.stage * comptime!((config.m_tile() * config.x_pitch()) as u32);
            #[unroll]
            for i in 0..comptime!(config.m_tile() * vectors as usize / UNITS) {
                let at = unit + comptime!((i * UNITS) as u32);
                let (r, v) = (at / vectors, at % vectors);
                if r < rows && v < there {
                    let from = (row0 + r) * (sizes.blocks * 8u32) + first * 8u32 + v;
                    ptx::copy_vector(x, from, to + r * comptime!(config.x_pitch() as u32) + v * 16u32);
                }
            }
            ring.arrive_with_copies();
            ring.advance(config);
            first += comptime!(config.blocks() as u32);
        }
        group += CUBE_COUNT_X;
    }
}
