//! The residual stream's sum and its norm on a GPU: `sum = h + x`,
//! `y = rms_norm(sum, weight, eps)`.
//!
//! One cube, or one plane of a cube, takes a row (`gpu/rows.rs` chooses). It goes through the row
//! twice, and adds again the second time: the norm is of the f32 sum, which is stored only rounded.
//! The order of the sums is the same for every launch of one shape: change it and results change in
//! their last bits.

#![allow(unsafe_code)] // Launches.

use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::math::reciprocal;
use crate::gpu::rows::{self, RowSizes, Rows, Sum, reduce};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The compile-time configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NormConfig {
    rows: Rows,
    /// Of h and the sum.
    h: FloatType,
    /// Of x and y.
    x: FloatType,
}

/// `eps` is the bits of an f32, and `weight` is f32.
#[kernel]
fn add_rms_norm<R: Int, X: Int, V: Size>(
    h: &[Vector<R, V>],
    x: &[Vector<X, V>],
    weight: &[Vector<u32, V>],
    sum: &mut [Vector<R, V>],
    y: &mut [Vector<X, V>],
    sizes: RowSizes,
    eps: u32,
    #[comptime] config: NormConfig,
) {
    let vector = comptime!(config.rows.vector);
    let row = rows::row(config.rows);
    let vectors = sizes.vectors as usize;
    let first = row * vectors;
    // Units past the last row have an empty row: they only take part in the sum.
    let end = select(row < sizes.count as usize, vectors, 0usize);
    let hs = rows::preload::<R, V>(h, first, end, config.rows);
    let xs = rows::preload::<X, V>(x, first, end, config.rows);
    let weights = rows::preload::<u32, V>(weight, 0usize, end, config.rows);
    let mut values = Array::<f32>::new(vector);
    let mut squares = 0.0f32;
    let mut i = rows::lane_in_row(config.rows);
    while i < end {
        let hs = rows::preloaded_or_load::<R, V>(hs, h, first + i, config.rows);
        let xs = rows::preloaded_or_load::<X, V>(xs, x, first + i, config.rows);
        add::<R, X, V>(hs, xs, &mut values, config);
        sum[first + i] = pack::<R, V>(&values, 0usize, vector, config.h);
        #[unroll]
        for j in 0..vector {
            squares = fma(values[j], values[j], squares);
        }
        i += comptime!(rows::lanes_per_row(config.rows));
    }
    let width = f32::cast_from((vectors * vector) as u32);
    let mean = reduce::<f32, Sum>(squares, config.rows) / width;
    let scale = reciprocal((mean + f32::reinterpret(eps)).sqrt());
    let mut factors = Array::<f32>::new(vector);
    let mut i = rows::lane_in_row(config.rows);
    while i < end {
        let hs = rows::preloaded_or_load::<R, V>(hs, h, first + i, config.rows);
        let xs = rows::preloaded_or_load::<X, V>(xs, x, first + i, config.rows);
        add::<R, X, V>(hs, xs, &mut values, config);
        let weights = rows::preloaded_or_load::<u32, V>(weights, weight, i, config.rows);
        unpack::<u32, V>(weights, &mut factors, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            values[j] = values[j] * scale * factors[j];
        }
        y[first + i] = pack::<X, V>(&values, 0usize, vector, config.x);
        i += comptime!(rows::lanes_per_row(config.rows));
    }
}

/// The f32 sums of a vector of h and one of x.
#[cube]
fn add<R: Int, X: Int, V: Size>(
    h: Vector<R, V>,
    x: Vector<X, V>,
    sums: &mut Array<f32>,
    #[comptime] config: NormConfig,
) {
    let vector = comptime!(config.rows.vector);
    let mut values = Array::<f32>::new(vector);
    unpack::<R, V>(h, sums, 0usize, vector, config.h);
    unpack::<X, V>(x, &mut values, 0usize, vector, config.x);
    #[unroll]
    for j in 0..vector {
        sums[j] += values[j];
    }
}

fn compiled(target: &Target, config: NormConfig) -> Kernel<AddRmsNorm<'static>> {
    with_storage!(config.h, R => with_storage!(config.x, X => {
        AddRmsNorm::kernel::<R, X>(target, config.rows.units, config.rows.vector, config)
    }))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Kernels for wide and narrow rows, each vector length, and each type of each operand.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    let longest = rows::LONGEST.min(target.vector());
    for (count, width, vector) in [(1, 4096, longest), (999, 4096, longest), (999, 128, 4), (1, 70, 1)] {
        let rows = Rows::new(target, [count, width], vector);
        for (h, x) in [(F32, BF16), (F16, F16), (BF16, F32)] {
            kernels.push(compiled(target, NormConfig { rows, h, x }).code());
        }
    }
    kernels
}

/// See [`super::add_rms_norm`]; everything was checked.
pub(super) fn launch(
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
    let config = NormConfig { rows, h: check.float("h", h)?, x: check.float("x", x)? };
    check.index(h.len())?;
    let arguments = AddRmsNorm {
        h: h.buffer()?,
        x: x.buffer()?,
        weight: weight.buffer()?,
        sum: sum.buffer()?,
        y: y.buffer()?,
        sizes: RowSizes { count: check.index(count)?, vectors: check.index(width / rows.vector)? },
        eps: eps.to_bits(),
    };
    // SAFETY: h, x, sum and y are `count` rows of `width` elements, the weight is one; the op
    // checked their shapes.
    unsafe { gpu.launch(compiled(gpu.target(), config), rows.cubes(count), arguments)? };
    Ok((sum, y))
}
