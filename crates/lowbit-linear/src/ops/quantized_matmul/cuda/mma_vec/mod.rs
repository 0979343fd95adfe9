//! The product with few rows of x on CUDA's tensor cores. A plane multiplies 16 rows of the weight
//! with 8 columns at a time; of x's f16 and bf16 values and the weight's codes as numbers of the
//! same type, so that all products are exact.
//!
//! A unit holds one span of two of the weight's rows (two runs, next to each other), and the 4
//! spans that a plane has of a row belong to different groups. So that their sums stay apart, each
//! has a column of its own: it has x where its span is, and zeros elsewhere. The 8 columns are thus
//! 4 spans of 2 rows of x:
//!
//! ```text
//! unit 4 g + t      weight: span t of rows g and g + 8     x: span g % 4 of row g / 4, if t = g % 4
//!                   sums:   spans 2 (t % 2) and the next, row t / 2 of x, rows g and g + 8 of the weight
//! ```
//!
//! One row of x has the columns of both, where a run has a scale of its own: its spans' first runs,
//! then their second ones.

#![allow(unsafe_code)] // Launches.

pub(super) mod config;
pub(super) mod make_x;
pub(super) mod products;
mod runs;
pub(super) mod scales;

pub(crate) use config::MmaVec;

use super::super::gpu::cube_rows::{CubeRows, Sizes, check_indices, cube_rows, cubes};
use super::super::problem::{Operands, Problem, Source, VECTOR};
use super::numbers::{Numbers, ONES};
use super::staging::{Chunk, Rows, stage, store_sums};
use crate::KernelError;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::compile::{Target, early, overlap};
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::cuda::ptx::address;
use crate::gpu::decode::load;
use crate::gpu::float::with_storage;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::layout::{Codes, Layout, with_components};
use config::RUNS;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
use make_x::Inputs;
use products::{Step, multiply_spans, scale_products, x_places};
use scales::{elements, keep_elements, load_elements, staged};
#[cfg(test)]
use {crate::ops::glu::Gate, lowbit_formats::Format};

/// True if a device has this kernel for a layout and a type of x. Wider integers reach the memory's
/// bandwidth without it.
pub(super) fn supports(caps: &Caps, layout: Layout, x_type: FloatType) -> bool {
    let gains = !matches!(layout.codes, Codes::Integer { .. }) || layout.bits <= 6;
    caps.tensor_cores && Numbers::exist(layout, x_type) && gains
}

/// Values of a row of x that are made at the most: every cube makes all of them.
const MOST_MADE: usize = 4096;

/// The configuration for the product, if the kernel takes it. With experts it may make x, a row of
/// which is [`Source::Glu`], itself.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<MmaVec> {
    let gate = match problem.source {
        Some(Source::Glu(by)) => Some(by),
        _ => None,
    };
    let makes_x = gate.is_some()
        && problem.routing.is_some()
        && problem.vectors
        && problem.whole_runs()
        && (1..=MOST_MADE).contains(&problem.k);
    let fits = supports(caps, problem.layout, problem.x_type) && (problem.source.is_none() || makes_x);
    fits.then(|| MmaVec::new(caps, problem, gate.filter(|_| makes_x).map(|by| (by, problem.k / VECTOR))))
}

