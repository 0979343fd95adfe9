//! A few rows of x as a [stream](super::stream), from Hopper on: planes of their own copy the
//! weight and x into a ring of stages in shared memory, and the others multiply what has come. As
//! in [`mma_rows`](super::mma_rows) codes are multiplied as exact integers, the 8 columns of a
//! product are rows of x, and all 4 units that share a row of the weight have parts of the same
//! group:
//!
//! ```text
//! unit 4 g + t      weight: quarter t of a group, of rows g and g + 8     x: quarter t, row g
//!                   sums:   rows 2 t and 2 t + 1 of x, rows g and g + 8 of the weight
//! ```
//!
//! A cube takes some tiles of 16 rows of the weight at a time, and each of its planes one of eight
//! slices of K. So sums are added up in the same order whatever the number of rows of x: a row's
//! bits do not depend on the others.

#![allow(unsafe_code)] // Launches.

pub(super) mod config;
pub(super) mod copy;
mod multiply;

pub(crate) use config::StreamRows;

use super::super::gpu::cube_rows::check_indices;
use super::super::input::CHECK;
use super::super::problem::{Operands, Problem};
use super::mma_vec::make_x::Fast;
use super::numbers::ONES;
use super::parts::{Ends, place};
use crate::KernelError;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::compile::Target;
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::cuda::ptx::{self, address};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::layout::with_components;
use crate::ops::glu::Gate;
use crate::ops::glu::gpu as gates;
use config::{BLOCK, COPIERS, FEW_ROWS, MOST_ROWS, SLICES};
use copy::{copy_weight, copy_x};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
#[cfg(test)]
use lowbit_formats::Format;
use multiply::{Place, multiply_block};

/// The meeting point of the planes that multiply: 0 is for all units.
const MEETING: u32 = 1;

/// A configuration, and the cubes that share the weight: one per multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub rows: StreamRows,
    pub cubes: usize,
}

impl Launch {
    /// The same, whose result is the [`glu`](crate::ops::glu()) of both halves of the columns.
    pub fn with_glu(self, by: Gate) -> Self {
        Self { rows: StreamRows { glu: Some(by), ..self.rows }, ..self }
    }
}

/// The configuration for the product, if the kernel takes it.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<Launch> {
    let passes = problem.m.div_ceil(FEW_ROWS);
    // Wide tiles are 128 rows of a weight each: one of few rows leaves most multiprocessors idle.
    let narrow = problem.n * passes <= 96 * caps.multiprocessors;
    // They do not store f32 of 16-bit rows, as logits are: the portable tile of f32 would be taken.
    let logits = problem.y_type != problem.x_type;
    let worth = passes == 1 || problem.m <= MOST_ROWS && (narrow || logits);
    let few = problem.m >= 2 && worth && problem.batches == 1 && problem.routing.is_none();
    if !few || problem.source.is_some() || !problem.vectors {
        return None;
    }
    let rows = StreamRows::new(caps, problem)?;
    Some(Launch { rows, cubes: rows.groups(problem.n).min(caps.multiprocessors) })
}

/// Addresses in shared memory of the content of all stages.
#[derive(CubeType)]
pub(super) struct Stages {
    codes: u32,
    scales: u32,
    biases: u32,
    pub x: u32,
}

/// A ring of stages, and how far a plane is in it. Each stage has a barrier for when it is full,
/// and one for when it is empty.
#[derive(CubeType)]
pub(super) struct Ring {
    pub barriers: u32,
    pub stage: u32,
    pub phase: u32,
}

#[cube]
impl Ring {
    /// Makes the barriers.
    pub fn begin(&self, #[comptime] config: StreamRows) {
        #[unroll]
        for i in 0..comptime!(config.stages as u32) {
            ptx::barrier(self.barriers + comptime!(i * 16), comptime!(2 * 32 * COPIERS));
            ptx::barrier(self.barriers + comptime!(i * 16 + 8), comptime!(config.planes()));
        }
        ptx::publish();
    }

