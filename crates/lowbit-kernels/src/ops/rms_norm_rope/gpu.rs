//! Heads made ready on a GPU: a plane or a cube a head, each unit with some slots of it in registers.

pub(super) mod append;

use super::RmsNormRope;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::math::reciprocal;
use crate::gpu::rows::{self, Rows, Sum, reduce};
use crate::gpu::{Dispatch, Gpu};
use crate::ops::check::Check;
use crate::ops::rope::RopeLayout;
use crate::ops::rope::gpu::{angles, rotate_pairs, slots, vectors_of};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Of slots: two vectors of a head, which hold pairs or what is not rotated.
    rows: Rows,
    /// Slots of a unit.
    each: usize,
    x: FloatType,
    y: FloatType,
    norm: bool,
    layout: RopeLayout,
}

impl Shape {
    /// For `count` heads that lie in `tensors`, so many `columns` apart.
    fn of(
        target: &Target,
        params: &RmsNormRope<'_>,
        [count, columns @ ..]: [usize; 3],
        [x, y]: [FloatType; 2],
        tensors: &[&Tensor],
    ) -> Self {
        let pairs = params.rope.inv_freq().len();
        let fits = |size: usize| rows::vector(target, rows::VECTOR, size, tensors);
        let vector = [params.head_dim, columns[0], columns[1], pairs]
            .map(fits)
            .into_iter()
            .fold(rows::VECTOR, usize::min);
        let sizes = [count, slots(params.head_dim / vector, pairs / vector)];
        let norm = params.norm.is_some();
        Self::new(target, sizes, vector, [x, y], norm, params.rope.layout())
    }

    fn new(
        target: &Target,
        [count, slots]: [usize; 2],
        vector: usize,
        [x, y]: [FloatType; 2],
        norm: bool,
        layout: RopeLayout,
    ) -> Self {
        let rows = Rows::new(target, [count, slots * vector], vector);
        Self { rows, each: slots.div_ceil(rows::stride(rows)), x, y, norm, layout }
    }
}

/// The sizes of heads and their vectors, and what is the same for all of them.
#[derive(CubeType)]
struct Heads {
    /// Vectors of a head.
    width: usize,
    /// Slots that are rotated.
    pairs: usize,
    eps: f32,
    factor: f32,
}

/// A head: its first vectors in x and in y, where it is stored only if it is `live`, and its position.
#[derive(CubeType)]
struct Head {
    from: usize,
    to: usize,
    live: bool,
    position: u32,
}

/// Makes a head ready and stores it.
#[cube]
fn head<X: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    weight: &[Vector<u32, V>],
    inv_freq: &[f32],
    y: &mut [Vector<Y, V>],
    place: &Head,
    heads: &Heads,
    #[comptime] shape: Shape,
) {
    let (vector, each) = comptime!((shape.rows.vector, shape.each));
    let (stride, layout) = comptime!((rows::stride(shape.rows), shape.layout));
    let slots = slots(heads.width, heads.pairs);
    let mut cos = Array::<f32>::new(comptime!(each * vector));
    let mut sin = Array::<f32>::new(comptime!(each * vector));
    let mut values = Array::<f32>::new(comptime!(2 * each * vector));
    let mut weights = Array::<f32>::new(comptime!(2 * each * vector));
    // All is loaded before anything waits; units without a slot load the last again.
    #[unroll]
    for n in 0..each {
        let slot = min(rows::place(shape.rows) + comptime!(n * stride), slots - 1);
        let (first, second) = vectors_of(slot, heads.pairs, layout);
        let second = min(second, heads.width - 1);
        let at = comptime!(2 * n * vector);
        unpack::<X, V>(x[place.from + first], &mut values, at, vector, shape.x);
        unpack::<X, V>(x[place.from + second], &mut values, comptime!(at + vector), vector, shape.x);
        if comptime!(shape.norm) {
            unpack::<u32, V>(weight[first], &mut weights, at, vector, FloatType::F32);
            unpack::<u32, V>(weight[second], &mut weights, comptime!(at + vector), vector, FloatType::F32);
        }
        if slot < heads.pairs {
            let at = comptime!(n * vector);
            angles(place.position, inv_freq, slot, heads.factor, &mut cos, &mut sin, at, vector);
        }
    }
    let scale = scale(&values, heads, shape);
    #[unroll]
    for n in 0..each {
        let slot = rows::place(shape.rows) + comptime!(n * stride);
        if place.live && slot < slots {
            let (first, second) = vectors_of(slot, heads.pairs, layout);
            let at = comptime!(2 * n * vector);
            if comptime!(shape.norm) {
                #[unroll]
                for j in 0..comptime!(2 * vector) {
                    values[at + j] = values[at + j] * scale * weights[at + j];
                }
            }
            if slot < heads.pairs {
                rotate_pairs(&mut values, &cos, &sin, comptime!(n * vector), vector, layout);
            }
            y[place.to + first] = pack::<Y, V>(&values, at, vector, shape.y);
            if second < heads.width {
                y[place.to + second] = pack::<Y, V>(&values, comptime!(at + vector), vector, shape.y);
            }
        }
    }
}

