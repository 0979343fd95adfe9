//! The product on a GPU for many rows of x, by cooperative matrices: `VK_KHR_cooperative_matrix` on
//! Vulkan, `simdgroup_matrix` on Metal. A cube has a tile of y. It brings x and the weight, decoded
//! once and rounded to x's type, to shared memory step by step (`stage.rs`); its planes multiply
//! matrices of the size that the device reports, with sums in f32 (`config.rs`).

#![allow(unsafe_code)] // Launches.

mod config;
mod stage;

pub(crate) use config::CmmaTile;

use super::super::input::CHECK;
use super::super::problem::{Operands, Problem};
use super::sorted::{self, Tiles, WRONG};
use crate::KernelError;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::compile::Target;
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::decode::INTEGERS;
use crate::gpu::float::{narrow, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::layout::with_components;
use crate::gpu::matrices::{VECTOR, all_zeros};
use cubecl_core as cubecl;
use cubecl_core::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl_core::prelude::*;
use half::{bf16, f16};
use lowbit_formats::FloatType;
use stage::{Block, Rows};

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    n: u32,
    /// Runs of a row.
    runs: u32,
    /// Rows of x per batch; with a list, all.
    m: u32,
    /// Tiles of these rows; with a list, all.
    m_tiles: u32,
    /// Listed rows that have the same row of x.
    share: u32,
}

/// A matrix that is loaded from vectors.
type Operand<E> = Matrix<Vector<E, Const<4>>>;

/// `y[b, m, n] = sum over k of x[b, m, k] * weight[b, n, k]`, of x in `E`s. `list` is [`Tiles`]'
/// where there is one.
#[kernel]
fn quantized_matmul_cmma_tile<S: Int, B: Int, E: Float, Y: Int, V: Size>(
    weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    list: &[u32],
    y: &mut [Y],
    sizes: Sizes,
    integers: u32,
    #[comptime] config: CmmaTile,
) {
    let tile = CUBE_POS_X;
    let mut batch = tile / sizes.m_tiles;
    let column0 = CUBE_POS_Y * comptime!(config.cut.n_tile as u32);
    let row0 = tile % sizes.m_tiles * comptime!(config.cut.m_tile as u32);
    let (mut first, mut m) = (batch * sizes.m + row0, sizes.m - row0);
    if comptime!(config.listed) {
        batch = list[tile as usize];
        first = sizes.m_tiles + tile * comptime!(config.cut.m_tile as u32);
        m = sizes.m;
    }
    let rows = Rows { first: first as usize, m: m as usize, share: sizes.share };
    if comptime!(config.listed) {
        if batch == WRONG {
            store_nan::<Y>(list, y, &rows, (column0, sizes.n), config);
        }
        if batch >= WRONG {
            terminate!();
        }
    }
    let row = comptime!(config.row());
    let mut xs =
        Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(comptime!(config.cut.m_tile * row), 16usize);
    let mut weights =
        Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(comptime!(config.cut.n_tile * row), 16usize);
    let sums = all_zeros(comptime!(config.sums().0 * config.sums().1), config.matrices);
    let block = Block {
        x_rows: stage::x_rows(list, &rows, config),
        weight_row: (batch * sizes.n + column0) as usize,
        n: (sizes.n - column0) as usize,
        runs: sizes.runs as usize,
    };
    let runs = block.runs;
    let steps = (runs + comptime!(config.runs_of_row() - 1)) / comptime!(config.runs_of_row());
    let mut fetched = stage::none::<S, B>(config);
    let late = comptime!(config.loads_x_late());
    stage::fetch_weight::<S, B, V>(weight, &mut fetched, &block, 0usize, config);
    if comptime!(!late) {
        stage::fetch_x::<S, B>(x, &mut fetched, &block, 0usize, config);
    }
    let mut step = 0usize;
    while step < steps {
        if comptime!(late) {
            stage::fetch_x::<S, B>(x, &mut fetched, &block, step, config);
        }
        stage::stage::<S, B, E>(&fetched, &mut xs, &mut weights, (step, runs), integers, config);
        // On its way while this step is multiplied.
        let next = step + 1;
        if next < steps {
            stage::fetch_weight::<S, B, V>(weight, &mut fetched, &block, next, config);
            if comptime!(!late) {
                stage::fetch_x::<S, B>(x, &mut fetched, &block, next, config);
            }
        }
        sync_cube();
        multiply::<E>(&xs, &weights, &sums, config);
        sync_cube();
        step = next;
    }
    store::<Y>(&sums, list, y, &rows, (column0, sizes.n), config);
}

