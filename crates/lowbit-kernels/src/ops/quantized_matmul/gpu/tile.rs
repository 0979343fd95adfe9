//! The product on a GPU for many rows of x, on any device: a unit decodes a run of a weight's row once for several rows
//! of x. Units share nothing, so that planes of any width do.

use super::super::{CHECK, policy};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::layout::{Layout, RUN, with_planes};
use crate::gpu::{Dispatch, Gpu};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub layout: Layout,
    /// The type of x and y.
    pub dtype: FloatType,
    /// Rows of the weight that a unit takes.
    pub columns: usize,
    /// Units of a cube.
    pub units: usize,
}

/// Rows of x that a unit takes.
const ROWS: usize = 8;
/// Values of a run that are decoded together.
const PART: usize = 8;

/// `y[b, m, n] = sum over k of x[b, m, k] * weight[b, n, k]`; `m` counts one batch's rows of x.
#[cube(launch_unchecked)]
fn tile<S: Int, B: Int, Y: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    x: &[Vector<u32, Const<4>>],
    y: &mut [Y],
    n: u32,
    runs: u32,
    m: u32,
    integers: u32,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let columns = comptime!(shape.columns);
    let groups = comptime!(RUN / layout.group());
    let (n, runs, m) = (n as usize, runs as usize, m as usize);
    let batch = CUBE_POS_Z as usize;
    // Neighbours take neighbouring columns of y.
    let column0 = CUBE_POS_X as usize * comptime!(shape.units * columns) + UNIT_POS_X as usize;
    let row0 = CUBE_POS_Y as usize * ROWS;

    let mut sums = Array::<f32>::new(comptime!(ROWS * columns));
    #[unroll]
    for i in 0..comptime!(ROWS * columns) {
        sums[i] = 0.0;
    }
    let mut run = 0usize;
    while run < runs {
        let mut words = Array::<u32>::new(comptime!(columns * layout.bits));
        let mut factors = Array::<f32>::new(comptime!(columns * groups));
        let mut offsets = Array::<f32>::new(comptime!(columns * groups));
        #[unroll]
        for c in 0..columns {
            // Rows past the last are computed and not stored.
            let at = (batch * n + min(column0 + comptime!(c * shape.units), n - 1)) * runs + run;
            load::<V>(codes, at, &mut words, comptime!(c * layout.bits), layout);
            #[unroll]
            for group in 0..groups {
                factors[c * groups + group] = scale::<S, B>(scales, biases, at, group, layout);
                if comptime!(layout.biased()) {
                    offsets[c * groups + group] = bias::<S, B>(scales, biases, at, group, layout);
                }
            }
        }
        #[unroll]
        for part in 0..comptime!(RUN / PART) {
            let mut weights = Array::<f32>::new(comptime!(columns * PART));
            #[unroll]
            for c in 0..columns {
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
            for r in 0..ROWS {
                let row = batch * m + min(row0 + r, m - 1);
                let mut xs = Array::<f32>::new(PART);
                load_part(x, row * runs + run, &mut xs, part, shape.dtype);
                #[unroll]
                for c in 0..columns {
                    #[unroll]
                    for i in 0..PART {
                        sums[r * columns + c] = fma(weights[c * PART + i], xs[i], sums[r * columns + c]);
                    }
                }
            }
        }
        run += 1;
    }
    #[unroll]
    for r in 0..ROWS {
        #[unroll]
        for c in 0..columns {
            let column = column0 + comptime!(c * shape.units);
            if row0 + r < m && column < n {
                let at = (batch * m + row0 + r) * n + column;
                y[at] = Y::cast_from(narrow(sums[r * columns + c], shape.dtype));
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

/// The kernel for `shape`.
fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.units as u32);
    with_planes!(shape.layout, S, B => with_storage!(shape.dtype, Y => Box::new(tile::Tile::<S, B, Y>::new(
        settings, properties, registers,
        buffer(), buffer(), buffer(), buffer(), buffer(), (), (), (), (), shape.layout.vector(), shape,
    ))))
}

/// Each format, and each type of x.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let formats = super::super::tests::gpu_formats();
    let of_format = formats.into_iter().map(|format| (format, FloatType::F32));
    let of_dtype = [FloatType::F16, FloatType::BF16].map(|dtype| (lowbit_formats::Format::Q4_0, dtype));
    let shapes = of_format.chain(of_dtype).map(|(format, dtype)| {
        let (columns, units) = policy::tile(target.plane());
        Shape { layout: Layout::of(format), dtype, columns, units }
    });
    shapes.map(|shape| kernel(target, shape)).collect()
}

/// `x`, whole runs of `m` rows a batch, times `weight`, into `y`.
pub(super) fn multiply(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    m: usize,
    y: &Tensor,
) -> Result<(), KernelError> {
    let (n, runs) = (weight.n(), weight.k().div_ceil(RUN));
    let (columns, units) = policy::tile(gpu.target().plane());
    let shape = Shape { layout: Layout::of(weight.format()), dtype: CHECK.float("x", x)?, columns, units };
    let index = |value: usize| CHECK.index(value);
    let planes = weight.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    let batches = weight.rows() / n;
    // Every index into x, y and the planes is below these.
    index(batches * m * n.max(runs * RUN))?;
    index(weight.rows() * runs * shape.layout.bits)?;
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: [index(n.div_ceil(columns * units))?, index(m.div_ceil(ROWS))?, index(batches)?],
        buffers: vec![component(0)?, component(1)?, component(2)?, x.memory()?, y.memory()?],
        scalars: vec![index(n)?, index(runs)?, index(m)?, INTEGERS],
    })
}
