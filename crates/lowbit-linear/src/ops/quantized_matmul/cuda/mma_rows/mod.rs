//! The product with some rows of x, 8 to 32, on CUDA's tensor cores: as [`mma_vec`](super::mma_vec)
//! an exact one, of codes as integers. All 4 units that share a row of the weight have parts of the
//! same group, so that the 8 columns of a product are 8 rows of x, and what is decoded serves all
//! of them:
//!
//! ```text
//! unit 4 g + t      weight: quarter t of a group, of rows g and g + 8     x: quarter t, row g
//!                   sums:   rows 2 t and 2 t + 1 of x, rows g and g + 8 of the weight
//! ```
//!
//! Quarters of a group are fewer bytes than one load can have: with up to 5 rows of x `mma_vec` is
//! faster.
//!
//! If each row of x chooses its batch of the weight, a cube has a batch, and looks for its rows
//! itself: see `experts.rs`.

#![allow(unsafe_code)] // Launches.

mod config;
mod experts;
mod products;
mod terms;
mod weight;

pub(crate) use config::MmaRows;

use super::super::gpu::cube_rows::{Sizes, check_indices, cube_rows, cubes};
use super::super::input::CHECK;
use super::super::problem::{Operands, Problem};
use super::numbers::{Numbers, ONES};
use super::staging::{Chunk, Rows, Staged, stage, store_sums};
use crate::KernelError;
use crate::gpu::caps::Caps;
use crate::gpu::compile::{Target, early, overlap};
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::float::with_storage;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::layout::{Codes, Layout, RUN, with_components};
use crate::gpu::{CUBES, Gpu};
use config::STEP;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use experts::MOST_IDS;
use lowbit_formats::FloatType;
#[cfg(test)]
use lowbit_formats::Format;
use products::{add_scaled, addresses, multiply_group, of_step, scaling, sum_groups};
use terms::{keep_terms, load_terms};
use weight::Weight;

/// Rows of x from which on the 8 columns of tensor cores' products are rows of x alone.
pub(in super::super) const FROM: usize = 6;

/// True if a device has this kernel for a layout and a type of x: codes that the type has as
/// numbers, in groups whose quarters are whole words and whole pairs.
pub(in super::super) fn supports(caps: &Caps, layout: Layout, x_type: FloatType) -> bool {
    if !matches!(layout.codes, Codes::Integer { .. }) || !caps.tensor_cores {
        return false;
    }
    let bits = match x_type {
        FloatType::F32 => 0,
        FloatType::F16 => 8,
        FloatType::BF16 => 6,
    };
    let (part, pairs) = (config::group(layout) / 4, Numbers::new(layout, x_type).distance() * 2);
    layout.bits <= bits && (part * layout.bits).is_multiple_of(32) && part.is_multiple_of(pairs.max(8))
}

/// The configuration for the product, if the kernel takes it.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<MmaRows> {
    let fits = problem.m >= FROM
        && problem.source.is_none()
        && problem.routing.is_none()
        && supports(caps, problem.layout, problem.x_type);
    fits.then(|| MmaRows::new(caps, problem))
}

/// The configuration for a product of routed experts, if most experts have no more pairs than one
/// cube takes, so that each reads its weight once without sorting them first. 4096 pairs would gain
/// 5 % at the best, and lose where a few experts are chosen by most tokens.
pub(in super::super) fn fit_experts(caps: &Caps, problem: &Problem) -> Option<MmaRows> {
    let routing = problem.routing?;
    let mean = routing.pairs.div_ceil(routing.experts.max(1));
    let few_each = routing.has_many_pairs() && mean + 2 * mean.isqrt() <= 8;
    let fits = few_each
        && routing.pairs <= MOST_IDS
        && routing.experts < CUBES
        && problem.source.is_none()
        && supports(caps, problem.layout, problem.x_type);
    fits.then(|| MmaRows::of_experts(caps, problem, routing.pairs.next_power_of_two().max(512)))
}

