//! The norm and the rotation of query and key heads on a GPU; in `append.rs` also their storing
//! into a KV cache.
//!
//! One plane, or one cube, takes a head. As in `rope`, a head consists of slots of two vectors:
//! pairs that are rotated together, or elements that are copied. Each unit holds `slots_per_unit`
//! slots in registers: it loads them, takes part in the sum of squares, then scales, rotates and
//! stores them. The arithmetic is that of `rms_norm` and `rope`, rounded once at the end; the order
//! of the sum of squares differs from `rms_norm`'s.

#![allow(unsafe_code)] // Launches.

pub(super) mod append;

use super::RmsNormRope as Params;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::reciprocal;
use crate::gpu::rows::{self, Rows, Sum, reduce};
use crate::ops::Check;
use crate::ops::rope::RopeLayout;
use crate::ops::rope::gpu::{Rotation, RotationArgs, rotate_slot, slot_angles, slot_vectors, slots_per_head};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// A kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HeadConfig {
    /// A row is a head; it counts the first vectors of its slots.
    rows: Rows,
    slots_per_unit: usize,
    x: FloatType,
    y: FloatType,
    norm: bool,
    layout: RopeLayout,
    /// True if keys and values go to pages of a pool.
    paged: bool,
    /// True if keys go to rows of the tokens, from which a cache of integers takes them.
    staged: bool,
}

impl HeadConfig {
    /// For `count` heads in `tensors`, where heads start at multiples of each of `columns`.
    fn of(
        target: &Target,
        params: &Params<'_>,
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
        let sizes = [count, slots_per_head(params.head_dim / vector, pairs / vector)];
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
        Self {
            rows,
            slots_per_unit: slots.div_ceil(rows::lanes_per_row(rows)),
            x,
            y,
            norm,
            layout,
            paged: false,
            staged: false,
        }
    }

    /// The same, whose keys and values go to pages of a pool.
    fn in_pages(self, paged: bool) -> Self {
        Self { paged, ..self }
    }

    /// The same, whose keys go to rows of the tokens.
    fn staged(self, staged: bool) -> Self {
        Self { staged, ..self }
    }
}

/// The numbers that all heads of a launch have in common.
#[derive(CubeType)]
struct HeadSizes {
    /// Vectors of a head.
    width: usize,
    /// Slots that are rotated.
    pairs: usize,
    /// Of the norm.
    eps: f32,
    /// Multiplies cosines and sines.
    factor: f32,
}

/// One head.
#[derive(CubeType)]
struct Head {
    /// Its first vector in x.
    from: usize,
    /// Its first vector in y.
    to: usize,
    /// True if it is stored.
    live: bool,
    position: u32,
}

/// Norms and rotates a head, and stores it.
#[cube]
fn norm_and_rotate<X: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    weight: &[Vector<u32, V>],
    inv_freq: &[f32],
    y: &mut [Vector<Y, V>],
    head: &Head,
    sizes: &HeadSizes,
    #[comptime] config: HeadConfig,
) {
    let (vector, each) = comptime!((config.rows.vector, config.slots_per_unit));
    let (stride, layout) = comptime!((rows::lanes_per_row(config.rows), config.layout));
    let slots = slots_per_head(sizes.width, sizes.pairs);
    let mut cos = Array::<f32>::new(comptime!(each * vector));
    let mut sin = Array::<f32>::new(comptime!(each * vector));
    let mut values = Array::<f32>::new(comptime!(2 * each * vector));
    let mut weights = Array::<f32>::new(comptime!(2 * each * vector));
    // All loads come before anything waits for one. Units without a slot load the last slot.
    #[unroll]
    for n in 0..each {
        let slot = min(rows::lane_in_row(config.rows) + comptime!(n * stride), slots - 1);
        let (first, second) = slot_vectors(slot, sizes.pairs, layout);
        let second = min(second, sizes.width - 1);
        let at = comptime!(2 * n * vector);
        unpack::<X, V>(x[head.from + first], &mut values, at, vector, config.x);
        unpack::<X, V>(x[head.from + second], &mut values, comptime!(at + vector), vector, config.x);
        if comptime!(config.norm) {
            unpack::<u32, V>(weight[first], &mut weights, at, vector, FloatType::F32);
            unpack::<u32, V>(weight[second], &mut weights, comptime!(at + vector), vector, FloatType::F32);
        }
        if slot < sizes.pairs {
            let at = comptime!(n * vector);
            slot_angles(head.position, inv_freq, slot, sizes.factor, &mut cos, &mut sin, at, vector);
        }
    }
    let scale = scale(&values, sizes, config);
    #[unroll]
    for n in 0..each {
        let slot = rows::lane_in_row(config.rows) + comptime!(n * stride);
        if head.live && slot < slots {
            let (first, second) = slot_vectors(slot, sizes.pairs, layout);
            let at = comptime!(2 * n * vector);
            if comptime!(config.norm) {
                #[unroll]
                for j in 0..comptime!(2 * vector) {
                    values[at + j] = values[at + j] * scale * weights[at + j];
                }
            }
            if slot < sizes.pairs {
                rotate_slot(&mut values, &cos, &sin, comptime!(n * vector), vector, layout);
            }
            y[head.to + first] = pack::<Y, V>(&values, at, vector, config.y);
            if second < sizes.width {
                y[head.to + second] = pack::<Y, V>(&values, comptime!(at + vector), vector, config.y);
            }
        }
    }
}

