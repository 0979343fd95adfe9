//! The product on a GPU, for one row of x at a time: a cube takes some rows of the weight, and its units cut each
//! row into runs.

mod tile;

use super::{CHECK, policy};
use crate::gpu::compile::{Start, Target, buffer};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::layout::{Layout, RUN};
use crate::gpu::{Dispatch, Gpu};
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub layout: Layout,
    /// The type of x and y.
    pub dtype: FloatType,
    /// Rows of the weight that a cube takes.
    pub rows: usize,
    /// Units of a cube.
    pub units: usize,
    /// Units that run in step, or 0 where that differs from launch to launch.
    pub plane: usize,
}

/// Cubes along y: Vulkan promises no more.
const CUBES: usize = 65535;

/// `y[t, n] = sum over k of x[t, k] * weight[t / rows_a_batch, n, k]`

#[cube(launch_unchecked)]
fn mat_vec<S: Int, B: Int, Y: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    x: &[Vector<u32, Const<4>>],
    y: &mut [Y],
    n: u32,
    runs: u32,
    m: u32,
    rows_a_batch: u32,
    integers: u32,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let rows = comptime!(shape.rows);
    let words_a_run = comptime!(layout.bits);
    let groups = comptime!(RUN / layout.group());
    let unit = UNIT_POS_X as usize;
    let row0 = CUBE_POS_X as usize * rows;
    let t = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let (n, runs, m) = (n as usize, runs as usize, m as usize);
    let batch_row = t / rows_a_batch as usize * n;

    let mut sums = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        sums[r] = 0.0;
    }
    let mut run = unit;
    // Cubes past the last row of x have nothing to read.
    if t >= m {
        run = runs;
    }
    while run < runs {
        let mut words = Array::<u32>::new(comptime!(rows * words_a_run));
        #[unroll]
        for r in 0..rows {
            // Rows past the last are computed and not stored.
            let row = batch_row + min(row0 + r, n - 1);
            load::<V>(codes, row * runs + run, &mut words, comptime!(r * words_a_run), layout);
        }
        let mut xs = Array::<f32>::new(comptime!(RUN));
        let mut x_sums = Array::<f32>::new(groups);
        load_x(x, t * runs + run, &mut xs, &mut x_sums, shape);
        #[unroll]
        for r in 0..rows {
            let at = (batch_row + min(row0 + r, n - 1)) * runs + run;
            #[unroll]
            for group in 0..groups {
                let mut dot = 0.0f32;
                #[unroll]
                for i in 0..comptime!(layout.group()) {
                    let i = comptime!(group * layout.group() + i);
                    let value = code(&words, comptime!(r * words_a_run), integers, i, layout);
                    dot = fma(value, xs[i], dot);
                }
                if comptime!(factor(layout) != 1.0) {
                    dot *= comptime!(factor(layout));
                }
                sums[r] = fma(scale::<S, B>(scales, biases, at, group, layout), dot, sums[r]);
                if comptime!(layout.biased()) {
                    sums[r] = fma(bias::<S, B>(scales, biases, at, group, layout), x_sums[group], sums[r]);
                }
            }
        }
        run += comptime!(shape.units);
    }
    store::<Y>(&sums, y, t * n + row0, select(t < m, n - min(row0, n), 0usize), shape);
}

/// A run of x, each value scaled as the weight's code at its place needs it, and the sums of its groups.
#[cube]
fn load_x(
    x: &[Vector<u32, Const<4>>],
    run: usize,
    xs: &mut Array<f32>,
    x_sums: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let size = comptime!(shape.dtype.size());
    let a_word = comptime!(4 / size);
    #[unroll]
    for group in 0..comptime!(RUN / shape.layout.group()) {
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
                let value = widen(bits, shape.dtype);
                let group = comptime!(i / shape.layout.group());
                x_sums[group] += value;
                xs[i] = value * comptime!(unshift(shape.layout, i));
            }
        }
    }
}

/// Adds up what the units have of each row, and stores the first `count` rows.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn store<Y: Int>(sums: &Array<f32>, y: &mut [Y], first: usize, count: usize, #[comptime] shape: Shape) {
    let rows = comptime!(shape.rows);
    let unit = UNIT_POS_X as usize;
    if comptime!(shape.units == shape.plane) {
        #[unroll]
        for r in 0..rows {
            let sum = plane_sum(sums[r]);
            if unit == 0 && r < count {
                y[first + r] = Y::cast_from(narrow(sum, shape.dtype));
            }
        }
    } else {
        let plane = plane_size(shape.plane);
        let mut partial = Shared::<[f32]>::new_slice(comptime!(rows * shape.units / FEWEST));
        #[unroll]
        for r in 0..rows {
            let sum = plane_sum(sums[r]);
            if unit % plane == 0 {
                partial[unit / plane * rows + r] = sum;
            }
        }
        sync_cube();
        if unit < min(count, rows) {
            let mut sum = 0.0f32;
            let mut at = unit;
            while at < comptime!(shape.units) / plane * rows {
                sum += partial[at];
                at += rows;
            }
            y[first + unit] = Y::cast_from(narrow(sum, shape.dtype));
        }
    }
}