/// The product that [`Sizes`] describes, for rows of x that are whole runs. Each is made of `x` and
/// `up` where [`MmaVec::made`] says so.
#[kernel(waits)]
fn quantized_matmul_mma_vec<S: Int, B: Int, Y: Int, V: Size>(
    #[early] weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    ids: &[u32],
    y: &mut [Y],
    up: &[Vector<u32, Const<4>>],
    sizes: Sizes,
    ones: u32,
    #[comptime] config: MmaVec,
) {
    // The weight's components.
    early(3usize);
    let sums_count = comptime!(config.n_unit() * config.pairs());
    let stride = comptime!(4 * config.planes);
    // The last launch may have written the ids, but not the weight. Without runs there is no later
    // place to wait.
    if comptime!(config.overlaps) && (sizes.experts > 0 || sizes.runs == 0) {
        overlap();
    }
    let rows = cube_rows(ids, &sizes, config.m_tile, 1usize);
    let n = sizes.n as usize;
    let mut runs = sizes.runs as usize;
    let row0 = CUBE_POS_X as usize * comptime!(16 * config.n_tiles);
    let starts = starts(&rows, row0, n, runs, config);
    let mut run = rows.x_row * runs;
    let x_row = run;
    if comptime!(config.made.is_some()) {
        run = 0;
    }
    let rows_of_x = Rows { count: rows.count, run, y: rows.t0, list: 0u32.runtime() };
    if !rows.known {
        runs = 0;
    }
    let mut sums = Array::<f32>::new(sums_count);
    #[unroll]
    for i in 0..sums_count {
        sums[i] = rows.initial;
    }

    let mut xs = staged(config);
    let places = x_places(address(&xs.values), config);
    let mut made =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(config.x_config().vectors()), 16usize);
    let mut scaling = elements::<S, B>(comptime!(16 * config.n_tiles), 16usize, config);
    let mut words = Array::<u32>::new(comptime!(config.fetched()));
    let mut first = UNIT_POS_X as usize / 32 * 4;
    fetch::<V>(&weight.codes, &starts, first, runs, &mut words, config);
    let mut chunk = 0usize;
    let spans = (runs + comptime!(RUNS - 1)) / RUNS;
    while chunk < spans {
        if chunk > 0 {
            sync_cube();
        }
        let row = rows.batch * n + row0;
        let part = Chunk { first: chunk * RUNS, runs };
        let loaded_scales = load_elements::<S>(&weight.scales, row, n - row0, &part, false, config);
        let loaded_biases = load_elements::<B>(&weight.biases, row, n - row0, &part, true, config);
        if comptime!(config.overlaps) {
            overlap();
        }
        if comptime!(config.made.is_none()) {
            stage(x, &rows_of_x, &part, &mut xs, config.staging());
        } else {
            if chunk == 0 {
                let from = Inputs::new(x, up, x_row * 4, comptime!(config.made_vectors()).runtime());
                make_x::glu(&from, &mut made, config.x_config());
                sync_cube();
            }
            stage(made.as_slice(), &rows_of_x, &part, &mut xs, config.staging());
        }
        keep_elements::<S>(&loaded_scales, &mut scaling.scales, false, config);
        keep_elements::<B>(&loaded_biases, &mut scaling.biases, true, config);
        sync_cube();
        let end = min(chunk + comptime!(config.chunk), spans);
        while first < end {
            let products = multiply_spans(&words, &places, first - chunk, ones, config);
            fetch::<V>(&weight.codes, &starts, first + stride, runs, &mut words, config);
            let at = first - chunk;
            let step = Step { first: at, row: 0usize.runtime(), span: at };
            scale_products(&products, &xs.sums, &scaling, &step, &mut sums, config);
            first += stride;
        }
        chunk += comptime!(config.chunk);
    }
    store::<Y>(&sums, y, n, row0, &rows_of_x, config);
}

/// The first runs of a unit's rows of the weight, where the cube's first is `row0` of its batch.
#[cube]
fn starts(rows: &CubeRows, row0: usize, n: usize, runs: usize, #[comptime] config: MmaVec) -> Array<usize> {
    let mut starts = Array::<usize>::new(comptime!(config.n_unit()));
    #[unroll]
    for r in 0..comptime!(config.n_unit()) {
        // Rows past the last are computed and not stored.
        let row = row0 + UNIT_POS_X as usize % 32 / 4 + comptime!(8 * r);
        starts[r] = (rows.batch * n + min(row, n - 1)) * runs;
    }
    starts
}