/// The product that [`Sizes`] describes, for rows of x that are whole runs.
#[kernel(waits)]
fn quantized_matmul_mma_rows<S: Int, B: Int, Y: Int, V: Size>(
    #[early] components: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    ids: &[u32],
    y: &mut [Y],
    sizes: Sizes,
    ones: u32,
    #[comptime] config: MmaRows,
) {
    // The weight's components.
    early(3usize);
    // The last launch may have written the ids, but not the weight. Without runs there is no later
    // place to wait.
    if comptime!(config.overlaps && !config.listed()) && (sizes.experts > 0 || sizes.runs == 0) {
        overlap();
    }
    let of_cube = if comptime!(config.listed()) {
        experts::batch_of_cube(sizes.experts)
    } else {
        cube_rows(ids, &sizes, config.m_tile, 1usize)
    };
    let (n, runs) = (sizes.n as usize, sizes.runs as usize);
    let run = of_cube.x_row * runs;
    let mut weight = Weight::new(components, &of_cube, n, runs, config);
    let mut shared = shares(config);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(config.splits * config.m_tile * config.n_tile()));
    weight.fetch_first(config);
    // The number of turns, each of as many rows as a cube takes: one, or up to where its list ends.
    let mut all = 1usize.runtime();
    let mut found = Shared::<[u16]>::new_slice(comptime!(config.ids.max(1)));
    let mut list = Shared::<[u32]>::new_aligned_slice(config.m_tile, 16usize);
    if comptime!(config.listed()) {
        if comptime!(config.overlaps) {
            overlap();
        }
        all = experts::find_rows(ids, sizes.pairs, sizes.experts, &mut found, config);
    }
    let mut first = 0usize;
    while first < all {
        let rows = if comptime!(config.listed()) {
            if first > 0 {
                // All have stored what they had before.
                sync_cube();
                weight.fetch_first(config);
            }
            experts::next_rows(&found, first, all, sizes.share, &mut list, config)
        } else {
            Rows { count: of_cube.count, run, y: of_cube.t0, list: 0u32.runtime() }
        };
        let sums = product(&mut weight, x, &rows, ones, &mut shared, config);
        store::<S, B, V, Y>(&sums, y, &rows, &weight, &mut partial, config);
        first += config.m_tile;
    }
}

/// The shared memory of a cube for a chunk.
#[derive(CubeType)]
struct Shares {
    x: Staged,
    /// The terms that scale the weight's groups.
    terms: Shared<[Vector<f32, Const<2>>]>,
}

#[cube]
fn shares(#[comptime] config: MmaRows) -> Shares {
    let values = Shared::new_slice(comptime!(config.m_tile * config.x_row()));
    let sums = Shared::new_aligned_slice(comptime!(config.m_tile * config.sum_row()), 16usize);
    let terms = Shared::new_aligned_slice(comptime!(config.n_tile() * config.term_row()), 16usize);
    Shares { x: Staged { values, sums }, terms }
}

/// A unit's sums of the products of the cube's rows, the weight's first step in its words.
#[cube]
fn product<S: Int, B: Int, V: Size>(
    weight: &mut Weight<'_, S, B, V>,
    x: &[Vector<u32, Const<4>>],
    rows: &Rows,
    ones: u32,
    shared: &mut Shares,
    #[comptime] config: MmaRows,
) -> Array<f32> {
    let sums_count = comptime!(4 * config.n_tiles * config.m_octets());
    let mut sums = Array::<f32>::new(sums_count);
    #[unroll]
    for i in 0..sums_count {
        sums[i] = weight.initial;
    }
    let first = addresses(&shared.x, &shared.terms, weight.strip, config);
    let mut step = UNIT_POS_X as usize / 32 % config.splits;
    let mut chunk = 0usize;
    let steps = (weight.runs * comptime!(RUN) + comptime!(STEP - 1)) / comptime!(STEP);
    while chunk < steps {
        if chunk > 0 {
            sync_cube();
        }
        let part = Chunk { first: chunk * comptime!(STEP / RUN), runs: weight.runs };
        let loaded = load_terms(&*weight, &part, config);
        if comptime!(config.overlaps) {
            overlap();
        }
        stage(x, rows, &part, &mut shared.x, config.staging());
        keep_terms(&loaded, &mut shared.terms, config);
        sync_cube();
        sum_groups(first.x, &mut shared.x.sums, config);
        sync_cube();
        let end = min(chunk + comptime!(config.chunk), steps);
        while step < end {
            let addresses = of_step(&first, (step - chunk) as u32, config);
            #[unroll]
            for pair in 0..comptime!(config.groups() / 2) {
                let scaling = scaling(&addresses, pair, config);
                #[unroll]
                for i in 0..2usize {
                    let group = comptime!(2 * pair + i);
                    let products = multiply_group(&weight.words, addresses.x, ones, group, config);
                    // The next step's words are under way while the other groups are multiplied.
                    weight.fetch(step + config.splits, group, config);
                    add_scaled(&products, &scaling, i, &mut sums, config);
                }
            }
            step += config.splits;
        }
        chunk += comptime!(config.chunk);
    }
    sums
}

