use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::{Dispatch, Gpu, rows};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    dtype: FloatType,
    /// Outputs that a unit computes at once.
    vector: usize,
}

/// A unit `shape.vector` outputs, `len` such in all; rows of `n` vectors.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube(launch_unchecked)]
fn combine<X: Int, V: Size>(
    x: &[Vector<X, V>],
    weights: &[f32],
    y: &mut [Vector<X, V>],
    len: u32,
    n: u32,
    top_k: u32,
    #[comptime] shape: Shape,
) {
    let vector = comptime!(shape.vector);
    let (n, top_k) = (n as usize, top_k as usize);
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        let (first, column) = (i / n * top_k, i % n);
        let mut sums = Array::<f32>::new(vector);
        let mut values = Array::<f32>::new(vector);
        #[unroll]
        for j in 0..vector {
            sums[j] = 0.0f32;
        }
        for slot in first..first + top_k {
            let weight = weights[slot];
            unpack::<X, V>(x[slot * n + column], &mut values, 0usize, vector, shape.dtype);
            #[unroll]
            for j in 0..vector {
                sums[j] += weight * values[j];
            }
        }
        y[i] = pack::<X, V>(&sums, 0usize, vector, shape.dtype);
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(shape.dtype, X => Box::new(combine::Combine::<X>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), (), (), (), shape.vector, shape,
    )))
}

/// Each type and way to load.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let shapes =
        crate::ops::testing::FLOATS.into_iter().flat_map(|dtype| [(dtype, 1), (dtype, rows::VECTOR)]);
    shapes.map(|(dtype, vector)| kernel(target, Shape { dtype, vector })).collect()
}

/// See [`super::combine_experts`]; everything was checked.
pub(super) fn combine_experts(
    op: Check,
    gpu: &Gpu,
    x: &Tensor,
    weights: &Tensor,
) -> Result<Tensor, KernelError> {
    let (tokens, top_k, n) = (x.dim(0), x.dim(1), x.dim(2));
    let y = Tensor::allocate(&[tokens, n], x.dtype(), x.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let shape = Shape { dtype: op.float("x", x)?, vector: rows::vector(gpu.target(), rows::VECTOR, n, &[x]) };
    op.index(x.len())?;
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: cubes(y.len() / shape.vector),
        buffers: vec![x.memory()?, weights.memory()?, y.memory()?],
        scalars: vec![op.index(y.len() / shape.vector)?, op.index(n / shape.vector)?, op.index(top_k)?],
    })?;
    Ok(y)
}
