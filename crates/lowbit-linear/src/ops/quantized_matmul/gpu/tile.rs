//! The product on a GPU for many rows of x, on any device: a unit decodes a run of a weight's row
//! once for several rows of x. Units share nothing, so that planes of any width do.

#![allow(unsafe_code)] // Launches.

use super::super::input::CHECK;
use super::super::problem::{Operands, Problem};
use crate::KernelError;
use crate::gpu::caps::Caps;
use crate::gpu::compile::Target;
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::layout::{Layout, RUN, with_components};
use crate::gpu::{CUBES, Gpu};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub layout: Layout,
    /// The type of x and y.
    pub dtype: FloatType,
    /// Rows of the weight per unit.
    pub n_unit: usize,
    /// Units per cube.
    pub units: usize,
}

/// Rows of x per unit.
const M_UNIT: usize = 8;
/// Values of a run that are decoded together.
const PART: usize = 8;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    n: u32,
    /// Runs of a row.
    runs: u32,
    /// Rows of x per batch.
    m: u32,
}

/// `y[b, m, n] = sum over k of x[b, m, k] * weight[b, n, k]`.
#[kernel]
fn quantized_matmul_tile<S: Int, B: Int, Y: Int, V: Size>(
    weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    y: &mut [Y],
    sizes: Sizes,
    integers: u32,
    #[comptime] config: Tile,
) {
    let layout = comptime!(config.layout);
    let n_unit = comptime!(config.n_unit);
    let groups = comptime!(RUN / layout.group());
    let (n, runs, m) = (sizes.n as usize, sizes.runs as usize, sizes.m as usize);
    let batch = CUBE_POS_Z as usize;
    // Neighbours take neighbouring columns of y.
    let column0 = CUBE_POS_X as usize * comptime!(config.units * n_unit) + UNIT_POS_X as usize;
    let row0 = CUBE_POS_Y as usize * M_UNIT;

    let mut sums = Array::<f32>::new(comptime!(M_UNIT * n_unit));
    #[unroll]
    for i in 0..comptime!(M_UNIT * n_unit) {
        sums[i] = 0.0;
    }
    let mut run = 0usize;
    while run < runs {
        let mut words = Array::<u32>::new(comptime!(n_unit * layout.bits));
        let mut factors = Array::<f32>::new(comptime!(n_unit * groups));
        let mut offsets = Array::<f32>::new(comptime!(n_unit * groups));
        #[unroll]
        for c in 0..n_unit {
            // Rows past the last are computed and not stored.
            let at = (batch * n + min(column0 + comptime!(c * config.units), n - 1)) * runs + run;
            load::<V>(&weight.codes, at, &mut words, comptime!(c * layout.bits), layout);
            #[unroll]
            for group in 0..groups {
                factors[c * groups + group] =
                    scale::<S, B>(&weight.scales, &weight.biases, at, group, layout);
                if comptime!(layout.biased()) {
                    offsets[c * groups + group] =
                        bias::<S, B>(&weight.scales, &weight.biases, at, group, layout);
                }
            }
        }
        #[unroll]
        for part in 0..comptime!(RUN / PART) {
            let mut weights = Array::<f32>::new(comptime!(n_unit * PART));
            #[unroll]
            for c in 0..n_unit {
                #[unroll]
                for i in 0..PART {
                    let at = comptime!(part * PART + i);
                    let group = comptime!(c * groups + at / layout.group());
                    let mut value = code(&words, comptime!(c * layout.bits), integers, at, layout);
                    if comptime!(factor(layout) != 1.0) {
                        value *= comptime!(factor(layout));
                    }
                    // The same for all values whose shift is the same.
                    let factor = factors[group] * comptime!(unshift(layout, at));
                    weights[c * PART + i] = if comptime!(layout.biased()) {
                        fma(value, factor, offsets[group])
                    } else {
                        value * factor
                    };
                }
            }
            #[unroll]
            for r in 0..M_UNIT {
                let row = batch * m + min(row0 + r, m - 1);
                let mut xs = Array::<f32>::new(PART);
                load_part(x, row * runs + run, &mut xs, part, config.dtype);
                #[unroll]
                for c in 0..n_unit {
                    #[unroll]
                    for i in 0..PART {
                        sums[r * n_unit + c] = fma(weights[c * PART + i], xs[i], sums[r * n_unit + c]);
                    }
                }
            }
        }
        run += 1;
    }
    #[unroll]
    for r in 0..M_UNIT {
        #[unroll]
        for c in 0..n_unit {
            let column = column0 + comptime!(c * config.units);
            if row0 + r < m && column < n {
                let at = (batch * m + row0 + r) * n + column;
                y[at] = Y::cast_from(narrow(sums[r * n_unit + c], config.dtype));
            }
        }
    }
}