/// Loads a unit's spans of the weight, for the step that begins with span `first`.
#[cube]
fn fetch<V: Size>(
    codes: &[Vector<u32, V>],
    starts: &Array<usize>,
    first: usize,
    runs: usize,
    to: &mut Array<u32>,
    #[comptime] config: MmaVec,
) {
    if first * RUNS < runs {
        let run = (first + UNIT_POS_X as usize % 4) * RUNS;
        #[unroll]
        for r in 0..comptime!(config.n_unit()) {
            #[unroll]
            for i in 0..RUNS {
                let at = comptime!((r * RUNS + i) * config.layout.bits);
                // Runs past the last are multiplied with zeros.
                load::<V>(codes, starts[r] + min(run + i, runs - 1), to, at, config.layout);
            }
        }
    }
}

/// Adds up what the units have of each sum, and stores those that there are rows for.
#[cube]
fn store<Y: Int>(
    sums: &Array<f32>,
    y: &mut [Y],
    n: usize,
    row0: usize,
    of: &Rows,
    #[comptime] config: MmaVec,
) {
    let (n_tile, m_tile) = comptime!((16 * config.n_tiles, 2 * config.pairs()));
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    let (g, t) = (unit / 4, unit % 4);
    let mut partial =
        Shared::<[f32]>::new_slice(comptime!(32 * config.n_tiles * config.pairs() * config.planes));
    #[unroll]
    for r in 0..comptime!(config.n_unit()) {
        #[unroll]
        for f in 0..comptime!(config.pairs()) {
            let mut sum = sums[comptime!(r * config.pairs() + f)];
            sum += plane_shuffle_xor(sum, 1u32);
            if comptime!(config.runs_apart()) {
                sum += plane_shuffle_xor(sum, 2u32);
            }
            if t % 2 == 0 {
                partial[(plane * m_tile + comptime!(2 * f) + t / 2) * n_tile + g + comptime!(8 * r)] = sum;
            }
        }
    }
    sync_cube();
    store_sums::<Y>(&partial, y, n, row0, of, config.stored());
}

/// The kernel for `config`, its types chosen by what the layout stores.
fn compiled(target: &Target, config: MmaVec) -> Kernel<QuantizedMatmulMmaVec<'static>> {
    with_components!(config.layout, S, B => with_storage!(config.y_type, Y => {
        QuantizedMatmulMmaVec::kernel::<S, B, Y>(target, 32 * config.planes, config.layout.vector(), config)
    }))
}

/// Computes the product, whose x has whole runs.
pub(in super::super) fn launch(
    gpu: &Gpu,
    config: MmaVec,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    check_indices(problem, operands)?;
    let x = operands.x;
    let arguments = QuantizedMatmulMmaVec {
        weight: operands.weight.buffers()?,
        x: x.x.buffer()?,
        ids: operands.ids.unwrap_or(x.x).buffer()?,
        y: operands.y.buffer()?,
        up: x.other.unwrap_or(x.x).buffer()?,
        sizes: Sizes::new(problem)?,
        ones: ONES,
    };
    let cubes = cubes(problem, [config.m_tile, 16 * config.n_tiles], 1)?;
    // SAFETY: the sizes are the operands', and nothing is read for an id that is none of the
    // experts'.
    unsafe { gpu.launch(compiled(gpu.target(), config), cubes, arguments) }
}

/// Both types of x for each format; where there are more rows of x, for one.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    for layout in formats.iter().map(|&format| Layout::of(format)) {
        for (x_type, y_type, m_tile) in [(F16, F16, 1), (BF16, F32, 1), (F16, F16, 8)] {
            if supports(target.caps(), layout, x_type) {
                let config = MmaVec {
                    layout,
                    x_type,
                    y_type,
                    m_tile,
                    n_tiles: 1,
                    planes: 4,
                    chunk: 64,
                    scaled: 64,
                    made: None,
                    overlaps: target.overlaps(),
                };
                kernels.push(compiled(target, config).code());
                if m_tile == 1 {
                    let gates = if layout == Layout::of(formats[0]) { &Gate::ALL[..] } else { &[Gate::Silu] };
                    kernels.extend(
                        gates
                            .iter()
                            .map(|&by| compiled(target, MmaVec { made: Some((by, 64)), ..config }).code()),
                    );
                }
            }
        }
    }
    kernels
}