    fn wait_full(&self) {
        ptx::wait(self.barriers + self.stage * 16u32, self.phase);
    }

    /// The first time round, all stages are empty.
    pub fn wait_empty(&self) {
        ptx::wait(self.barriers + self.stage * 16u32 + 8u32, self.phase ^ 1u32);
    }

    pub fn arrive_with_copies(&self) {
        ptx::arrive_with_copies(self.barriers + self.stage * 16u32);
    }

    /// This plane has read its part of the stage.
    fn release(&self) {
        sync_plane();
        ptx::arrive_once(self.barriers + self.stage * 16u32 + 8u32);
    }

    pub fn advance(&mut self, #[comptime] config: StreamRows) {
        self.stage += 1u32;
        if self.stage == comptime!(config.stages as u32) {
            self.stage = 0u32;
            self.phase ^= 1u32;
        }
    }
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    n: u32,
    m: u32,
    /// Blocks of a row.
    blocks: u32,
    ends: Ends,
}

/// `y[m, n] = sum over k of x[m, k] * weight[n, k]`, each part of the columns by itself.
#[kernel(waits)]
fn quantized_matmul_stream_rows<S: Int, B: Int, Y: Int, V: Size>(
    #[early] weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    y: &mut [Y],
    sizes: Sizes,
    ones: u32,
    #[comptime] config: StreamRows,
) {
    let stages = stages(config);
    let barriers = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(config.stages, 128usize);
    let mut ring = Ring { barriers: address(&barriers), stage: 0u32.runtime(), phase: 0u32.runtime() };
    if UNIT_POS_X == 0u32 {
        ring.begin(config);
    }
    sync_cube();
    if UNIT_POS_X >= comptime!((config.multiplying() + 32 * COPIERS) as u32) {
        copy_x(x, &sizes, &stages, &mut ring, config);
    } else if UNIT_POS_X >= comptime!(config.multiplying() as u32) {
        copy_weight::<S, B, V>(weight, &sizes, &stages, &mut ring, config);
    } else {
        let mut partial = Shared::<[f32]>::new_slice(config.partial());
        let mut group = CUBE_POS_X;
        while group < sizes.n.div_ceil(comptime!(config.rows() as u32)) {
            let sums = multiply_group(&stages, &mut ring, sizes.blocks, ones, config);
            store::<Y>(&sums, &mut partial, y, &sizes, group, config);
            group += CUBE_COUNT_X;
        }
    }
}

/// Room for all stages.
#[cube]
pub(super) fn stages(#[comptime] config: StreamRows) -> Stages {
    let rows = comptime!(config.stages * config.rows());
    let (scale_pitch, bias_pitch) = comptime!(config.scale_pitches());
    Stages {
        codes: room(comptime!(rows * config.code_pitch())),
        scales: room(comptime!(rows * scale_pitch)),
        biases: room(comptime!(rows * bias_pitch)),
        x: room(comptime!(config.stages * config.m_tile() * config.x_pitch())),
    }
}

/// The address of so many bytes of shared memory.
#[cube]
fn room(#[comptime] bytes: usize) -> u32 {
    let memory =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!((bytes / 16).max(1)), 128usize);
    address(&memory)
}

