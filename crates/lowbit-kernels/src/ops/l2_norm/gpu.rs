//! Rows scaled to length one on a GPU.
//!
//! One cube, or one plane of a cube, takes a row (`gpu/rows.rs` chooses): it sums the row's
//! squares, then scales the row. The gated delta rule's own kernels use [`inverse_length`] too, so
//! that both round alike.

#![allow(unsafe_code)] // Launches.

use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::math::reciprocal;
use crate::gpu::rows::{self, RowSizes, Rows};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// A kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NormConfig {
    rows: Rows,
    /// Of x and y.
    dtype: FloatType,
}

/// `eps` is the bits of an f32.
#[kernel]
fn l2_norm<X: Int, V: Size>(
    x: &[Vector<X, V>],
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
    let mut values = Array::<f32>::new(vector);
    let preloaded = rows::preload::<X, V>(x, first, end, config.rows);
    let sum = rows::sum_of_squares::<X, V>(preloaded, x, first, end, config.dtype, config.rows);
    let scale = inverse_length(sum, f32::reinterpret(eps));
    let mut i = rows::lane_in_row(config.rows);
    while i < end {
        let x = rows::preloaded_or_load::<X, V>(preloaded, x, first + i, config.rows);
        unpack::<X, V>(x, &mut values, 0usize, vector, config.dtype);
        #[unroll]
        for j in 0..vector {
            values[j] *= scale;
        }
        y[first + i] = pack::<X, V>(&values, 0usize, vector, config.dtype);
        i += comptime!(rows::lanes_per_row(config.rows));
    }
}

/// The factor of a row; `sum` is the sum of its squares.
#[cube]
pub(crate) fn inverse_length(sum: f32, eps: f32) -> f32 {
    reciprocal((sum + eps).sqrt())
}

fn compiled(target: &Target, config: NormConfig) -> Kernel<L2Norm<'static>> {
    with_storage!(config.dtype, X => {
        L2Norm::kernel::<X>(target, config.rows.units, config.rows.vector, config)
    })
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Kernels for rows as long as a head and others, of each type.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    let longest = rows::LONGEST.min(target.vector());
    for (count, width, vector) in [(1, 4096, longest), (999, 4096, longest), (999, 128, 4), (1, 70, 1)] {
        let rows = Rows::new(target, [count, width], vector);
        for dtype in [FloatType::F32, FloatType::F16, FloatType::BF16] {
            kernels.push(compiled(target, NormConfig { rows, dtype }).code());
        }
    }
    kernels
}

/// See [`super::l2_norm`]; everything was checked.
pub(super) fn launch(check: Check, gpu: &Gpu, x: &Tensor, eps: f32) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(x.shape(), x.dtype(), x.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let width = x.dim(-1);
    let count = x.len() / width;
    let rows = Rows::of(gpu.target(), [count, width], &[x]);
    let config = NormConfig { rows, dtype: check.float("x", x)? };
    check.index(x.len())?;
    let arguments = L2Norm {
        x: x.buffer()?,
        y: y.buffer()?,
        sizes: RowSizes { count: check.index(count)?, vectors: check.index(width / rows.vector)? },
        eps: eps.to_bits(),
    };
    // SAFETY: x and y are `count` rows of `width` elements.
    unsafe { gpu.launch(compiled(gpu.target(), config), rows.cubes(count), arguments)? };
    Ok(y)
}
