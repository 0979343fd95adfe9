//! Reading a cache on a GPU. Positions are on the device: the host does not know them, and a
//! captured pass replays with other ones.

#![allow(unsafe_code)] // Launches.

use super::CHECK;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{nan, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::{Gpu, rows};
use crate::ops::cache_rows::CacheType;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Vectors of y.
    len: u32,
    heads: u32,
    capacity: u32,
    /// In vectors.
    width: u32,
}

/// A unit moves a vector at a time.
#[kernel]
fn kv_gather<X: Int, V: Size>(
    cache: &[Vector<X, V>],
    positions: &[u32],
    y: &mut [Vector<X, V>],
    sizes: Sizes,
    #[comptime] dtype: FloatType,
) {
    let mut i = ABSOLUTE_POS as u32;
    while i < sizes.len {
        let row = i / sizes.width;
        let position = positions[(row / sizes.heads) as usize];
        let mut values = Vector::<X, V>::new(X::cast_from(comptime!(nan(dtype)).runtime()));
        if position < sizes.capacity {
            let at = (row % sizes.heads * sizes.capacity + position) * sizes.width + i % sizes.width;
            values = cache[at as usize];
        }
        y[i as usize] = values;
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

fn compiled(target: &Target, dtype: FloatType, vector: usize) -> Kernel<KvGather<'static>> {
    with_storage!(dtype, X => KvGather::kernel::<X>(target, UNITS, vector, dtype))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Each type and vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let all = crate::ops::testing::FLOATS.into_iter().flat_map(|dtype| [(dtype, 1), (dtype, rows::VECTOR)]);
    all.map(|(dtype, vector)| compiled(target, dtype, vector).code()).collect()
}

/// Fills `y`, which is not empty; everything was checked.
pub(super) fn launch(
    gpu: &Gpu,
    (cache, cached): (&Tensor, CacheType),
    positions: &Tensor,
    y: &Tensor,
) -> Result<(), KernelError> {
    let (dtype, size) = cached.moved();
    let [heads, capacity, width] = [cache.dim(0), cache.dim(1), cache.dim(2) / size];
    let vector = rows::vector(gpu.target(), rows::VECTOR, width, &[cache, y]);
    CHECK.index(cache.len().max(y.len()))?;
    let len = y.len() / size / vector;
    let sizes = Sizes {
        len: CHECK.index(len)?,
        heads: CHECK.index(heads)?,
        capacity: CHECK.index(capacity)?,
        width: CHECK.index(width / vector)?,
    };
    // A cache without room is not read, and gets a placeholder buffer.
    let read = if cache.is_empty() { positions } else { cache };
    let arguments = KvGather { cache: read.buffer()?, positions: positions.buffer()?, y: y.buffer()?, sizes };
    let kernel = compiled(gpu.target(), dtype, vector);
    // SAFETY: y has a row for each position and head; positions beyond the capacity read nothing.
    unsafe { gpu.launch(kernel, cubes(len), arguments) }
}
