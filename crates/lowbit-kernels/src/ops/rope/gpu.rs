//! Rotations on a GPU: a unit takes some pairs of some heads, so that their sines are computed once.

use super::{Rope, RopeLayout};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::UNITS;
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::math::sin_cos;
use crate::gpu::{Dispatch, Gpu, rows};
use crate::ops::check::Check;
use crate::{Device, KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
use std::sync::{Arc, Mutex, PoisonError};

/// A rotation's frequencies on the GPUs that have asked for them. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Uploaded(Arc<Mutex<Vec<Tensor>>>);

/// It is no part of a rotation's value.
impl PartialEq for Uploaded {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Rope {
    /// The frequencies on `device`, which gets them when it first asks.
    pub(in crate::ops) fn uploaded(&self, device: &Device) -> Result<Tensor, KernelError> {
        self.uploaded.get(&self.inv_freq, device)
    }
}

impl Uploaded {
    fn get(&self, values: &[f32], device: &Device) -> Result<Tensor, KernelError> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = all.iter().find(|tensor| tensor.device().is(device)) {
            return Ok(tensor.clone());
        }
        let tensor = Tensor::new(values, &[values.len()], device)?;
        all.push(tensor.clone());
        Ok(tensor)
    }
}

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    layout: RopeLayout,
    dtype: FloatType,
    /// Pairs that a unit rotates at once.
    vector: usize,
}

/// A unit takes two vectors of each of `share` heads, `len` units in all; heads have `pairs` vectors of pairs and `width`
/// vectors.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube(launch_unchecked)]
fn rotate<X: Int, V: Size>(
    x: &[Vector<X, V>],
    positions: &[u32],
    inv_freq: &[f32],
    y: &mut [Vector<X, V>],
    len: u32,
    heads: u32,
    share: u32,
    pairs: u32,
    width: u32,
    factor: u32,
    #[comptime] shape: Shape,
) {
    let vector = comptime!(shape.vector);
    let (heads, share, pairs, width) = (heads as usize, share as usize, pairs as usize, width as usize);
    let slots = slots(width, pairs);
    let shares = heads.div_ceil(share);
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let (slot, head, token) = (i % slots, i / slots % shares * share, i / slots / shares);
        let mut cos = Array::<f32>::new(vector);
        let mut sin = Array::<f32>::new(vector);
        let rotated = slot < pairs;
        let (first, second) = vectors_of(slot, pairs, shape.layout);
        if rotated {
            let (position, factor) = (positions[token], f32::reinterpret(factor));
            angles(position, inv_freq, slot, factor, &mut cos, &mut sin, 0usize, vector);
        }
        for head in head..min(head + share, heads) {
            let at = (token * heads + head) * width;
            if rotated {
                turn::<X, V>(x, y, at + first, at + second, &cos, &sin, shape);
            } else {
                y[at + first] = x[at + first];
                if second < width {
                    y[at + second] = x[at + second];
                }
            }
        }
    }
}

/// The two vectors of a head that a slot stands for: `pairs` slots are rotated, those after them hold the rest.
#[cube]
pub(in crate::ops) fn vectors_of(
    slot: usize,
    pairs: usize,
    #[comptime] layout: RopeLayout,
) -> (usize, usize) {
    let split = comptime!(layout == RopeLayout::HalfSplit).runtime() && slot < pairs;
    (select(split, slot, slot * 2), select(split, slot + pairs, slot * 2 + 1))
}

/// Slots of a head of `width` vectors, of which `pairs` slots are rotated; what is copied goes by two vectors as well.
#[cube]
pub(in crate::ops) fn slots(width: usize, pairs: usize) -> usize {
    pairs + (width - 2 * pairs).div_ceil(2)
}

/// Cosines and sines of the pairs of a slot, to `vector` elements from `at` on.
#[cube]
pub(in crate::ops) fn angles(
    position: u32,
    inv_freq: &[f32],
    slot: usize,
    factor: f32,
    cos: &mut Array<f32>,
    sin: &mut Array<f32>,
    #[comptime] at: usize,
    #[comptime] vector: usize,
) {
    // All loads before the first sine, whose branches they would wait for.
    #[unroll]
    for j in 0..vector {
        cos[at + j] = inv_freq[slot * vector + j];
    }
    #[unroll]
    for j in 0..vector {
        let (s, c) = sin_cos(f32::cast_from(position) * cos[at + j]);
        cos[at + j] = c * factor;
        sin[at + j] = s * factor;
    }
}

