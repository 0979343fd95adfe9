//! Steps of several tokens with routed experts as a [stream](super::stream_rows), from Hopper on.
//! Each cube sorts all pairs of a token and an expert by itself (`chunks.rs`), into chunks of as
//! many rows of x as tensor cores take at a time, and then takes its share of all chunks' groups of
//! tiles: that reads the weight of each expert about once, keeps loads under way from one expert to
//! the next, and leaves no cube with more than its share, however tokens choose.
//!
//! Sums are added up as in `stream_rows`, so a pair's bits do not depend on the others.

#![allow(unsafe_code)] // Launches.

mod chunks;

use super::super::gpu::cube_rows::check_indices;
use super::super::input::CHECK;
use super::super::problem::{Operands, Problem};
use super::numbers::ONES;
use super::stream_rows::config::{BLOCK, COPIERS};
use super::stream_rows::copy::{GroupRows, UNITS, copy_group};
use super::stream_rows::{Ring, Stages, StreamRows, multiply_group, share_sums, shared_value, stages};
use crate::KernelError;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::compile::Target;
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::cuda::ptx::{self, address};
use crate::gpu::float::{narrow, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::layout::with_components;
use crate::ops::glu::Gate;
use chunks::{Chunks, sort};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
#[cfg(test)]
use lowbit_formats::{FloatType, Format};

/// The most pairs: a place among them has 16 bits, and all are in shared memory.
const MOST_PAIRS: usize = 4096;
/// The most pairs per expert, on the average: more are for wide tiles.
const MOST_EACH: usize = 10;
/// The fewest pairs that pay for sorting them: one token's experts are all different.
const FEWEST_PAIRS: usize = 16;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamExperts {
    /// The cut of an expert's product.
    pub rows: StreamRows,
    /// Pairs that shared memory has room for.
    pub pairs: usize,
    pub experts: usize,
}

/// A configuration, and the cubes that share the product: one per multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub experts: StreamExperts,
    pub cubes: usize,
}

/// The configuration for the product of routed experts, if the kernel takes it.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<Launch> {
    let routing = problem.routing?;
    let few = FEWEST_PAIRS..=MOST_PAIRS.min(MOST_EACH * routing.experts);
    if !few.contains(&routing.pairs)
        || routing.experts > MOST_PAIRS
        || problem.source.is_some()
        || !problem.vectors
    {
        return None;
    }
    let experts = StreamExperts::new(caps, problem)?;
    let groups = routing.most_tiles(experts.rows.m_tile()) * problem.n.div_ceil(experts.rows.columns());
    Some(Launch { experts, cubes: groups.min(caps.multiprocessors) })
}

impl StreamExperts {
    /// The cut that has the least to read for the busiest multiprocessor, as far as the number of
    /// pairs says it.
    fn new(caps: &Caps, problem: &Problem) -> Option<Self> {
        /// The most stages: small ones leave room for more than wide tiles do.
        const STAGES: usize = 8;
        /// Bytes of the weight that come while sums are added up and stored.
        const STORED: usize = 8192;
        let routing = problem.routing?;
        let octets = if routing.pairs < 5 * routing.experts { 1 } else { 2 };
        // Few steps need more than one pair per unit.
        let pairs = if routing.pairs <= 640 { 640 } else { routing.pairs.next_power_of_two() };
        // The experts that are likely to be chosen.
        let chosen = (routing.pairs * routing.experts).div_ceil(routing.pairs + routing.experts);
        let cost = |rows: &StreamRows| {
            let rounds = (chosen * rows.groups(problem.n)).div_ceil(caps.multiprocessors);
            rounds * (rows.rows() * problem.k * (problem.layout.bits + 1) / 8 + STORED)
        };
        let cut = |tiles| {
            let reserved = chunks::bytes(routing.experts, pairs, 8 * octets);
            StreamRows::cut(caps, problem, [octets, tiles], [STAGES, reserved])
        };
        let rows = (1..=StreamRows::most_tiles(octets)).rev().filter_map(cut).min_by_key(cost)?;
        Some(Self { rows, pairs, experts: routing.experts })
    }
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Columns of the result.
    n: u32,
    /// Blocks of a row.
    blocks: u32,
    pairs: u32,
    /// Pairs that have the same row of x.
    share: u32,
    /// Rows of the weight from an expert's gate to what it is the gate of.
    apart: u32,
}