/// Adds up what the planes have of each sum, and stores those that there are rows for.
#[cube]
fn store<S: Int, B: Int, V: Size, Y: Int>(
    sums: &Array<f32>,
    y: &mut [Y],
    rows: &Rows,
    of: &Weight<'_, S, B, V>,
    partial: &mut Shared<[f32]>,
    #[comptime] config: MmaRows,
) {
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    let (g, t) = (unit / 4, unit % 4);
    let first = (plane % config.splits * config.m_tile + 2 * t) * comptime!(config.n_tile()) + of.strip + g;
    #[unroll]
    for f in 0..comptime!(config.m_octets()) {
        #[unroll]
        for i in 0..comptime!(4 * config.n_tiles) {
            let at = comptime!((8 * f + i % 2) * config.n_tile() + 8 * (i / 2));
            partial[first + at] = sums[comptime!(f * 4 * config.n_tiles + i)];
        }
    }
    sync_cube();
    store_sums::<Y>(&*partial, y, of.n, of.row0, rows, config.stored());
}

/// The kernel for `config`, its types chosen by what the layout stores.
fn compiled(target: &Target, config: MmaRows) -> Kernel<QuantizedMatmulMmaRows<'static>> {
    with_components!(config.layout, S, B => with_storage!(config.y_type, Y => {
        QuantizedMatmulMmaRows::kernel::<S, B, Y>(target, config.units(), config.vector(), config)
    }))
}

/// Computes the product, whose x has whole runs.
pub(in super::super) fn launch(
    gpu: &Gpu,
    config: MmaRows,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    check_indices(problem, operands)?;
    let cubes = cubes(problem, [config.m_tile, config.n_tile()], 1)?;
    let x = operands.x.x.buffer()?;
    let arguments = QuantizedMatmulMmaRows {
        components: operands.weight.buffers()?,
        x,
        ids: x,
        y: operands.y.buffer()?,
        sizes: Sizes::new(problem)?,
        ones: ONES,
    };
    // SAFETY: the sizes are the operands'.
    unsafe { gpu.launch(compiled(gpu.target(), config), cubes, arguments) }
}

/// Computes the product of routed experts: each cube finds its expert's pairs. One launch per
/// product of the weight.
pub(in super::super) fn launch_experts(
    gpu: &Gpu,
    config: MmaRows,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    operands.for_each_product(problem, |ids, operands| {
        let (one, experts) = (problem.one_product(), CHECK.index(operands.weight.rows() / problem.n)?);
        check_indices(&one, operands)?;
        let arguments = QuantizedMatmulMmaRows {
            components: operands.weight.buffers()?,
            x: operands.x.x.buffer()?,
            ids: ids.buffer()?,
            y: operands.y.buffer()?,
            sizes: Sizes { batches: experts, ..Sizes::new(&one)? },
            ones: ONES,
        };
        // One cube more than there are experts takes the pairs whose id is none of theirs.
        let cubes = [CHECK.index(problem.n.div_ceil(config.n_tile()))?, experts + 1, 1];
        // SAFETY: the sizes are the operands', and nothing is read for an id that is none of the
        // experts'.
        unsafe { gpu.launch(compiled(gpu.target(), config), cubes, arguments) }
    })
}

/// Both types of x for each format, both numbers of steps, and rows that follow each other or are
/// found by ids.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    for layout in formats.iter().map(|&format| Layout::of(format)) {
        for (x_type, y_type, m_tile, whole, ids) in [
            (F16, F16, 8, false, 0),
            (BF16, BF16, 16, true, 0),
            (F16, F32, 32, true, 0),
            (F16, F16, 8, true, 512),
            (BF16, BF16, 24, false, 4096),
        ] {
            if supports(target.caps(), layout, x_type) {
                let (n_tiles, splits) = if ids == 512 { (2, 1) } else { (1, 2) };
                let config = MmaRows {
                    layout,
                    x_type,
                    y_type,
                    m_tile,
                    n_tiles,
                    strips: 4,
                    splits,
                    chunk: 4,
                    whole,
                    ids,
                    overlaps: target.overlaps(),
                };
                kernels.push(compiled(target, config.fitting(target.caps().shared_memory)).code());
            }
        }
    }
    kernels
}