/// Part `part` of run `run` of x.
#[cube]
fn load_part(
    x: &[Vector<u32, Const<4>>],
    run: usize,
    xs: &mut Array<f32>,
    #[comptime] part: usize,
    #[comptime] dtype: FloatType,
) {
    let size = comptime!(dtype.size());
    let vectors = comptime!(PART * size / 16);
    #[unroll]
    for v in 0..vectors {
        let vector = x[run * comptime!(RUN * size / 16) + comptime!(part * vectors + v)];
        #[unroll]
        for j in 0..4usize {
            let word = vector.extract(j);
            let first = comptime!((v * 4 + j) * (4 / size));
            if comptime!(size == 4) {
                xs[first] = widen(word, dtype);
            } else {
                xs[first] = widen(word & 0xffffu32, dtype);
                xs[comptime!(first + 1)] = widen(word >> 16u32, dtype);
            }
        }
    }
}

/// Rows of a weight below which most of a cube's units would be idle: gates of one output.
const NARROW: usize = 16;

/// The configuration for the product, if the weight is wide enough, and the device takes so many
/// cubes.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<Tile> {
    let Problem { m, n, batches, layout, x_type: dtype, .. } = *problem;
    let fits = problem.source.is_none()
        && problem.routing.is_none()
        && n >= NARROW
        && batches <= CUBES
        && m / M_UNIT <= CUBES;
    let (n_unit, units) = match caps.plane {
        // A CPU has few registers.
        Some(plane @ ..32) => (1, plane),
        _ => (2, 64),
    };
    fits.then_some(Tile { layout, dtype, n_unit, units })
}

fn compiled(target: &Target, config: Tile) -> Kernel<QuantizedMatmulTile<'static>> {
    with_components!(config.layout, S, B => with_storage!(config.dtype, Y => {
        QuantizedMatmulTile::kernel::<S, B, Y>(target, config.units, config.layout.vector(), config)
    }))
}

/// Each format, and each type of x.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let formats = super::super::tests::gpu_formats();
    let of_format = formats.into_iter().map(|format| (format, FloatType::F32));
    let of_dtype = [FloatType::F16, FloatType::BF16].map(|dtype| (lowbit_formats::Format::Q4_0, dtype));
    let problems =
        of_format.chain(of_dtype).map(|(format, dtype)| Problem::example(format, [dtype; 2], [64; 3]));
    problems
        .filter_map(|problem| fit(target.caps(), &problem))
        .map(|config| compiled(target, config).code())
        .collect()
}

/// Computes the product, whose x has whole runs.
pub(in super::super) fn launch(
    gpu: &Gpu,
    config: Tile,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    let index = |value: usize| CHECK.index(value);
    let (m, n, runs, batches) = (problem.m, problem.n, problem.runs(), problem.batches);
    problem.check_indices(operands.weight)?;
    let arguments = QuantizedMatmulTile {
        weight: operands.weight.buffers()?,
        x: operands.x.x.buffer()?,
        y: operands.y.buffer()?,
        sizes: Sizes { n: index(n)?, runs: index(runs)?, m: index(m)? },
        integers: INTEGERS,
    };
    let cubes =
        [index(n.div_ceil(config.n_unit * config.units))?, index(m.div_ceil(M_UNIT))?, index(batches)?];
    // SAFETY: the sizes are the operands'.
    unsafe { gpu.launch(compiled(gpu.target(), config), cubes, arguments) }
}