/// `y[t, n] = sum over k of x[t / share, k] * weight[ids[t], n, k]`, or the gated linear unit of
/// two such products; NaN for an id that is none of the experts'.
#[kernel(waits)]
fn gather_qmm_stream_experts<S: Int, B: Int, Y: Int, V: Size>(
    weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    ids: &[u32],
    y: &mut [Y],
    sizes: Sizes,
    ones: u32,
    #[comptime] config: StreamExperts,
) {
    let rows = comptime!(config.rows);
    let stages = stages(rows);
    let barriers = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(rows.stages, 128usize);
    let mut ring = Ring { barriers: address(&barriers), stage: 0u32.runtime(), phase: 0u32.runtime() };
    if UNIT_POS_X == 0u32 {
        ring.begin(rows);
    }
    let mut chunks = Chunks::new(config);
    sort(ids, &sizes, &mut chunks, config);
    let groups = sizes.n.div_ceil(comptime!(rows.columns() as u32));
    let items = chunks.count[0usize] * groups;
    if UNIT_POS_X >= comptime!((rows.multiplying() + 32 * COPIERS) as u32) {
        copy_x(x, &sizes, &chunks, &stages, &mut ring, config);
    } else if UNIT_POS_X >= comptime!(rows.multiplying() as u32) {
        let mut item = CUBE_POS_X;
        while item < items {
            let chunk = chunks.at(item / groups, config);
            let group = GroupRows {
                column: item % groups * comptime!(rows.columns() as u32),
                columns: sizes.n,
                first: min(chunk.expert, comptime!(config.experts as u32 - 1)) * sizes.n,
                apart: sizes.apart,
            };
            copy_group::<S, B, V>(weight, &group, sizes.blocks, &stages, &mut ring, rows);
            item += CUBE_COUNT_X;
        }
    } else {
        let mut partial = Shared::<[f32]>::new_slice(rows.partial());
        let mut item = CUBE_POS_X;
        while item < items {
            let sums = multiply_group(&stages, &mut ring, sizes.blocks, ones, rows);
            store::<Y>(&sums, &mut partial, y, sizes.n, item, &chunks, config);
            item += CUBE_COUNT_X;
        }
    }
}

/// Copies the rows of x of each item's chunk, stage by stage.
#[cube]
fn copy_x(
    x: &[Vector<u32, Const<4>>],
    sizes: &Sizes,
    chunks: &Chunks,
    stages: &Stages,
    ring: &mut Ring,
    #[comptime] config: StreamExperts,
) {
    let rows = comptime!(config.rows);
    let unit = UNIT_POS_X % comptime!(UNITS as u32);
    let vectors = comptime!((rows.stage / 8) as u32);
    let a_row = sizes.blocks * comptime!((BLOCK / 8) as u32);
    let groups = sizes.n.div_ceil(comptime!(rows.columns() as u32));
    let mut item = CUBE_POS_X;
    while item < chunks.count[0usize] * groups {
        let chunk = chunks.at(item / groups, config);
        let mut first = 0u32;
        while first < a_row {
            ring.wait_empty();
            let there = min(a_row - first, vectors);
            let to = stages.x + ring.stage * comptime!((rows.m_tile() * rows.x_pitch()) as u32);
            #[unroll]
            for i in 0..comptime!(rows.m_tile() * rows.stage / 8 / UNITS) {
                let at = unit + comptime!((i * UNITS) as u32);
                let (r, v) = (at / vectors, at % vectors);
                if r < chunk.count && v < there {
                    let row = chunks.pairs[(chunk.first + r) as usize] >> 16u32;
                    let to = to + r * comptime!(rows.x_pitch() as u32) + v * 16u32;
                    ptx::copy_vector(x, row * a_row + first + v, to);
                }
            }
            ring.arrive_with_copies();
            ring.advance(rows);
            first += vectors;
        }
        item += CUBE_COUNT_X;
    }
}

