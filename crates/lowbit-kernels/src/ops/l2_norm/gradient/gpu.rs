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
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// `eps` is the bits of an f32.
#[kernel]
fn l2_norm_backward<V: Size>(
    x: &[Vector<u32, V>],
    dy: &[Vector<u32, V>],
    dx: &mut [Vector<u32, V>],
    sizes: RowSizes,
    eps: u32,
    #[comptime] config: Rows,
) {
    let vector = comptime!(config.vector);
    let row = rows::row(config);
    let vectors = sizes.vectors as usize;
    let first = row * vectors;
    // Units past the last row have an empty row: they only take part in the sums.
    let end = select(row < sizes.count as usize, vectors, 0usize);
    let mut xs = Array::<f32>::new(vector);
    let mut dys = Array::<f32>::new(vector);
    let mut squares = 0.0f32;
    let mut products = 0.0f32;
    let mut i = rows::lane_in_row(config);
    while i < end {
        unpack::<u32, V>(x[first + i], &mut xs, 0usize, vector, FloatType::F32);
        unpack::<u32, V>(dy[first + i], &mut dys, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            squares = fma(xs[j], xs[j], squares);
            products = fma(xs[j], dys[j], products);
        }
        i += comptime!(rows::lanes_per_row(config));
    }
    let squares = rows::reduce::<f32, Sum>(squares, config);
    let products = rows::reduce::<f32, Sum>(products, config);
    let scale = inverse_length(squares, f32::reinterpret(eps));
    let along = products * scale * scale;
    let mut i = rows::lane_in_row(config);
    while i < end {
        unpack::<u32, V>(x[first + i], &mut xs, 0usize, vector, FloatType::F32);
        unpack::<u32, V>(dy[first + i], &mut dys, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            dys[j] = (dys[j] - xs[j] * along) * scale;
        }
        dx[first + i] = pack::<u32, V>(&dys, 0usize, vector, FloatType::F32);
        i += comptime!(rows::lanes_per_row(config));
    }
}

fn compiled(target: &Target, rows: Rows) -> Kernel<L2NormBackward<'static>> {
    L2NormBackward::kernel(target, rows.units, rows.vector, rows)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// For narrow and wide rows, and each vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for (count, width, vector) in [(1, 4096, 4), (999, 128, 4), (1, 70, 1)] {
        if vector <= target.vector() {
            kernels.push(compiled(target, Rows::new(target, [count, width], vector)).code());
        }
    }
    kernels
}

/// dx in f32, of x and dy in f32, which are not empty; everything was checked.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    [x, dy]: [&Tensor; 2],
    eps: f32,
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
        eps: eps.to_bits(),
    };
    // SAFETY: all are `count` rows of `width` elements.
    unsafe { gpu.launch(compiled(gpu.target(), rows), rows.cubes(count), arguments)? };
    Ok(dx)
}
