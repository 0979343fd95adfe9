//! The sum and its norm on a GPU: a cube or a plane a row, which adds twice.

use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::math::reciprocal;
use crate::gpu::rows::{self, Rows, Sum, reduce};
use crate::gpu::{Dispatch, Gpu};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    rows: Rows,
    h: FloatType,
    x: FloatType,
}

/// Rows of `vectors` vectors.
#[cube(launch_unchecked)]
fn norm<R: Int, X: Int, V: Size>(
    h: &[Vector<R, V>],
    x: &[Vector<X, V>],
    weight: &[Vector<u32, V>],
    sum: &mut [Vector<R, V>],
    y: &mut [Vector<X, V>],
    count: u32,
    vectors: u32,
    eps: u32,
    #[comptime] shape: Shape,
) {
    let vector = comptime!(shape.rows.vector);
    let row = rows::row(shape.rows);
    let vectors = vectors as usize;
    let first = row * vectors;
    // Units past the last row have nothing to do but come to the sum.
    let end = select(row < count as usize, vectors, 0usize);
    let hs = rows::ahead::<R, V>(h, first, end, shape.rows);
    let xs = rows::ahead::<X, V>(x, first, end, shape.rows);
    let weights = rows::ahead::<u32, V>(weight, 0usize, end, shape.rows);
    let mut values = Array::<f32>::new(vector);
    let mut squares = 0.0f32;
    let mut i = rows::place(shape.rows);
    while i < end {
        let hs = rows::again::<R, V>(hs, h, first + i, shape.rows);
        let xs = rows::again::<X, V>(xs, x, first + i, shape.rows);
        add::<R, X, V>(hs, xs, &mut values, shape);
        sum[first + i] = pack::<R, V>(&values, 0usize, vector, shape.h);
        #[unroll]
        for j in 0..vector {
            squares = fma(values[j], values[j], squares);
        }
        i += comptime!(rows::stride(shape.rows));
    }
    let width = f32::cast_from((vectors * vector) as u32);
    let mean = reduce::<f32, Sum>(squares, shape.rows) / width;
    let scale = reciprocal((mean + f32::reinterpret(eps)).sqrt());
    let mut factors = Array::<f32>::new(vector);
    let mut i = rows::place(shape.rows);
    while i < end {
        let hs = rows::again::<R, V>(hs, h, first + i, shape.rows);
        let xs = rows::again::<X, V>(xs, x, first + i, shape.rows);
        add::<R, X, V>(hs, xs, &mut values, shape);
        let weights = rows::again::<u32, V>(weights, weight, i, shape.rows);
        unpack::<u32, V>(weights, &mut factors, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            values[j] = values[j] * scale * factors[j];
        }
        y[first + i] = pack::<X, V>(&values, 0usize, vector, shape.x);
        i += comptime!(rows::stride(shape.rows));
    }
}

#[cube]
fn add<R: Int, X: Int, V: Size>(
    h: Vector<R, V>,
    x: Vector<X, V>,
    sums: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let vector = comptime!(shape.rows.vector);
    let mut values = Array::<f32>::new(vector);
    unpack::<R, V>(h, sums, 0usize, vector, shape.h);
    unpack::<X, V>(x, &mut values, 0usize, vector, shape.x);
    #[unroll]
    for j in 0..vector {
        sums[j] += values[j];
    }
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.rows.units as u32);
    let vector = shape.rows.vector;
    with_storage!(shape.h, R => with_storage!(shape.x, X => Box::new(norm::Norm::<R, X>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), buffer(), (), (), (), vector, shape,
    ))))
}

/// Wide and narrow rows, each way to load, and each type of each operand.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    let longest = rows::LONGEST.min(target.vector());
    for (count, width, vector) in [(1, 4096, longest), (999, 4096, longest), (999, 128, 4), (1, 70, 1)] {
        let rows = Rows::new(target, [count, width], vector);
        for (h, x) in [(F32, BF16), (F16, F16), (BF16, F32)] {
            kernels.push(kernel(target, Shape { rows, h, x }));
        }
    }
    kernels
}

/// See [`super::add_rms_norm`]; everything was checked.
pub(super) fn add_rms_norm(
    check: Check,
    gpu: &Gpu,
    [h, x]: [&Tensor; 2],
    weight: &Tensor,
    eps: f32,
) -> Result<(Tensor, Tensor), KernelError> {
    let like = |tensor: &Tensor| Tensor::allocate(tensor.shape(), tensor.dtype(), tensor.device());
    let (sum, y) = (like(h)?, like(x)?);
    if h.is_empty() {
        return Ok((sum, y));
    }
    let weight = weight.cast(DType::F32)?;
    let (width, count) = (weight.len(), h.len() / weight.len());
    let rows = Rows::of(gpu.target(), [count, width], &[h, x, &weight]);
    let shape = Shape { rows, h: check.float("h", h)?, x: check.float("x", x)? };
    check.index(h.len())?;
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: rows.cubes(count),
        buffers: vec![h.memory()?, x.memory()?, weight.memory()?, sum.memory()?, y.memory()?],
        scalars: vec![check.index(count)?, check.index(width / rows.vector)?, eps.to_bits()],
    })?;
    Ok((sum, y))
}