/// Rotates the pairs of a slot by its angles, which are from `at` on; its two vectors are from twice there.
#[cube]
pub(in crate::ops) fn rotate_pairs(
    values: &mut Array<f32>,
    cos: &Array<f32>,
    sin: &Array<f32>,
    #[comptime] at: usize,
    #[comptime] vector: usize,
    #[comptime] layout: RopeLayout,
) {
    #[unroll]
    for j in 0..vector {
        let (a, b) = comptime!(match layout {
            RopeLayout::HalfSplit => (2 * at + j, 2 * at + j + vector),
            RopeLayout::Interleaved => (2 * (at + j), 2 * (at + j) + 1),
        });
        let (xa, xb) = (values[a], values[b]);
        values[a] = xa * cos[at + j] - xb * sin[at + j];
        values[b] = xb * cos[at + j] + xa * sin[at + j];
    }
}

/// Rotates the pairs of two vectors.
#[cube]
fn turn<X: Int, V: Size>(
    x: &[Vector<X, V>],
    y: &mut [Vector<X, V>],
    first: usize,
    second: usize,
    cos: &Array<f32>,
    sin: &Array<f32>,
    #[comptime] shape: Shape,
) {
    let vector = comptime!(shape.vector);
    let mut values = Array::<f32>::new(comptime!(2 * vector));
    unpack::<X, V>(x[first], &mut values, 0usize, vector, shape.dtype);
    unpack::<X, V>(x[second], &mut values, vector, vector, shape.dtype);
    rotate_pairs(&mut values, cos, sin, 0usize, vector, shape.layout);
    y[first] = pack::<X, V>(&values, 0usize, vector, shape.dtype);
    y[second] = pack::<X, V>(&values, vector, vector, shape.dtype);
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(shape.dtype, X => Box::new(rotate::Rotate::<X>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), (), (), (), (), (), (), shape.vector,
        shape,
    )))
}

/// Each layout, type and way to load.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for (layout, vector) in
        [RopeLayout::HalfSplit, RopeLayout::Interleaved].into_iter().flat_map(|l| [(l, 1), (l, 4)])
    {
        for dtype in crate::ops::testing::FLOATS {
            kernels.push(kernel(target, Shape { layout, dtype, vector }));
        }
    }
    kernels
}

/// Units that keep a GPU busy; more of them share sines.
const ENOUGH: usize = 1 << 17;

/// See [`super::rope`]; everything was checked.
pub(super) fn rope(
    check: Check,
    gpu: &Gpu,
    x: &Tensor,
    positions: &Tensor,
    rope: &Rope,
) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(x.shape(), x.dtype(), x.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let inv_freq = rope.uploaded(x.device())?;
    let (tokens, heads, width, pairs) = (x.dim(0), x.dim(1), x.dim(2), rope.inv_freq.len());
    let [of_pairs, of_heads] =
        [pairs.max(1), width].map(|n| rows::vector(gpu.target(), rows::VECTOR, n, &[x]));
    let vector = of_pairs.min(of_heads);
    let slots = slots(width / vector, pairs / vector);
    let share = (tokens * heads * slots / ENOUGH).clamp(1, heads);
    let len = tokens * heads.div_ceil(share) * slots;
    check.index(x.len())?;
    let shape = Shape { layout: rope.layout, dtype: check.float("x", x)?, vector };
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: rows::cubes(len.div_ceil(UNITS as usize)),
        buffers: vec![x.memory()?, positions.memory()?, inv_freq.memory()?, y.memory()?],
        scalars: vec![
            check.index(len)?,
            check.index(heads)?,
            check.index(share)?,
            check.index(pairs / vector)?,
            check.index(width / vector)?,
            rope.attention_factor.to_bits(),
        ],
    })?;
    Ok(y)
}