/// A unit's sums of the group of tiles that comes next in the ring, over its plane's slice of K.
#[cube]
pub(super) fn multiply_group(
    stages: &Stages,
    ring: &mut Ring,
    blocks: u32,
    ones: u32,
    #[comptime] config: StreamRows,
) -> Array<f32> {
    let (unit, plane) = (UNIT_POS_X % 32u32, UNIT_POS_X / 32u32);
    let (slice, strip) = (plane % comptime!(SLICES as u32), plane / comptime!(SLICES as u32));
    let (g, t) = (unit / 4u32, unit % 4u32);
    let row = strip * comptime!(16 * config.n_tiles() as u32) + g;
    let codes = ptx::kept(
        stages.codes
            + row * comptime!(config.code_pitch() as u32)
            + t * comptime!(config.part_bytes() as u32),
    );
    let x = ptx::kept(
        stages.x + g * comptime!(config.x_pitch() as u32) + t * comptime!(2 * config.part() as u32),
    );
    let (scale_pitch, bias_pitch) = comptime!(config.scale_pitches());
    let (scale_blocks, scale_step) = comptime!((config.scale_step().1 as u32, config.scale_step().0 as u32));
    let (bias_blocks, bias_step) = comptime!((config.bias_step().1 as u32, config.bias_step().0 as u32));
    let scales = ptx::kept(stages.scales + row * scale_pitch as u32);
    let biases = ptx::kept(stages.biases + row * bias_pitch as u32);
    let count = comptime!(4 * config.octets * config.n_tiles());
    let mut sums = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = 0.0;
    }
    let mut first = 0u32;
    while first < blocks {
        ring.wait_full();
        let a_stage = ring.stage * comptime!(config.rows() as u32);
        #[unroll]
        for turn in 0..comptime!(config.blocks() / SLICES) {
            let block = slice + comptime!((turn * SLICES) as u32);
            if first + block < blocks {
                let place = Place {
                    codes: codes
                        + a_stage * comptime!(config.code_pitch() as u32)
                        + block * comptime!(config.block_bytes() as u32),
                    x: x + ring.stage * comptime!((config.m_tile() * config.x_pitch()) as u32)
                        + block * comptime!(2 * BLOCK as u32),
                    scales: scales + a_stage * scale_pitch as u32 + block / scale_blocks * scale_step,
                    biases: biases + a_stage * bias_pitch as u32 + block / bias_blocks * bias_step,
                    strip,
                };
                multiply_block(&place, &mut sums, ones, config);
            }
        }
        ring.release();
        ring.advance(config);
        first += comptime!(config.blocks() as u32);
    }
    sums
}

/// Adds up the slices' sums of a group of tiles, and stores those that there are rows for.
#[cube]
fn store<Y: Int>(
    sums: &Array<f32>,
    partial: &mut Shared<[f32]>,
    y: &mut [Y],
    sizes: &Sizes,
    group: u32,
    #[comptime] config: StreamRows,
) {
    let n_columns = if comptime!(config.glu.is_some()) { sizes.n / 2u32 } else { sizes.n };
    #[unroll]
    for f in 0..comptime!(config.octets) {
        share_sums(sums, partial, f, config);
        let columns = comptime!(config.columns());
        let mut i = UNIT_POS_X as usize;
        while i < comptime!(8 * config.columns()) {
            let (row, c) = (i / columns, i % columns);
            let n = group * columns as u32 + c as u32;
            let m = CUBE_POS_Y * comptime!(config.m_tile() as u32) + comptime!(8 * f as u32) + row as u32;
            if n < n_columns && m < sizes.m {
                let value = shared_value(&*partial, row, c, config);
                let mut at = m * n_columns + n;
                if comptime!(config.glu.is_none()) {
                    at = place(&sizes.ends, sizes.m, sizes.n, m, n);
                }
                y[at as usize] = Y::cast_from(narrow(value, config.y_type));
            }
            i += comptime!(config.multiplying());
        }
    }
}

/// Puts a unit's sums for the `f`-th 8 rows of x where all units that multiply find them, when all
/// have read what was there.
#[cube]
pub(super) fn share_sums(
    sums: &Array<f32>,
    partial: &mut Shared<[f32]>,
    #[comptime] f: usize,
    #[comptime] config: StreamRows,
) {
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    let (slice, strip) = (plane % SLICES, plane / SLICES);
    let a_row = comptime!(config.partial_row());
    let first = (slice * 8 + unit % 4 * 2) * a_row + strip * comptime!(16 * config.n_tiles()) + unit / 4;
    ptx::meet(MEETING.runtime(), comptime!(config.multiplying()));
    #[unroll]
    for tile in 0..comptime!(config.n_tiles()) {
        if strip * comptime!(config.n_tiles()) + tile < comptime!(config.tiles) {
            #[unroll]
            for i in 0..4usize {
                let at = comptime!(i % 2 * a_row + 16 * tile + 8 * (i / 2));
                partial[first + at] = sums[comptime!((tile * config.octets + f) * 4 + i)];
            }
        }
    }
    ptx::meet(MEETING.runtime(), comptime!(config.multiplying()));
}

