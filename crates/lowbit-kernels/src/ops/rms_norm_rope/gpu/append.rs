//! Keys, made ready, and values to their places in a cache, in one launch: some cubes take heads, the others copy.

use super::{Heads, Shape, head};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::with_storage;
use crate::gpu::{Dispatch, Gpu, rows};
use crate::ops::check::Check;
use crate::ops::kv_append::{gpu::put, kv_append};
use crate::ops::rms_norm_rope::RmsNormRope;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

/// `count` heads of new keys and of new values, `heads` of each position: `width` and `value_width` vectors each.
#[cube(launch_unchecked)]
fn place<X: Int, Y: Int, V: Size>(
    new_keys: &[Vector<X, V>],
    new_values: &[Vector<X, V>],
    weight: &[Vector<u32, V>],
    positions: &[u32],
    inv_freq: &[f32],
    keys: &mut [Vector<Y, V>],
    values: &mut [Vector<Y, V>],
    count: u32,
    heads: u32,
    capacity: u32,
    width: u32,
    value_width: u32,
    pairs: u32,
    eps: u32,
    factor: u32,
    #[comptime] shape: Shape,
) {
    let cubes = count.div_ceil(comptime!(shape.rows.rows as u32)) as usize;
    if CUBE_POS < cubes {
        let row = rows::row(shape.rows);
        let some = row < count as usize;
        // Units past the last head do the first, and keep it to themselves.
        let row = select(some, row, 0usize) as u32;
        let position = positions[(row / heads) as usize];
        let sizes = Heads {
            width: width as usize,
            pairs: pairs as usize,
            eps: f32::reinterpret(eps),
            factor: f32::reinterpret(factor),
        };
        let live = some && position < capacity;
        let (from, to) = (row * width, (row % heads * capacity + position) * width);
        let (from, to) = (from as usize, to as usize);
        head::<X, Y, V>(new_keys, weight, inv_freq, keys, from, to, live, position, sizes, shape);
    } else {
        let i = (CUBE_POS - cubes) as u32 * CUBE_DIM_X + UNIT_POS_X;
        if i < count * value_width {
            put::<X, Y, V>(new_values, positions, values, i, heads, capacity, value_width, shape.x, shape.y);
        }
    }
}

pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.rows.units as u32);
    with_storage!(shape.x, X => with_storage!(shape.y, Y => Box::new(place::Place::<X, Y>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), buffer(), buffer(), buffer(), (), (),
        (), (), (), (), (), (), shape.rows.vector, shape,
    ))))
}

/// See [`super::super::rms_norm_rope_append`]; everything was checked.
pub(in crate::ops::rms_norm_rope) fn append(
    check: Check,
    gpu: &Gpu,
    [keys, values]: [&mut Tensor; 2],
    [k, v]: [&Tensor; 2],
    positions: &Tensor,
    params: &RmsNormRope<'_>,
) -> Result<(), KernelError> {
    if k.is_empty() || keys.is_empty() {
        return kv_append(values, v, positions);
    }
    let (heads, capacity) = (keys.dim(0), keys.dim(1));
    let count = k.dim(0) * heads;
    keys.unshare()?;
    values.unshare()?;
    let inv_freq = params.rope.uploaded(k.device())?;
    let (weight, eps) = match params.norm {
        Some((weight, eps)) => (weight.cast(DType::F32)?, eps),
        // Anything may stand for what is not read.
        None => (inv_freq.clone(), 0.0),
    };
    let (width, value_width) = (keys.dim(2), values.dim(2));
    let types = [check.float("k", k)?, check.float("keys", keys)?];
    let shape = Shape::of(gpu.target(), params, [count, value_width], types, &[k, v, &weight, keys, values]);
    let vector = shape.rows.vector;
    // The caches' last elements must have an index too.
    check.index(keys.len().max(values.len()))?;
    let copies = (count * value_width / vector).div_ceil(shape.rows.units);
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: rows::cubes(count.div_ceil(shape.rows.rows) + copies),
        buffers: vec![
            k.memory()?,
            v.memory()?,
            weight.memory()?,
            positions.memory()?,
            inv_freq.memory()?,
            keys.memory()?,
            values.memory()?,
        ],
        scalars: vec![
            check.index(count)?,
            check.index(heads)?,
            check.index(capacity)?,
            check.index(width / vector)?,
            check.index(value_width / vector)?,
            check.index(inv_freq.len() / vector)?,
            eps.to_bits(),
            params.rope.attention_factor().to_bits(),
        ],
    })
}
