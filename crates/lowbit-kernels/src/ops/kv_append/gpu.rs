//! Rows to their places in a cache on a GPU: a unit moves a few neighbouring elements.

use super::CHECK;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::{Dispatch, Gpu};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Elements that a unit moves at once where a row is a whole number of them.
const WIDE: usize = 4;

/// `width` counts vectors, and `len` those of x.
#[cube(launch_unchecked)]
fn append<X: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    positions: &[u32],
    cache: &mut [Vector<Y, V>],
    heads: u32,
    capacity: u32,
    width: u32,
    len: u32,
    #[comptime] from: FloatType,
    #[comptime] to: FloatType,
) {
    let mut i = ABSOLUTE_POS as u32;
    while i < len {
        put::<X, Y, V>(x, positions, cache, i, heads, capacity, width, from, to);
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

/// Moves vector `i` of x to its place in the cache, where it has one; `width` counts vectors.
#[cube]
pub(in crate::ops) fn put<X: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    positions: &[u32],
    cache: &mut [Vector<Y, V>],
    i: u32,
    heads: u32,
    capacity: u32,
    width: u32,
    #[comptime] from: FloatType,
    #[comptime] to: FloatType,
) {
    let row = i / width;
    let position = positions[(row / heads) as usize];
    if position < capacity {
        let at = ((row % heads * capacity + position) * width + i % width) as usize;
        let values = x[i as usize];
        if comptime!(from == to) {
            cache[at] = Vector::<Y, V>::cast_from(values);
        } else {
            let mut y = Vector::<Y, V>::empty();
            #[unroll]
            for j in 0..V::value() {
                let value = widen(u32::cast_from(values.extract(j)), from);
                y.insert(j, Y::cast_from(narrow(value, to)));
            }
            cache[at] = y;
        }
    }
}

fn kernel(target: &Target, from: FloatType, to: FloatType, vector: usize) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(from, X => with_storage!(to, Y => Box::new(append::Append::<X, Y>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), (), (), (), (), vector, from, to,
    ))))
}

/// Every kernel of the op for `target`.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let all = floats.into_iter().flat_map(|from| floats.map(|to| [1, WIDE].map(|wide| (from, to, wide))));
    all.flatten().map(|(from, to, wide)| kernel(target, from, to, wide)).collect()
}

/// See [`super::kv_append`]; everything was checked.
pub(super) fn kv_append(
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
    let scalars = [cache.dim(0), cache.dim(1), cache.dim(2) / vector, len].map(|size| CHECK.index(size));
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), from, to, vector),
        cubes: cubes(len),
        buffers: vec![x.memory()?, positions.memory()?, cache.memory()?],
        scalars: scalars.into_iter().collect::<Result<_, _>>()?,
    })
}