/// The result's value of row `row`, of 8, and column `c` of the group of tiles.
#[cube]
pub(super) fn shared_value(
    partial: &Shared<[f32]>,
    row: usize,
    c: usize,
    #[comptime] config: StreamRows,
) -> f32 {
    let first = row * comptime!(config.partial_row());
    match comptime!(config.glu) {
        Some(by) => {
            let at = first + c / 8 * 16 + c % 8;
            let gate = rounded(of_slices(partial, at, config), config.y_type);
            let up = rounded(of_slices(partial, at + 8, config), config.y_type);
            gates::glu::<Fast>(up, gate, by)
        }
        None => of_slices(partial, first + c, config),
    }
}

/// The sum of all slices' sums at `at`.
#[cube]
fn of_slices(partial: &Shared<[f32]>, at: usize, #[comptime] config: StreamRows) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for slice in 0..SLICES {
        sum += partial[comptime!(slice * 8 * config.partial_row()) + at];
    }
    sum
}

/// A value as it would be stored.
#[cube]
fn rounded(value: f32, #[comptime] dtype: FloatType) -> f32 {
    widen(narrow(value, dtype), dtype)
}

/// The kernel for `config`, its types chosen by what the layout stores.
fn compiled(target: &Target, config: StreamRows) -> Kernel<QuantizedMatmulStreamRows<'static>> {
    with_components!(config.layout, S, B => with_storage!(config.y_type, Y => {
        QuantizedMatmulStreamRows::kernel::<S, B, Y>(target, config.units(), config.layout.vector(), config)
    }))
}

/// Computes the product.
pub(in super::super) fn launch(
    gpu: &Gpu,
    Launch { rows, cubes }: Launch,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    check_indices(problem, operands)?;
    let index = |value: usize| CHECK.index(value);
    let arguments = QuantizedMatmulStreamRows {
        weight: operands.weight.buffers()?,
        x: operands.x.x.buffer()?,
        y: operands.y.buffer()?,
        sizes: Sizes {
            n: index(problem.n)?,
            m: index(problem.m)?,
            blocks: index(problem.k / BLOCK)?,
            ends: Ends::new(operands.widths, problem.n)?,
        },
        ones: ONES,
    };
    let cubes = [index(cubes)?, index(problem.m.div_ceil(rows.m_tile()))?, 1];
    // SAFETY: the sizes are the operands'; x has rows of whole vectors, as `fit` asked for.
    unsafe { gpu.launch(compiled(gpu.target(), rows), cubes, arguments) }
}

/// For each format both types of x, and each number of rows of x.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut all = Vec::new();
    for &format in formats {
        for (types, m, n) in
            [([F16, F16], 8, 12352), ([BF16, F32], 16, 10240), ([F16, F16], 32, 4096), ([BF16, BF16], 24, 96)]
        {
            all.push(Problem::example(format, types, [m, n, 4096]));
        }
    }
    let rows = all.iter().filter_map(|problem| StreamRows::new(target.caps(), problem));
    let glu = |(i, rows): (usize, StreamRows)| {
        let gate = Gate::ALL.get(i / 3).filter(|_| i.is_multiple_of(3));
        StreamRows { glu: gate.copied(), ..rows }
    };
    let all = rows.enumerate().flat_map(|(i, rows)| [rows, glu((i, rows))]);
    all.map(|rows| compiled(target, rows).code()).collect()
}
