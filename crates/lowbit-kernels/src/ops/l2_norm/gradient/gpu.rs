//! The gradient on a GPU: a row's length and its product with dy are sums of the row
//! (`gpu/rows.rs`).

#![allow(unsafe_code)] // Launches.

use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack};
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::rows::{self, RowSizes, Rows, Sum};
use crate::ops::Check;
use crate::ops::l2_norm::gpu::inverse_length;
use crate::ops::{L2Norm, L2NormConvention};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// A kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GradientConfig {
    rows: Rows,
    convention: L2NormConvention,
}

/// `eps` is the bits of an f32.
#[kernel]
fn l2_norm_backward<V: Size>(
    x: &[Vector<u32, V>],
    dy: &[Vector<u32, V>],
    dx: &mut [Vector<u32, V>],
    sizes: RowSizes,
    eps: u32,
    #[comptime] config: GradientConfig,
) {
    let vector = comptime!(config.rows.vector);
    let row = rows::row(config.rows);
    let vectors = sizes.vectors as usize;
    let first = row * vectors;
    // Units past the last row have an empty row: they only take part in the sums.
    let end = select(row < sizes.count as usize, vectors, 0usize);
    let mut xs = Array::<f32>::new(vector);
    let mut dys = Array::<f32>::new(vector);
    let mut squares = 0.0f32;
    let mut products = 0.0f32;
    let mut i = rows::lane_in_row(config.rows);
    while i < end {
        unpack::<u32, V>(x[first + i], &mut xs, 0usize, vector, FloatType::F32);
        unpack::<u32, V>(dy[first + i], &mut dys, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            squares = fma(xs[j], xs[j], squares);
            products = fma(xs[j], dys[j], products);
        }
        i += comptime!(rows::lanes_per_row(config.rows));
    }
    let squares = rows::reduce::<f32, Sum>(squares, config.rows);
    let products = rows::reduce::<f32, Sum>(products, config.rows);
    let width = f32::cast_from((vectors * vector) as u32);
    let scale = inverse_length(squares, width, f32::reinterpret(eps), config.convention);
    let mut along = products * scale * scale;
    if comptime!(config.convention == L2NormConvention::Max) {
        // Divided by eps, which does not change with x. Of the bits, as the length is.
        let constant = u32::reinterpret(squares.sqrt()) <= (eps & 0x7fff_ffffu32);
        along = select(constant, 0.0f32.runtime(), along);
    }
    let mut i = rows::lane_in_row(config.rows);
    while i < end {
        unpack::<u32, V>(x[first + i], &mut xs, 0usize, vector, FloatType::F32);
        unpack::<u32, V>(dy[first + i], &mut dys, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            dys[j] = (dys[j] - xs[j] * along) * scale;
        }
        dx[first + i] = pack::<u32, V>(&dys, 0usize, vector, FloatType::F32);
        i += comptime!(rows::lanes_per_row(config.rows));
    }
}

fn compiled(target: &Target, config: GradientConfig) -> Kernel<L2NormBackward<'static>> {
    L2NormBackward::kernel(target, config.rows.units, config.rows.vector, config)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// For narrow and wide rows, each vector length, and each convention.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use L2NormConvention::{Max, Mean, Sum};
    let mut kernels = Vec::new();
    for (count, width, vector, convention) in [(1, 4096, 4, Sum), (999, 128, 4, Mean), (1, 70, 1, Max)] {
        if vector <= target.vector() {
            let rows = Rows::new(target, [count, width], vector);
            kernels.push(compiled(target, GradientConfig { rows, convention }).code());
        }
    }
    kernels
}

/// dx in f32, of x and dy in f32, which are not empty; everything was checked.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    [x, dy]: [&Tensor; 2],
    params: &L2Norm,
) -> Result<Tensor, KernelError> {
    let dx = Tensor::allocate(x.shape(), DType::F32, x.device())?;
    let width = x.dim(-1);
    let count = x.len() / width;
    let vector = rows::vector(gpu.target(), rows::VECTOR, width, &[x, dy]);
    let rows = Rows::new(gpu.target(), [count, width], vector);
    check.index(x.len())?;
    let arguments = L2NormBackward {
        x: x.buffer()?,
        dy: dy.buffer()?,
        dx: dx.buffer()?,
        sizes: RowSizes { count: check.index(count)?, vectors: check.index(width / vector)? },
        eps: params.eps.to_bits(),
    };
    let config = GradientConfig { rows, convention: params.convention };
    // SAFETY: all are `count` rows of `width` elements.
    unsafe { gpu.launch(compiled(gpu.target(), config), rows.cubes(count), arguments)? };
    Ok(dx)
}