/// The factor by which the norm scales a head; 1 without a norm.
#[cube]
fn scale(values: &Array<f32>, sizes: &HeadSizes, #[comptime] config: HeadConfig) -> f32 {
    let (vector, stride) = comptime!((config.rows.vector, rows::lanes_per_row(config.rows)));
    let mut scale = 1.0f32;
    if comptime!(config.norm) {
        let slots = slots_per_head(sizes.width, sizes.pairs);
        let mut squares = 0.0f32;
        #[unroll]
        for n in 0..comptime!(config.slots_per_unit) {
            let slot = rows::lane_in_row(config.rows) + comptime!(n * stride);
            let (_, second) = slot_vectors(slot, sizes.pairs, config.layout);
            #[unroll]
            for j in 0..comptime!(2 * vector) {
                let valid = if comptime!(j < vector) { slot < slots } else { second < sizes.width };
                let value = select(valid, values[comptime!(2 * n * vector + j)], 0.0f32.runtime());
                squares = fma(value, value, squares);
            }
        }
        let mean = reduce::<f32, Sum>(squares, config.rows) / f32::cast_from((sizes.width * vector) as u32);
        scale = reciprocal((mean + sizes.eps).sqrt());
    }
    scale
}

/// The number of heads, of heads per token, and of vectors of x from one head to the next.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct HeadCounts {
    count: u32,
    per_token: u32,
    pitch: u32,
}

/// As [`HeadSizes`]; `eps` and `factor` are the bits of f32s.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct SizeBits {
    width: u32,
    pairs: u32,
    eps: u32,
    factor: u32,
}

/// `weight` is f32.
#[kernel]
fn rms_norm_rope<X: Int, V: Size>(
    x: &[Vector<X, V>],
    weight: &[Vector<u32, V>],
    rotation: &Rotation,
    y: &mut [Vector<X, V>],
    heads: HeadCounts,
    sizes: SizeBits,
    #[comptime] config: HeadConfig,
) {
    let row = rows::row(config.rows);
    let live = row < heads.count as usize;
    // Units past the last head compute the first, but do not store it.
    let row = select(live, row, 0usize);
    let sizes = HeadSizes {
        width: sizes.width as usize,
        pairs: sizes.pairs as usize,
        eps: f32::reinterpret(sizes.eps),
        factor: f32::reinterpret(sizes.factor),
    };
    let position = rotation.positions[row / heads.per_token as usize];
    let head = Head { from: row * heads.pitch as usize, to: row * sizes.width, live, position };
    norm_and_rotate::<X, X, V>(x, weight, &rotation.inv_freq, y, &head, &sizes, config);
}

fn compiled(target: &Target, config: HeadConfig) -> Kernel<RmsNormRope<'static>> {
    with_storage!(config.x, X => {
        RmsNormRope::kernel::<X>(target, config.rows.units, config.rows.vector, config)
    })
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Each layout, type and vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for (x, (slots, vector)) in crate::ops::testing::FLOATS.into_iter().zip([(32, 4), (70, 1), (16, 4)]) {
        for (layout, norm) in [(RopeLayout::HalfSplit, true), (RopeLayout::Interleaved, false)] {
            let config = HeadConfig::new(target, [16, slots], vector, [x, x], true, layout);
            kernels.push(compiled(target, config).code());
            for y in [x, FloatType::F16] {
                let config = HeadConfig::new(target, [4, slots], vector, [x, y], norm, layout);
                kernels.push(append::code(target, config));
                kernels.push(append::code(target, config.in_pages(true)));
                kernels.push(append::code(target, config.staged(true)));
            }
        }
    }
    kernels
}

/// See [`super::rms_norm_rope`]; everything was checked, and there is a norm.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    x: &Tensor,
    positions: &Tensor,
    params: &Params<'_>,
) -> Result<Tensor, KernelError> {
    let (tokens, heads, columns) = (x.dim(0), x.dim(1), x.dim(2));
    let y = Tensor::allocate(&[tokens, heads, params.head_dim], x.dtype(), x.device())?;
    let Some((weight, eps)) = params.norm.filter(|_| !y.is_empty()) else { return Ok(y) };
    let (weight, inv_freq) = (weight.cast(DType::F32)?, params.rope.uploaded(x.device())?);
    let (count, dtype) = (tokens * heads, check.float("x", x)?);
    let config = HeadConfig::of(gpu.target(), params, [count, columns, columns], [dtype; 2], &[x, &weight]);
    check.index(x.len())?;
    let vector = config.rows.vector;
    let arguments = RmsNormRope {
        x: x.buffer()?,
        weight: weight.buffer()?,
        rotation: RotationArgs { positions: positions.buffer()?, inv_freq: inv_freq.buffer()? },
        y: y.buffer()?,
        heads: HeadCounts {
            count: check.index(count)?,
            per_token: check.index(heads)?,
            pitch: check.index(columns / vector)?,
        },
        sizes: SizeBits {
            width: check.index(params.head_dim / vector)?,
            pairs: check.index(inv_freq.len() / vector)?,
            eps: eps.to_bits(),
            factor: params.rope.attention_factor().to_bits(),
        },
    };
    // SAFETY: the op checked that x has `count` heads of at least `head_dim` elements, that heads
    // have all pairs, that the weight is as long as a head and that each token has a position.
    unsafe { gpu.launch(compiled(gpu.target(), config), config.rows.cubes(count), arguments)? };
    Ok(y)
}