/// What the norm scales a head's values by; 1 without a norm.
#[cube]
fn scale(values: &Array<f32>, heads: &Heads, #[comptime] shape: Shape) -> f32 {
    let (vector, stride) = comptime!((shape.rows.vector, rows::stride(shape.rows)));
    let mut scale = 1.0f32;
    if comptime!(shape.norm) {
        let slots = slots(heads.width, heads.pairs);
        let mut squares = 0.0f32;
        #[unroll]
        for n in 0..comptime!(shape.each) {
            let slot = rows::place(shape.rows) + comptime!(n * stride);
            let (_, second) = vectors_of(slot, heads.pairs, shape.layout);
            #[unroll]
            for j in 0..comptime!(2 * vector) {
                let there = if comptime!(j < vector) { slot < slots } else { second < heads.width };
                let value = select(there, values[comptime!(2 * n * vector + j)], 0.0f32.runtime());
                squares = fma(value, value, squares);
            }
        }
        let mean = reduce::<f32, Sum>(squares, shape.rows) / f32::cast_from((heads.width * vector) as u32);
        scale = reciprocal((mean + heads.eps).sqrt());
    }
    scale
}

/// `y` of `count` heads, `heads` of each position; those of x are `pitch` vectors apart.
#[cube(launch_unchecked)]
fn ready<X: Int, V: Size>(
    x: &[Vector<X, V>],
    weight: &[Vector<u32, V>],
    positions: &[u32],
    inv_freq: &[f32],
    y: &mut [Vector<X, V>],
    count: u32,
    heads: u32,
    pitch: u32,
    width: u32,
    pairs: u32,
    eps: u32,
    factor: u32,
    #[comptime] shape: Shape,
) {
    let row = rows::row(shape.rows);
    let live = row < count as usize;
    // Units past the last head do the first, and keep it to themselves.
    let row = select(live, row, 0usize);
    let sizes = Heads {
        width: width as usize,
        pairs: pairs as usize,
        eps: f32::reinterpret(eps),
        factor: f32::reinterpret(factor),
    };
    let position = positions[row / heads as usize];
    let place = Head { from: row * pitch as usize, to: row * width as usize, live, position };
    head::<X, X, V>(x, weight, inv_freq, y, &place, &sizes, shape);
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.rows.units as u32);
    with_storage!(shape.x, X => Box::new(ready::Ready::<X>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), buffer(), (), (), (), (), (), (), (),
        shape.rows.vector, shape,
    )))
}

/// Each layout, type and way to load.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for (x, (slots, vector)) in crate::ops::testing::FLOATS.into_iter().zip([(32, 4), (70, 1), (16, 4)]) {
        for (layout, norm) in [(RopeLayout::HalfSplit, true), (RopeLayout::Interleaved, false)] {
            kernels.push(kernel(target, Shape::new(target, [16, slots], vector, [x, x], true, layout)));
            for y in [x, FloatType::F16] {
                kernels.push(append::kernel(
                    target,
                    Shape::new(target, [4, slots], vector, [x, y], norm, layout),
                ));
            }
        }
    }
    kernels
}

/// See [`super::rms_norm_rope`]; everything was checked, and there is a norm.
pub(super) fn rms_norm_rope(
    check: Check,
    gpu: &Gpu,
    x: &Tensor,
    positions: &Tensor,
    params: &RmsNormRope<'_>,
) -> Result<Tensor, KernelError> {
    let (tokens, heads, columns) = (x.dim(0), x.dim(1), x.dim(2));
    let y = Tensor::allocate(&[tokens, heads, params.head_dim], x.dtype(), x.device())?;
    let Some((weight, eps)) = params.norm.filter(|_| !y.is_empty()) else { return Ok(y) };
    let (weight, inv_freq) = (weight.cast(DType::F32)?, params.rope.uploaded(x.device())?);
    let (count, dtype) = (tokens * heads, check.float("x", x)?);
    let shape = Shape::of(gpu.target(), params, [count, columns, columns], [dtype; 2], &[x, &weight]);
    check.index(x.len())?;
    let vector = shape.rows.vector;
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: shape.rows.cubes(count),
        buffers: vec![x.memory()?, weight.memory()?, positions.memory()?, inv_freq.memory()?, y.memory()?],
        scalars: vec![
            check.index(count)?,
            check.index(heads)?,
            check.index(columns / vector)?,
            check.index(params.head_dim / vector)?,
            check.index(inv_freq.len() / vector)?,
            eps.to_bits(),
            params.rope.attention_factor().to_bits(),
        ],
    })?;
    Ok(y)
}