/// Adds up the slices' sums of an item, and stores its pairs' rows.
#[cube]
fn store<Y: Int>(
    sums: &Array<f32>,
    partial: &mut Shared<[f32]>,
    y: &mut [Y],
    n: u32,
    item: u32,
    chunks: &Chunks,
    #[comptime] config: StreamExperts,
) {
    let rows = comptime!(config.rows);
    let columns = comptime!(rows.columns());
    let groups = n.div_ceil(columns as u32);
    let chunk = chunks.at(item / groups, config);
    let column = item % groups * columns as u32;
    #[unroll]
    for f in 0..comptime!(rows.octets) {
        share_sums(sums, partial, f, rows);
        let mut i = UNIT_POS_X as usize;
        while i < comptime!(8 * rows.columns()) {
            let (row, c) = (i / columns, i % columns);
            let at = comptime!(8 * f as u32) + row as u32;
            if at < chunk.count && column + (c as u32) < n {
                let mut value = shared_value(&*partial, row, c, rows);
                if chunk.expert >= comptime!(config.experts as u32) {
                    value = f32::reinterpret(0x7fc0_0000u32);
                }
                let pair = chunks.pairs[(chunk.first + at) as usize] & 0xffffu32;
                y[(pair * n + column + c as u32) as usize] = Y::cast_from(narrow(value, rows.y_type));
            }
            i += comptime!(rows.multiplying());
        }
    }
}

/// The kernel for `config`, its types chosen by what the layout stores.
fn compiled(target: &Target, config: StreamExperts) -> Kernel<GatherQmmStreamExperts<'static>> {
    let StreamRows { layout, y_type, .. } = config.rows;
    with_components!(layout, S, B => with_storage!(y_type, Y => {
        GatherQmmStreamExperts::kernel::<S, B, Y>(target, config.rows.units(), layout.vector(), config)
    }))
}

/// Computes the products of routed experts, with one launch per product of the weight.
pub(in super::super) fn launch(
    gpu: &Gpu,
    launch: Launch,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    operands.for_each_product(problem, |_, operands| one(gpu, launch, &problem.one_product(), operands))
}

/// Computes the gated linear unit of the two products of the weight, `[2, E, N, K]`, the gate's
/// first: `operands.y` has the rows of one.
pub(in super::super) fn launch_glu(
    gpu: &Gpu,
    Launch { experts, cubes }: Launch,
    by: Gate,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    let experts = StreamExperts { rows: StreamRows { glu: Some(by), ..experts.rows }, ..experts };
    one(gpu, Launch { experts, cubes }, &problem.one_product(), operands)
}

fn one(
    gpu: &Gpu,
    Launch { experts, cubes }: Launch,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    let (Some(ids), Some(routing)) = (operands.ids, problem.routing) else { return Ok(()) };
    check_indices(problem, operands)?;
    let index = |value: usize| CHECK.index(value);
    let arguments = GatherQmmStreamExperts {
        weight: operands.weight.buffers()?,
        x: operands.x.x.buffer()?,
        ids: ids.buffer()?,
        y: operands.y.buffer()?,
        sizes: Sizes {
            n: index(problem.n)?,
            blocks: index(problem.k / BLOCK)?,
            pairs: index(routing.pairs)?,
            share: index(routing.share)?,
            apart: index(routing.experts * problem.n)?,
        },
        ones: ONES,
    };
    // SAFETY: the sizes are the operands', `fit` asked for rows of whole vectors, and nothing is
    // read for an id that is none of the experts'.
    unsafe { gpu.launch(compiled(gpu.target(), experts), [index(cubes)?, 1, 1], arguments) }
}

/// For each format both types of x, and both numbers of rows of x.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    use super::super::problem::Routing;
    use FloatType::{BF16, F16, F32};
    let mut all = Vec::new();
    for (i, &format) in formats.iter().enumerate() {
        for (types, pairs, n) in [([F16, F16], 300, 512), ([BF16, F32], 1200, 2048), ([BF16, BF16], 700, 96)]
        {
            let routing = Some(Routing { experts: 128, pairs, share: 6 });
            let problem = Problem { routing, batches: pairs, ..Problem::example(format, types, [1, n, 512]) };
            let Some(launch) = fit(target.caps(), &problem) else { continue };
            let glu = Gate::ALL.get(i).copied().filter(|_| n == 512);
            let rows = StreamRows { glu, ..launch.experts.rows };
            all.push(launch.experts);
            all.push(StreamExperts { rows, ..launch.experts });
        }
    }
    all.into_iter().map(|config| compiled(target, config).code()).collect()
}
