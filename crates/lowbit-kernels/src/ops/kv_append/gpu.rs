//! Writing keys or values into a cache on a GPU: `cache[h, positions[t], d] = x[t, h, d]`.
//!
//! A unit moves [`WIDE`] neighbouring elements, or one where rows are no multiple of that.
//! Positions are read on the device and compared with the cache's capacity there: a token without a
//! place is written nowhere, so a captured pass may replay with other positions.
//! `rms_norm_rope_append` moves its values by [`append_vector`] too.

#![allow(unsafe_code)] // Launches.

use super::CHECK;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Elements that a unit moves at once where a row is a whole number of them.
const WIDE: usize = 4;

/// The sizes of a cache `[heads, capacity, width]`, and of rows of x `[.., heads, width]`.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct CacheSizes {
    heads: u32,
    capacity: u32,
    /// In vectors.
    width: u32,
}

/// `len` counts the vectors of x.
#[kernel]
fn kv_append<X: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    positions: &[u32],
    cache: &mut [Vector<Y, V>],
    sizes: CacheSizes,
    len: u32,
    #[comptime] from: FloatType,
    #[comptime] to: FloatType,
) {
    let mut i = ABSOLUTE_POS as u32;
    while i < len {
        let row = i / sizes.width;
        let position = positions[(row / sizes.heads) as usize];
        if position < sizes.capacity {
            let row = row % sizes.heads * sizes.capacity + position;
            append_vector::<X, Y, V>(x, i, cache, row * sizes.width + i % sizes.width, from, to);
        }
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

/// Converts vector `i` of x and stores it as vector `at` of a cache.
#[cube]
pub(in crate::ops) fn append_vector<X: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    i: u32,
    cache: &mut [Vector<Y, V>],
    at: u32,
    #[comptime] from: FloatType,
    #[comptime] to: FloatType,
) {
    let values = x[i as usize];
    if comptime!(from == to) {
        cache[at as usize] = Vector::<Y, V>::cast_from(values);
    } else {
        let mut y = Vector::<Y, V>::empty();
        #[unroll]
        for j in 0..V::value() {
            let value = widen(u32::cast_from(values.extract(j)), from);
            y.insert(j, Y::cast_from(narrow(value, to)));
        }
        cache[at as usize] = y;
    }
}

fn compiled(target: &Target, from: FloatType, to: FloatType, vector: usize) -> Kernel<KvAppend<'static>> {
    with_storage!(from, X => with_storage!(to, Y => KvAppend::kernel::<X, Y>(target, UNITS, vector, from, to)))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op for `target`.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let all = floats.into_iter().flat_map(|from| floats.map(|to| [1, WIDE].map(|wide| (from, to, wide))));
    all.flatten().map(|(from, to, wide)| compiled(target, from, to, wide).code()).collect()
}

/// See [`super::kv_append`]; everything was checked.
pub(super) fn launch(
    gpu: &Gpu,
    cache: &mut Tensor,
    x: &Tensor,
    positions: &Tensor,
) -> Result<(), KernelError> {
    if x.is_empty() || cache.is_empty() {
        return Ok(());
    }
    cache.unshare()?;
    let (from, to) = (CHECK.float("x", x)?, CHECK.float("cache", cache)?);
    let vector = if cache.dim(2).is_multiple_of(WIDE) { WIDE } else { 1 };
    // The cache's last element must have an index too.
    CHECK.index(cache.len())?;
    let len = x.len() / vector;
    let sizes = CacheSizes {
        heads: CHECK.index(cache.dim(0))?,
        capacity: CHECK.index(cache.dim(1))?,
        width: CHECK.index(cache.dim(2) / vector)?,
    };
    let arguments = KvAppend {
        x: x.buffer()?,
        positions: positions.buffer()?,
        cache: cache.buffer()?,
        sizes,
        len: CHECK.index(len)?,
    };
    // SAFETY: the op checked that rows of x are the cache's and that each token has a position; the
    // kernel leaves out positions beyond the capacity.
    unsafe { gpu.launch(compiled(gpu.target(), from, to, vector), cubes(len), arguments) }
}
