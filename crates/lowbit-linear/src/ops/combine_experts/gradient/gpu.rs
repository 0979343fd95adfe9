//! The gradients on a GPU: a cube, or a plane of one, takes a row of x (`gpu/rows.rs` chooses), and
//! goes through it, its token's row of dy and its row of dx together.

#![allow(unsafe_code)] // Launches.

use super::{CHECK, CombineExpertsGradient};
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::rows::{self, Rows, Sum};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    rows: Rows,
    x: FloatType,
    /// Of dx too.
    dy: FloatType,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Rows of x, and those per row of dy.
    count: u32,
    top_k: u32,
    /// Vectors of a row.
    n: u32,
}

#[kernel]
fn combine_experts_backward<X: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    weights: &[f32],
    dy: &[Vector<Y, V>],
    dx: &mut [Vector<Y, V>],
    dweights: &mut [f32],
    sizes: Sizes,
    #[comptime] config: Config,
) {
    let vector = comptime!(config.rows.vector);
    let row = rows::row(config.rows);
    let lane = rows::lane_in_row(config.rows);
    let n = sizes.n as usize;
    // Units past the last row have an empty one: they only take part in the sum.
    let known = row < sizes.count as usize;
    let end = select(known, n, 0usize);
    let (of_x, of_dy) = (row * n, row / sizes.top_k as usize * n);
    let mut weight = 0.0f32;
    if known {
        weight = weights[row];
    }
    let mut xs = Array::<f32>::new(vector);
    let mut dys = Array::<f32>::new(vector);
    let mut dweight = 0.0f32;
    let mut i = lane;
    while i < end {
        unpack::<X, V>(x[of_x + i], &mut xs, 0usize, vector, config.x);
        unpack::<Y, V>(dy[of_dy + i], &mut dys, 0usize, vector, config.dy);
        #[unroll]
        for j in 0..vector {
            dweight = fma(xs[j], dys[j], dweight);
            dys[j] *= weight;
        }
        dx[of_x + i] = pack::<Y, V>(&dys, 0usize, vector, config.dy);
        i += comptime!(rows::lanes_per_row(config.rows));
    }
    let dweight = rows::reduce::<f32, Sum>(dweight, config.rows);
    if known && lane == 0 {
        dweights[row] = dweight;
    }
}

fn compiled(target: &Target, config: Config) -> Kernel<CombineExpertsBackward<'static>> {
    let Rows { units, vector, .. } = config.rows;
    with_storage!(config.x, X => with_storage!(config.dy, Y => {
        CombineExpertsBackward::kernel::<X, Y>(target, units, vector, config)
    }))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// For narrow and wide rows, each vector length, and types that are the same and that are not.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let sizes = [(9999, 2048, 4), (9999, 64, 4), (3, 70, 1)];
    let sizes = sizes.into_iter().filter(|(.., vector)| *vector <= target.vector());
    let all =
        sizes.flat_map(|size| [(F32, F32), (BF16, BF16), (F16, F32), (F32, F16)].map(|types| (size, types)));
    all.map(|((count, width, vector), (x, dy))| {
        let rows = Rows::new(target, [count, width], vector);
        compiled(target, Config { rows, x, dy }).code()
    })
    .collect()
}

/// See [`super::combine_experts_backward`]; everything was checked.
pub(super) fn backward(
    gpu: &Gpu,
    x: &Tensor,
    weights: &Tensor,
    dy: &Tensor,
) -> Result<CombineExpertsGradient, KernelError> {
    if x.is_empty() {
        let dx = Tensor::allocate(x.shape(), dy.dtype(), x.device())?;
        let dweights = Tensor::allocate_zeros(weights.shape(), DType::F32, x.device())?;
        return Ok(CombineExpertsGradient { dx, dweights });
    }
    let dx = Tensor::allocate(x.shape(), dy.dtype(), x.device())?;
    let dweights = Tensor::allocate(weights.shape(), DType::F32, x.device())?;
    let (count, top_k, n) = (weights.len(), x.dim(1), x.dim(2));
    let rows = Rows::of(gpu.target(), [count, n], &[x, dy, &dx]);
    CHECK.index(x.len())?;
    let arguments = CombineExpertsBackward {
        x: x.buffer()?,
        weights: weights.buffer()?,
        dy: dy.buffer()?,
        dx: dx.buffer()?,
        dweights: dweights.buffer()?,
        sizes: Sizes {
            count: CHECK.index(count)?,
            top_k: CHECK.index(top_k)?,
            n: CHECK.index(n / rows.vector)?,
        },
    };
    let config = Config { rows, x: CHECK.float("x", x)?, dy: CHECK.float("dy", dy)? };
    // SAFETY: x, dx and weights have `count` rows, and dy one for `top_k` of them.
    unsafe { gpu.launch(compiled(gpu.target(), config), rows.cubes(count), arguments)? };
    Ok(CombineExpertsGradient { dx, dweights })
}
