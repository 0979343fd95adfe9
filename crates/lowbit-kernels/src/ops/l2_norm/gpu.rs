//! Rows scaled to length one on a GPU: a cube or a plane a row.

use super::{L2Norm, L2NormConvention};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::math::reciprocal;
use crate::gpu::rows::{self, Rows};
use crate::gpu::{Dispatch, Gpu};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    rows: Rows,
    dtype: FloatType,
    convention: L2NormConvention,
}

/// `y = x / |x|`; rows of `vectors` vectors.
#[cube(launch_unchecked)]
fn norm<X: Int, V: Size>(
    x: &[Vector<X, V>],
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
    let mut values = Array::<f32>::new(vector);
    let ahead = rows::ahead::<X, V>(x, first, end, shape.rows);
    let sum = rows::squares::<X, V>(ahead, x, first, end, shape.dtype, shape.rows);
    let width = f32::cast_from((vectors * vector) as u32);
    let scale = scale(sum, width, f32::reinterpret(eps), shape.convention);
    let mut i = rows::place(shape.rows);
    while i < end {
        let x = rows::again::<X, V>(ahead, x, first + i, shape.rows);
        unpack::<X, V>(x, &mut values, 0usize, vector, shape.dtype);
        #[unroll]
        for j in 0..vector {
            values[j] *= scale;
        }
        y[first + i] = pack::<X, V>(&values, 0usize, vector, shape.dtype);
        i += comptime!(rows::stride(shape.rows));
    }
}

/// What a row of `width` elements is multiplied by, whose squares' sum is `sum`.
#[cube]
pub(crate) fn scale(sum: f32, width: f32, eps: f32, #[comptime] convention: L2NormConvention) -> f32 {
    let length = match comptime!(convention) {
        L2NormConvention::Sum => (sum + eps).sqrt(),
        L2NormConvention::Mean => (sum + width * eps).sqrt(),
        // Of the bits, which are in order where numbers are not negative, and a NaN's above all: see `math::exp`.
        L2NormConvention::Max => {
            let length = sum.sqrt();
            select(u32::reinterpret(length) < (u32::reinterpret(eps) & 0x7fff_ffffu32), eps, length)
        }
    };
    reciprocal(length)
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.rows.units as u32);
    with_storage!(shape.dtype, X => Box::new(norm::Norm::<X>::new(
        settings, properties, registers, buffer(), buffer(), (), (), (), shape.rows.vector, shape,
    )))
}

/// A head's rows and others, in each type and convention.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use L2NormConvention::{Max, Mean, Sum};
    let mut kernels = Vec::new();
    let longest = rows::LONGEST.min(target.vector());
    for (count, width, vector) in [(1, 4096, longest), (999, 4096, longest), (999, 128, 4), (1, 70, 1)] {
        let rows = Rows::new(target, [count, width], vector);
        for (dtype, convention) in [(FloatType::F32, Sum), (FloatType::F16, Mean), (FloatType::BF16, Max)] {
            kernels.push(kernel(target, Shape { rows, dtype, convention }));
        }
    }
    kernels
}

/// See [`super::l2_norm`]; everything was checked.
pub(super) fn l2_norm(check: Check, gpu: &Gpu, x: &Tensor, params: &L2Norm) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(x.shape(), x.dtype(), x.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let width = x.dim(-1);
    let count = x.len() / width;
    let rows = Rows::of(gpu.target(), [count, width], &[x]);
    let shape = Shape { rows, dtype: check.float("x", x)?, convention: params.convention };
    check.index(x.len())?;
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: rows.cubes(count),
        buffers: vec![x.memory()?, y.memory()?],
        scalars: vec![check.index(count)?, check.index(width / rows.vector)?, params.eps.to_bits()],
    })?;
    Ok(y)
}