/// Adds the products of what is in shared memory to the plane's sums.
#[cube]
fn multiply<E: Float>(
    xs: &Shared<[Vector<E, Const<4>>]>,
    weights: &Shared<[Vector<E, Const<4>>]>,
    sums: &Sequence<Matrix<f32>>,
    #[comptime] config: CmmaTile,
) {
    let (m, n, k) = comptime!((config.matrices.m, config.matrices.n, config.matrices.k));
    let (cut, row, pitch) = comptime!((config.cut, config.row(), config.pitch() as u32));
    let (m_sums, n_sums) = comptime!(config.sums());
    let plane = PLANE_POS as usize;
    let x_at = plane / cut.n_planes * comptime!(m_sums * m * row);
    let weight_at = plane % cut.n_planes * comptime!(n_sums * n * row);
    if plane < comptime!(config.planes()) {
        #[unroll]
        for part in 0..comptime!(cut.step / k) {
            let mut left = Sequence::<Operand<E>>::new();
            #[unroll]
            for i in 0..m_sums {
                let at = x_at + comptime!(i * m * row + part * k / VECTOR);
                let xs = &xs[at..at + comptime!(m * row)];
                left.push(Operand::<E>::from_slice(
                    MatrixIdent::A,
                    m,
                    n,
                    k,
                    MatrixLayout::RowMajor,
                    xs,
                    pitch,
                ));
            }
            #[unroll]
            for j in 0..n_sums {
                let at = weight_at + comptime!(j * n * row + part * k / VECTOR);
                let weights = &weights[at..at + comptime!(n * row)];
                // A row of the weight is a column of what x is multiplied with.
                let right =
                    Operand::<E>::from_slice(MatrixIdent::B, m, n, k, MatrixLayout::ColMajor, weights, pitch);
                #[unroll]
                for i in 0..m_sums {
                    let sum = sums.index(comptime!(i * n_sums + j));
                    cmma::execute(left.index(i), &right, sum, sum);
                }
            }
        }
    }
}

/// Writes a plane's sums to y, whose rows have `columns.1` columns, from column `columns.0` on:
/// matrix by matrix through shared memory, for y has edges.
#[cube]
fn store<Y: Int>(
    sums: &Sequence<Matrix<f32>>,
    list: &[u32],
    y: &mut [Y],
    rows: &Rows,
    columns: (u32, u32),
    #[comptime] config: CmmaTile,
) {
    let (of_m, of_n) = comptime!((config.matrices.m, config.matrices.n));
    let cut = comptime!(config.cut);
    let (m_sums, n_sums) = comptime!(config.sums());
    let plane = PLANE_POS as usize;
    let mut passed = Shared::<[f32]>::new_aligned_slice(comptime!(config.planes() * of_m * of_n), 16usize);
    let own = plane * comptime!(of_m * of_n);
    let row0 = plane / cut.n_planes * comptime!(m_sums * of_m);
    let column0 = plane % cut.n_planes * comptime!(n_sums * of_n);
    if plane < comptime!(config.planes()) {
        #[unroll]
        for i in 0..comptime!(m_sums * n_sums) {
            let sum = sums.index(i);
            cmma::store(
                &mut passed[own..own + comptime!(of_m * of_n)],
                sum,
                of_n as u32,
                MatrixLayout::RowMajor,
            );
            sync_plane();
            let row0 = row0 + comptime!(i / n_sums * of_m);
            let column0 = column0 + comptime!(i % n_sums * of_n);
            let mut place = UNIT_POS_PLANE as usize;
            while place < comptime!(of_m * of_n) {
                let row = rows.of_y(list, row0 + place / of_n, config);
                let at = (row, (column0 + place % of_n) as u32);
                store_bits::<Y>(narrow(passed[own + place], config.y_type), y, at, columns);
                place += PLANE_DIM as usize;
            }
            sync_plane();
        }
    }
}

/// Writes NaN where [`store`] writes sums.
#[cube]
fn store_nan<Y: Int>(
    list: &[u32],
    y: &mut [Y],
    rows: &Rows,
    columns: (u32, u32),
    #[comptime] config: CmmaTile,
) {
    let (m_tile, n_tile) = comptime!((config.cut.m_tile, config.cut.n_tile));
    let mut place = UNIT_POS_X as usize;
    while place < comptime!(m_tile * n_tile) {
        let at = (rows.of_y(list, place / n_tile, config), (place % n_tile) as u32);
        store_bits::<Y>(u32::MAX.runtime(), y, at, columns);
        place += comptime!(config.units());
    }
}

