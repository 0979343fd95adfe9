//! The product with few rows of x, on any GPU: a cube takes some rows of the weight and some of x,
//! and its units cut them into runs.

#![allow(unsafe_code)] // Launches.

use super::super::problem::{Operands, Problem};
use super::cube_rows::{CubeRows, Sizes, check_indices, cube_rows, cubes, folds, tile_of_cube};
use crate::KernelError;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::compile::Target;
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::layout::{Layout, RUN, with_components};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
#[cfg(test)]
use lowbit_formats::Format;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatVec {
    pub layout: Layout,
    pub x_type: FloatType,
    pub y_type: FloatType,
    /// Rows of the weight per cube.
    pub n_tile: usize,
    /// Rows of x per cube.
    pub m_tile: usize,
    /// Units per cube.
    pub units: usize,
    /// Units that run in step, or 0 where that differs from launch to launch.
    pub plane: usize,
    /// The rows of the weight take this many times as many cubes as a device launches along a
    /// dimension.
    pub folds: usize,
}

/// The product that [`Sizes`] describes, for rows of x that are whole runs.
#[kernel]
fn quantized_matmul_mat_vec<S: Int, B: Int, Y: Int, V: Size>(
    weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    ids: &[u32],
    y: &mut [Y],
    sizes: Sizes,
    integers: u32,
    #[comptime] config: MatVec,
) {
    let layout = comptime!(config.layout);
    let (n_tile, m_tile) = comptime!((config.n_tile, config.m_tile));
    let groups = comptime!(RUN / layout.group());
    let row0 = tile_of_cube(config.folds) * n_tile;
    let rows = cube_rows(ids, &sizes, m_tile, config.folds);
    let (n, runs) = (sizes.n as usize, sizes.runs as usize);
    let mut run = UNIT_POS_X as usize;
    if !rows.known {
        run = runs;
    }
    let mut sums = Array::<f32>::new(comptime!(m_tile * n_tile));
    #[unroll]
    for i in 0..comptime!(m_tile * n_tile) {
        sums[i] = rows.initial;
    }
    while run < runs {
        let mut values = Array::<f32>::new(comptime!(n_tile * RUN));
        let mut factors = Array::<f32>::new(comptime!(n_tile * groups));
        let mut added = Array::<f32>::new(comptime!(n_tile * groups));
        let mut words = Array::<u32>::new(comptime!(n_tile * layout.bits));
        #[unroll]
        for r in 0..n_tile {
            // Rows past the last are computed and not stored.
            let at = (rows.batch * n + min(row0 + r, n - 1)) * runs + run;
            load::<V>(&weight.codes, at, &mut words, comptime!(r * layout.bits), layout);
            #[unroll]
            for group in 0..groups {
                factors[r * groups + group] =
                    scale::<S, B>(&weight.scales, &weight.biases, at, group, layout);
                added[r * groups + group] = bias::<S, B>(&weight.scales, &weight.biases, at, group, layout);
            }
        }
        #[unroll]
        for r in 0..n_tile {
            #[unroll]
            for i in 0..RUN {
                values[r * RUN + i] = code(&words, comptime!(r * layout.bits), integers, i, layout);
            }
        }
        #[unroll]
        for c in 0..m_tile {
            let row = rows.x_row + min(c, rows.count - 1);
            let mut xs = Array::<f32>::new(RUN);
            let mut x_sums = Array::<f32>::new(groups);
            load_x(x, row * runs + run, &mut xs, &mut x_sums, config);
            #[unroll]
            for r in 0..n_tile {
                let mut sum = sums[c * n_tile + r];
                #[unroll]
                for group in 0..groups {
                    let mut dot = 0.0f32;
                    #[unroll]
                    for i in 0..comptime!(layout.group()) {
                        let i = comptime!(group * layout.group() + i);
                        dot = fma(values[r * RUN + i], xs[i], dot);
                    }
                    if comptime!(factor(layout) != 1.0) {
                        dot *= comptime!(factor(layout));
                    }
                    sum = fma(factors[r * groups + group], dot, sum);
                    if comptime!(layout.biased()) {
                        sum = fma(added[r * groups + group], x_sums[group], sum);
                    }
                }
                sums[c * n_tile + r] = sum;
            }
        }
        run += comptime!(config.units);
    }
    store::<Y>(&sums, y, &rows, n, row0, config);
}

/// A run of x, each value scaled as the weight's code at its place needs it, and the sums of its
/// groups.
#[cube]
fn load_x(
    x: &[Vector<u32, Const<4>>],
    run: usize,
    xs: &mut Array<f32>,
    x_sums: &mut Array<f32>,
    #[comptime] config: MatVec,
) {
    let size = comptime!(config.x_type.size());
    let a_word = comptime!(4 / size);
    #[unroll]
    for group in 0..comptime!(RUN / config.layout.group()) {
        x_sums[group] = 0.0;
    }
    #[unroll]
    for v in 0..comptime!(2 * size) {
        let vector = x[run * comptime!(2 * size) + v];
        #[unroll]
        for j in 0..4usize {
            let word = vector.extract(j);
            #[unroll]
            for h in 0..a_word {
                let i = comptime!((v * 4 + j) * a_word + h);
                let bits = if comptime!(h == 0) {
                    if comptime!(size == 4) { word } else { word & 0xffffu32 }
                } else {
                    word >> 16u32
                };
                let value = widen(bits, config.x_type);
                let group = comptime!(i / config.layout.group());
                x_sums[group] += value;
                xs[i] = value * comptime!(unshift(config.layout, i));
            }
        }
    }
}