/// The smallest planes that there are.
const FEWEST: usize = 4;

#[cube]
fn plane_size(#[comptime] fixed: usize) -> usize {
    if comptime!(fixed == 0) { PLANE_DIM as usize } else { fixed.runtime() }
}

/// Copies rows of `k` elements to rows of `padded`, zeros added.
#[cube(launch_unchecked)]
fn pad<Y: Int>(x: &[Y], y: &mut [Y], k: u32, padded: u32, len: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < len {
        let column = at % padded;
        let mut value = Y::from_int(0);
        if column < k {
            value = x[(at / padded * k + column) as usize];
        }
        y[at as usize] = value;
    }
}

/// The kernel for `shape`, its types chosen by what the layout stores.
pub(crate) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    macro_rules! typed {
        ($scales:ty, $biases:ty, $y:ty) => {{
            let (settings, properties, registers): Start = target.start(shape.units as u32);
            Box::new(mat_vec::MatVec::<$scales, $biases, $y>::new(
                settings,
                properties,
                registers,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                (),
                (),
                shape.layout.vector(),
                shape,
            ))
        }};
    }
    macro_rules! of_y {
        ($scales:ty, $biases:ty) => {
            with_storage!(shape.dtype, Y => typed!($scales, $biases, Y))
        };
    }
    match shape.layout.scale_sizes() {
        (1, 2) => of_y!(u8, u16),
        (1, _) => of_y!(u8, u32),
        (2, 2) => of_y!(u16, u16),
        (2, _) => of_y!(u16, u32),
        _ => of_y!(u32, u32),
    }
}

fn pad_kernel(target: &Target, dtype: FloatType) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(PAD_UNITS);
    with_storage!(dtype, Y => Box::new(pad::Pad::<Y>::new(
        settings, properties, registers, buffer(), buffer(), (), (), (),
    )))
}

const PAD_UNITS: u32 = 256;

/// Every kernel of the op for `target`, one of each format and type of x, at sizes of layers.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let plane = target.plane();
    let dtypes = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let mut kernels: Vec<_> = dtypes.iter().map(|&dtype| pad_kernel(target, dtype)).collect();
    for format in super::tests::gpu_formats() {
        let layout = Layout::of(format);
        for dtype in dtypes {
            let (rows, units) = policy::gpu(layout.bits, 4096, 4096 / RUN, plane);
            kernels.push(kernel(target, Shape { layout, dtype, rows, units, plane: plane.unwrap_or(0) }));
        }
    }
    kernels.extend(tile::kernels(target));
    kernels
}

/// See [`super::quantized_matmul`]; everything was checked.
pub(super) fn quantized_matmul(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    shape: &[usize],
) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("x", x)?;
    let y = Tensor::allocate(shape, dtype.dtype(), &Device::Gpu(gpu.clone()))?;
    let (n, k) = (weight.n(), weight.k());
    if y.is_empty() {
        return Ok(y);
    }
    let (m, runs) = (y.len() / n, k.div_ceil(RUN));
    let x = if k.is_multiple_of(RUN) { x.clone() } else { padded(gpu, x, m, k)? };
    let batches = weight.rows() / n;
    if policy::kernel(m / batches, batches) == policy::Kernel::Tile {
        CHECK.index(m.max(1) * n.max(k.next_multiple_of(RUN)))?;
        CHECK.index(weight.rows() * runs * Layout::of(weight.format()).bits)?;
        tile::multiply(gpu, &x, weight, m / batches, &y)?;
        return Ok(y);
    }
    let layout = Layout::of(weight.format());
    let target = gpu.target();
    let plane = target.plane();
    let (rows, units) = policy::gpu(layout.bits, n, runs, plane);
    let kernel = kernel(target, Shape { layout, dtype, rows, units, plane: plane.unwrap_or(0) });
    let index = |value: usize| CHECK.index(value);
    // Every index into the planes is below the codes' words.
    index(weight.rows() * runs * layout.bits)?;
    index(m * k.next_multiple_of(RUN))?;
    let planes = weight.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    gpu.launch(Dispatch {
        kernel,
        cubes: [index(n.div_ceil(rows))?, index(m.min(CUBES))?, index(m.div_ceil(CUBES))?],
        buffers: vec![component(0)?, component(1)?, component(2)?, x.memory()?, y.memory()?],
        scalars: vec![index(n)?, index(runs)?, index(m)?, index(m / (weight.rows() / n))?, INTEGERS],
    })?;
    Ok(y)
}

/// `x`, `[m, k]`, with zeros up to a whole number of runs.
fn padded(gpu: &Gpu, x: &Tensor, m: usize, k: usize) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("x", x)?;
    let row = k.next_multiple_of(RUN);
    let y = Tensor::allocate(&[m, row], dtype.dtype(), x.device())?;
    let len = CHECK.index(y.len())?;
    gpu.launch(Dispatch {
        kernel: pad_kernel(gpu.target(), dtype),
        cubes: [len.div_ceil(PAD_UNITS), 1, 1],
        buffers: vec![x.memory()?, y.memory()?],
        scalars: vec![CHECK.index(k)?, CHECK.index(row)?, len],
    })?;
    Ok(y)
}