/// Writes `bits` to row `at.0` of y, if there is such a row, and column `at.1` after the first of
/// `columns`.
#[cube]
fn store_bits<Y: Int>(bits: u32, y: &mut [Y], at: (u32, u32), columns: (u32, u32)) {
    let (row, column) = (at.0, columns.0 + at.1);
    if row != u32::MAX && column < columns.1 {
        y[(row * columns.1 + column) as usize] = Y::cast_from(bits);
    }
}

/// The configuration for the product, if the device has matrices for it.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<CmmaTile> {
    CmmaTile::new(caps, problem).filter(|config| !config.listed)
}

/// The configuration for a product of routed experts, if there are enough pairs for sorting them by
/// expert to pay.
pub(in super::super) fn fit_experts(caps: &Caps, problem: &Problem) -> Option<CmmaTile> {
    CmmaTile::new(caps, problem).filter(|config| config.listed)
}

fn compiled(target: &Target, config: CmmaTile) -> Kernel<QuantizedMatmulCmmaTile<'static>> {
    macro_rules! of {
        ($element:ty) => {
            with_components!(config.layout, S, B => with_storage!(config.y_type, Y => {
                QuantizedMatmulCmmaTile::kernel::<S, B, $element, Y>(
                    target, config.units(), config.layout.vector(), config,
                )
            }))
        };
    }
    match config.x_type {
        FloatType::BF16 => of!(bf16),
        _ => of!(f16),
    }
}

/// Computes the product, whose x has whole runs.
pub(in super::super) fn launch(
    gpu: &Gpu,
    config: CmmaTile,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    problem.check_indices(operands.weight)?;
    launch_tiles(gpu, config, &Tiles::of_rows(problem, config.cut.m_tile), problem, operands)
}

/// Computes the product of routed experts. One sort and one launch per product of the weight.
pub(in super::super) fn launch_experts(
    gpu: &Gpu,
    config: CmmaTile,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    problem.check_indices(operands.weight)?;
    sorted::for_each_sorted(gpu, config.cut.m_tile, problem, operands, |tiles, operands| {
        launch_tiles(gpu, config, tiles, problem, operands)
    })
}

/// `x` in `tiles` times `weight` into `y`.
fn launch_tiles(
    gpu: &Gpu,
    config: CmmaTile,
    tiles: &Tiles<'_>,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    let index = |value: usize| CHECK.index(value);
    let (m, m_tiles, share) = match tiles.list {
        Some((_, share)) => (tiles.m / share, tiles.count, share),
        None => (tiles.m, tiles.m.div_ceil(config.cut.m_tile), 1),
    };
    let sizes = Sizes {
        n: index(problem.n)?,
        runs: index(problem.runs())?,
        m: index(m)?,
        m_tiles: index(m_tiles)?,
        share: index(share)?,
    };
    let x = operands.x.x.buffer()?;
    let arguments = QuantizedMatmulCmmaTile {
        weight: operands.weight.buffers()?,
        x,
        list: tiles.list.map_or(x, |(list, _)| list.into()),
        y: operands.y.buffer()?,
        sizes,
        integers: INTEGERS,
    };
    // Tiles of the same rows of the weight run at the same time, so that it is read from memory
    // once.
    let cubes = [index(tiles.count)?, index(problem.n.div_ceil(config.cut.n_tile))?, 1];
    // SAFETY: the sizes are the operands', and as many tiles were sorted.
    unsafe { gpu.launch(compiled(gpu.target(), config), cubes, arguments) }
}

/// Each format, each cut, and each type of x and y that the device has.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use super::super::problem::Routing;
    use lowbit_formats::Format;
    let of = |format, types| CmmaTile::all(target.caps(), &Problem::example(format, types, [64; 3]));
    let formats = super::super::tests::gpu_formats();
    let mut configs: Vec<_> =
        formats.into_iter().flat_map(|format| of(format, [FloatType::F16; 2]).pop()).collect();
    for dtype in [FloatType::F16, FloatType::BF16] {
        configs.extend(of(Format::Q4_0, [dtype; 2]));
        configs.extend(of(Format::Q4_0, [dtype, FloatType::F32]).pop());
    }
    let routing = Some(Routing { experts: 8, pairs: 256, share: 2 });
    let experts =
        Problem { batches: 256, routing, ..Problem::example(Format::Q4_K, [FloatType::F16; 2], [1, 64, 64]) };
    configs.extend(CmmaTile::new(target.caps(), &experts));
    configs.into_iter().map(|config| compiled(target, config).code()).collect()
}
