//! Writing keys or values into a cache on a GPU: `cache[h, positions[t], d] = x[t, h, d]`, or into
//! pages of a pool.
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
use crate::ops::cache_rows::{self, CacheType};
use crate::ops::pages::gpu::{PoolSizes, Table, cache_row};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Elements that a unit moves at once where a row is a whole number of them.
const WIDE: usize = 4;

/// The sizes of a cache `[heads, capacity, width]`, or of pages, and of rows of x
/// `[.., heads, width]`.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct CacheSizes {
    heads: u32,
    capacity: u32,
    /// In vectors.
    width: u32,
}

/// `len` counts the vectors of x. `table` and `pool` are those of pages.
#[kernel]
fn kv_append<X: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    positions: &[u32],
    table: &[u32],
    cache: &mut [Vector<Y, V>],
    sizes: CacheSizes,
    pool: PoolSizes,
    len: u32,
    #[comptime] from: FloatType,
    #[comptime] to: FloatType,
    #[comptime] paged: bool,
) {
    let mut i = ABSOLUTE_POS as u32;
    while i < len {
        let row = i / sizes.width;
        let (token, head) = (row / sizes.heads, row % sizes.heads);
        let place = (token, head, positions[token as usize]);
        let (row, has) = cache_row(table, place, sizes.capacity, &pool, paged);
        if has {
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

fn compiled(
    target: &Target,
    [from, to]: [FloatType; 2],
    vector: usize,
    paged: bool,
) -> Kernel<KvAppend<'static>> {
    with_storage!(from, X => with_storage!(to, Y => {
        KvAppend::kernel::<X, Y>(target, UNITS, vector, from, to, paged)
    }))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op for `target`.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let all = floats.into_iter().flat_map(|from| floats.map(|to| [1, WIDE].map(|wide| ([from, to], wide))));
    let mut kernels: Vec<_> =
        all.flatten().map(|(types, wide)| compiled(target, types, wide, false).code()).collect();
    kernels.extend(floats.map(|float| compiled(target, [float; 2], WIDE, true).code()));
    kernels
}

/// See [`super::kv_append`] and [`super::kv_append_paged`]; everything was checked.
pub(super) fn launch(
    gpu: &Gpu,
    cache: &mut Tensor,
    x: &Tensor,
    positions: &Tensor,
    table: Option<Table<'_>>,
) -> Result<(), KernelError> {
    if x.is_empty() || cache.is_empty() {
        return Ok(());
    }
    let cached = CacheType::of(CHECK, "cache", cache)?;
    if cached == CacheType::Int8 && x.dtype() != cache.dtype() {
        let append = cache_rows::gpu::Append { x: &[x], queries: None, positions, table };
        return append.launch(CHECK, gpu, &mut [cache]);
    }
    cache.unshare()?;
    let (to, size) = cached.moved();
    let from = if cached == CacheType::Int8 { to } else { CHECK.float("x", x)? };
    let width = cache.dim(-1) / size;
    let vector = if width.is_multiple_of(WIDE) { WIDE } else { 1 };
    // The cache's last element must have an index too.
    CHECK.index(cache.len())?;
    let len = x.len() / size / vector;
    let sizes = CacheSizes {
        heads: CHECK.index(x.dim(1))?,
        capacity: if table.is_some() { 0 } else { CHECK.index(cache.dim(1))? },
        width: CHECK.index(width / vector)?,
    };
    let arguments = KvAppend {
        x: x.buffer()?,
        positions: positions.buffer()?,
        // An unused operand gets a placeholder buffer.
        table: table.map_or(positions, |(table, _)| table).buffer()?,
        cache: cache.buffer()?,
        sizes,
        pool: table.map_or_else(PoolSizes::none, |(_, pool)| pool),
        len: CHECK.index(len)?,
    };
    let kernel = compiled(gpu.target(), [from, to], vector, table.is_some());
    // SAFETY: the op checked that rows of x are the cache's and that each token has a position; the
    // kernel leaves out positions beyond the capacity or the table, and pages beyond the pool.
    unsafe { gpu.launch(kernel, cubes(len), arguments) }
}
