//! The weighted sum of a token's experts on a GPU: `y[t, n] = sum_i weights[t, i] * x[t, i, n]`.
//!
//! A unit computes a vector of outputs, and adds the experts in their order, in f32: the order is
//! part of the op's contract.

#![allow(unsafe_code)] // Launches.

use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::{Gpu, rows};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// A kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CombineConfig {
    /// Of x and y.
    dtype: FloatType,
    /// Outputs that a unit computes at once.
    vector: usize,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Vectors of y.
    len: u32,
    /// Vectors of a row.
    n: u32,
    /// Rows of x per row of y.
    top_k: u32,
}

#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn combine_experts<X: Int, V: Size>(
    x: &[Vector<X, V>],
    weights: &[f32],
    y: &mut [Vector<X, V>],
    sizes: Sizes,
    #[comptime] config: CombineConfig,
) {
    let vector = comptime!(config.vector);
    let (n, top_k) = (sizes.n as usize, sizes.top_k as usize);
    let mut i = ABSOLUTE_POS;
    while i < sizes.len as usize {
        let (first, column) = (i / n * top_k, i % n);
        let mut sums = Array::<f32>::new(vector);
        let mut values = Array::<f32>::new(vector);
        #[unroll]
        for j in 0..vector {
            sums[j] = 0.0f32;
        }
        for slot in first..first + top_k {
            let weight = weights[slot];
            unpack::<X, V>(x[slot * n + column], &mut values, 0usize, vector, config.dtype);
            #[unroll]
            for j in 0..vector {
                sums[j] += weight * values[j];
            }
        }
        y[i] = pack::<X, V>(&sums, 0usize, vector, config.dtype);
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target, config: CombineConfig) -> Kernel<CombineExperts<'static>> {
    with_storage!(config.dtype, X => CombineExperts::kernel::<X>(target, UNITS, config.vector, config))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Each type and vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let configs =
        crate::ops::testing::FLOATS.into_iter().flat_map(|dtype| [(dtype, 1), (dtype, rows::VECTOR)]);
    configs.map(|(dtype, vector)| compiled(target, CombineConfig { dtype, vector }).code()).collect()
}

/// See [`super::combine_experts`]; everything was checked.
pub(super) fn launch(op: Check, gpu: &Gpu, x: &Tensor, weights: &Tensor) -> Result<Tensor, KernelError> {
    let (tokens, top_k, n) = (x.dim(0), x.dim(1), x.dim(2));
    let y = Tensor::allocate(&[tokens, n], x.dtype(), x.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let vector = rows::vector(gpu.target(), rows::VECTOR, n, &[x]);
    let config = CombineConfig { dtype: op.float("x", x)?, vector };
    op.index(x.len())?;
    let sizes = Sizes { len: op.index(y.len() / vector)?, n: op.index(n / vector)?, top_k: op.index(top_k)? };
    let arguments = CombineExperts { x: x.buffer()?, weights: weights.buffer()?, y: y.buffer()?, sizes };
    // SAFETY: x has `top_k` rows of `n` elements for each row of y, and the op checked that each
    // has a weight.
    unsafe { gpu.launch(compiled(gpu.target(), config), cubes(y.len() / vector), arguments)? };
    Ok(y)
}
