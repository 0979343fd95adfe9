//! Queries made ready, and keys, made ready, and values to their places in a cache, in one launch: some cubes take heads,
//! the others copy.

use super::{Head, Heads, Shape, head};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::with_storage;
use crate::gpu::{Dispatch, Gpu, rows};
use crate::ops::check::Check;
use crate::ops::kv_append::{gpu::put, kv_append};
use crate::ops::rms_norm_rope::{RmsNormRope, rms_norm_rope};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

/// A unit's head among `count` whose first cube is `cube`, `heads` of each position: which, whether there is one, and its
/// position.
#[cube]
fn row(count: u32, heads: u32, cube: usize, positions: &[u32], #[comptime] shape: Shape) -> (u32, bool, u32) {
    let row = rows::row(shape.rows) - cube * shape.rows.rows;
    let some = row < count as usize;
    // Units past the last head do the first, and keep it to themselves.
    let row = select(some, row, 0usize) as u32;
    (row, some, positions[(row / heads) as usize])
}

/// `query_count` queries, and `count` heads of new keys and of new values, `query_heads` and `heads` of each position:
/// `width` and `value_width` vectors each; queries lie `pitch` vectors apart.
#[cube(launch_unchecked)]
fn place<X: Int, Y: Int, V: Size>(
    queries: &[Vector<X, V>],
    new_keys: &[Vector<X, V>],
    new_values: &[Vector<X, V>],
    query_weight: &[Vector<u32, V>],
    weight: &[Vector<u32, V>],
    positions: &[u32],
    inv_freq: &[f32],
    ready: &mut [Vector<X, V>],
    keys: &mut [Vector<Y, V>],
    values: &mut [Vector<Y, V>],
    query_count: u32,
    query_heads: u32,
    pitch: u32,
    count: u32,
    heads: u32,
    capacity: u32,
    width: u32,
    value_width: u32,
    pairs: u32,
    query_eps: u32,
    eps: u32,
    factor: u32,
    #[comptime] shape: Shape,
) {
    let a_cube = comptime!(shape.rows.rows as u32);
    let query_cubes = query_count.div_ceil(a_cube) as usize;
    let cubes = query_cubes + count.div_ceil(a_cube) as usize;
    let of_queries = CUBE_POS < query_cubes;
    let sizes = Heads {
        width: width as usize,
        pairs: pairs as usize,
        eps: f32::reinterpret(select(of_queries, query_eps, eps)),
        factor: f32::reinterpret(factor),
    };
    if of_queries {
        let (row, some, position) = row(query_count, query_heads, 0usize.runtime(), positions, shape);
        let place = Head { from: (row * pitch) as usize, to: (row * width) as usize, live: some, position };
        let shape = comptime!(Shape { y: shape.x, ..shape });
        head::<X, X, V>(queries, query_weight, inv_freq, ready, &place, &sizes, shape);
    } else if CUBE_POS < cubes {
        let (row, some, position) = row(count, heads, query_cubes, positions, shape);
        let live = some && position < capacity;
        let (from, to) = (row * width, (row % heads * capacity + position) * width);
        let place = Head { from: from as usize, to: to as usize, live, position };
        head::<X, Y, V>(new_keys, weight, inv_freq, keys, &place, &sizes, shape);
    } else {
        let i = (CUBE_POS - cubes) as u32 * CUBE_DIM_X + UNIT_POS_X;
        if i < count * value_width {
            put::<X, Y, V>(new_values, positions, values, i, heads, capacity, value_width, shape.x, shape.y);
        }
    }
}

pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.rows.units as u32);
    let [q, k, v, query_weight, weight, positions, inv_freq] = [(); 7].map(|()| buffer());
    let [ready, keys, values] = [(); 3].map(|()| buffer());
    with_storage!(shape.x, X => with_storage!(shape.y, Y => Box::new(place::Place::<X, Y>::new(
        settings, properties, registers, q, k, v, query_weight, weight, positions, inv_freq, ready, keys, values,
        (), (), (), (), (), (), (), (), (), (), (), (), shape.rows.vector, shape,
    ))))
}

/// See [`super::super::rms_norm_rope_append`]; everything was checked.
pub(in crate::ops::rms_norm_rope) fn append(
    check: Check,
    gpu: &Gpu,
    [keys, values]: [&mut Tensor; 2],
    [q, k, v]: [&Tensor; 3],
    positions: &Tensor,
    [queries, new_keys]: [&RmsNormRope<'_>; 2],
) -> Result<Tensor, KernelError> {
    if k.is_empty() || keys.is_empty() {
        kv_append(values, v, positions)?;
        return rms_norm_rope(q, positions, queries);
    }
    let together = queries.is_like(new_keys);
    let ready = match together {
        true => Tensor::allocate(&[q.dim(0), q.dim(1), queries.head_dim], q.dtype(), q.device())?,
        false => rms_norm_rope(q, positions, queries)?,
    };
    let (heads, capacity) = (keys.dim(0), keys.dim(1));
    let count = k.dim(0) * heads;
    let query_count = if together { q.dim(0) * q.dim(1) } else { 0 };
    keys.unshare()?;
    values.unshare()?;
    let inv_freq = new_keys.rope.uploaded(k.device())?;
    let norm = |params: &RmsNormRope<'_>| match params.norm {
        Some((weight, eps)) => Ok((weight.cast(DType::F32)?, eps)),
        // Anything may stand for what is not read.
        None => Ok::<_, KernelError>((inv_freq.clone(), 0.0)),
    };
    let ((query_weight, query_eps), (weight, eps)) = (norm(queries)?, norm(new_keys)?);
    let (width, value_width, pitch) = (keys.dim(2), values.dim(2), q.dim(2));
    let types = [check.float("k", k)?, check.float("keys", keys)?];
    let tensors = [q, k, v, &query_weight, &weight, &ready, keys, values];
    let sizes = [count.max(query_count), value_width, if together { pitch } else { width }];
    let shape = Shape::of(gpu.target(), new_keys, sizes, types, &tensors);
    let vector = shape.rows.vector;
    // The caches' last elements must have an index too.
    check.index(keys.len().max(values.len()).max(q.len()))?;
    let copies = (count * value_width / vector).div_ceil(shape.rows.units);
    let cubes = [query_count, count].map(|count| count.div_ceil(shape.rows.rows));
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: rows::cubes(cubes[0] + cubes[1] + copies),
        buffers: vec![
            q.memory()?,
            k.memory()?,
            v.memory()?,
            query_weight.memory()?,
            weight.memory()?,
            positions.memory()?,
            inv_freq.memory()?,
            ready.memory()?,
            keys.memory()?,
            values.memory()?,
        ],
        scalars: vec![
            check.index(query_count)?,
            check.index(q.dim(1))?,
            check.index(pitch / vector)?,
            check.index(count)?,
            check.index(heads)?,
            check.index(capacity)?,
            check.index(width / vector)?,
            check.index(value_width / vector)?,
            check.index(inv_freq.len() / vector)?,
            query_eps.to_bits(),
            eps.to_bits(),
            new_keys.rope.attention_factor().to_bits(),
        ],
    })?;
    Ok(ready)
}