/// Adds up what the units have of each sum, and stores those that there are rows for.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn store<Y: Int>(
    sums: &Array<f32>,
    y: &mut [Y],
    of: &CubeRows,
    n: usize,
    row0: usize,
    #[comptime] config: MatVec,
) {
    let n_tile = comptime!(config.n_tile);
    let all = comptime!(config.n_tile * config.m_tile);
    let unit = UNIT_POS_X as usize;
    if comptime!(config.units == config.plane) {
        #[unroll]
        for i in 0..all {
            let sum = plane_sum(sums[i]);
            let (c, r) = comptime!((i / n_tile, i % n_tile));
            if unit == 0 && c < of.count && row0 + r < n {
                y[(of.t0 + c) * n + row0 + r] = Y::cast_from(narrow(sum, config.y_type));
            }
        }
    } else {
        let plane = plane_size(config.plane);
        let mut partial = Shared::<[f32]>::new_slice(comptime!(all * config.units / FEWEST));
        #[unroll]
        for i in 0..all {
            let sum = plane_sum(sums[i]);
            if unit % plane == 0 {
                partial[unit / plane * all + i] = sum;
            }
        }
        sync_cube();
        let (c, r) = (unit / n_tile, unit % n_tile);
        if unit < all && c < of.count && row0 + r < n {
            let mut sum = 0.0f32;
            let mut at = unit;
            while at < comptime!(config.units) / plane * all {
                sum += partial[at];
                at += all;
            }
            y[(of.t0 + c) * n + row0 + r] = Y::cast_from(narrow(sum, config.y_type));
        }
    }
}

/// The smallest planes that there are.
const FEWEST: usize = 4;

#[cube]
fn plane_size(#[comptime] fixed: usize) -> usize {
    if comptime!(fixed == 0) { PLANE_DIM as usize } else { fixed.runtime() }
}

/// Runs of a row that are enough for two planes.
const LONG_ROW: usize = 384;

/// The configuration for the product; any fits.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<MatVec> {
    if problem.source.is_some() {
        return None;
    }
    // Decoded values are used for several rows of x.
    let m_tile = if problem.m == 1 { 1 } else { 4 };
    let most = problem.n.next_power_of_two();
    let (n_tile, units) = match caps.plane {
        // Small planes are a CPU's: one does all, without memory that units share.
        Some(plane @ ..32) => ((32 / problem.layout.bits).clamp(1, 8 / m_tile).min(most), plane),
        // Of 1 to 8 rows by 32 to 256 units, these were the fastest or next to it at 3, 4, 6 and 8
        // bits on an H200.
        plane => {
            let plane = plane.unwrap_or(64);
            (2.min(most), if problem.runs() < LONG_ROW { plane } else { plane.max(64) })
        }
    };
    let plane = caps.plane.unwrap_or(0);
    let Problem { layout, x_type, y_type, .. } = *problem;
    Some(MatVec { layout, x_type, y_type, n_tile, m_tile, units, plane, folds: folds(problem.n, n_tile) })
}

/// The kernel for `config`, its types chosen by what the layout stores.
fn compiled(target: &Target, config: MatVec) -> Kernel<QuantizedMatmulMatVec<'static>> {
    with_components!(config.layout, S, B => with_storage!(config.y_type, Y => {
        QuantizedMatmulMatVec::kernel::<S, B, Y>(target, config.units, config.layout.vector(), config)
    }))
}

/// Computes the product, whose x has whole runs.
pub(in super::super) fn launch(
    gpu: &Gpu,
    config: MatVec,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    check_indices(problem, operands)?;
    let x = operands.x.x;
    let arguments = QuantizedMatmulMatVec {
        weight: operands.weight.buffers()?,
        x: x.buffer()?,
        ids: operands.ids.unwrap_or(x).buffer()?,
        y: operands.y.buffer()?,
        sizes: Sizes::new(problem)?,
        integers: INTEGERS,
    };
    let cubes = cubes(problem, [config.m_tile, config.n_tile], config.folds)?;
    // SAFETY: the sizes are the operands', and ids that are none of the experts' are not read by.
    unsafe { gpu.launch(compiled(gpu.target(), config), cubes, arguments) }
}

/// One of each format and type of x, at sizes of layers, and with a result of another type. With
/// several rows of x the types differ in nothing new.
#[cfg(test)]
pub(in super::super) fn kernels(
    target: &Target,
    formats: &[Format],
    dtypes: &[FloatType],
) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for &format in formats {
        let one = dtypes.iter().map(|&dtype| (1, [dtype; 2]));
        for (m, types) in one.chain([(1, [FloatType::F16, FloatType::F32]), (8, [FloatType::F32; 2])]) {
            let problem = Problem::example(format, types, [m, 4096, 4096]);
            kernels.extend(fit(target.caps(), &problem).map(|config| compiled(target, config).code()));
        }
    }
    kernels
}
