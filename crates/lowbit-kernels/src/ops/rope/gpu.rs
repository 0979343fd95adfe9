//! Rotary position embedding on a GPU.
//!
//! A head consists of slots of two vectors each: those whose elements are rotated as pairs, then
//! those that are copied ([`slot_vectors`]). A unit takes one slot of several neighbouring heads of
//! a token, so that it computes cosines and sines once. `rms_norm_rope` rotates by the same
//! functions, so that both round alike.
//!
//! The frequencies are uploaded to a device once per [`Rope`](super::Rope), see [`Uploaded`]. The
//! angle is the rounded f32 product of position and frequency, as the op's contract says: do not
//! reorder it.

#![allow(unsafe_code)] // Launches.

use super::{Direction, RopeLayout};
use crate::gpu::compile::Target;
use crate::gpu::copy::UNITS;
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::sin_cos;
use crate::gpu::{Gpu, rows};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
use std::sync::{Arc, Mutex, PoisonError};

/// A rotation's frequencies on each GPU that has rotated. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Uploaded(Arc<Mutex<Vec<Tensor>>>);

/// Rotations are equal whatever has been uploaded of them.
impl PartialEq for Uploaded {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl super::Rope {
    /// The frequencies on `device`, uploaded at the first call.
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

/// The compile-time configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RopeConfig {
    layout: RopeLayout,
    direction: Direction,
    /// Of x and y.
    dtype: FloatType,
    /// Elements of a vector, and so pairs of a slot.
    vector: usize,
}

/// The operands of angles: a position per token, a frequency per pair.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub(in crate::ops) struct Rotation {
    pub positions: Box<[u32]>,
    pub inv_freq: Box<[f32]>,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Units in all.
    len: u32,
    /// Heads per token.
    heads: u32,
    /// Heads per unit.
    share: u32,
    /// Slots of a head that are rotated.
    pairs: u32,
    /// Vectors of a head.
    width: u32,
}

/// `factor`, which multiplies cosines and sines, is the bits of an f32.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn rope<X: Int, V: Size>(
    x: &[Vector<X, V>],
    rotation: &Rotation,
    y: &mut [Vector<X, V>],
    sizes: Sizes,
    factor: u32,
    #[comptime] config: RopeConfig,
) {
    let vector = comptime!(config.vector);
    let (heads, share) = (sizes.heads as usize, sizes.share as usize);
    let (pairs, width) = (sizes.pairs as usize, sizes.width as usize);
    let slots = slots_per_head(width, pairs);
    let shares = heads.div_ceil(share);
    let i = ABSOLUTE_POS;
    if i < sizes.len as usize {
        let (slot, head, token) = (i % slots, i / slots % shares * share, i / slots / shares);
        let mut cos = Array::<f32>::new(vector);
        let mut sin = Array::<f32>::new(vector);
        let rotated = slot < pairs;
        let (first, second) = slot_vectors(slot, pairs, config.layout);
        if rotated {
            let (position, factor) = (rotation.positions[token], f32::reinterpret(factor));
            slot_angles(position, &rotation.inv_freq, slot, factor, &mut cos, &mut sin, 0usize, vector);
            if comptime!(config.direction == Direction::Back) {
                #[unroll]
                for j in 0..vector {
                    sin[j] = -sin[j];
                }
            }
        }
        for head in head..min(head + share, heads) {
            let at = (token * heads + head) * width;
            if rotated {
                rotate_vectors::<X, V>(x, y, at + first, at + second, &cos, &sin, config);
            } else {
                y[at + first] = x[at + first];
                if second < width {
                    y[at + second] = x[at + second];
                }
            }
        }
    }
}

/// The two vectors of a head that a slot stands for: the first `pairs` slots are rotated, the
/// others are copied.
#[cube]
pub(in crate::ops) fn slot_vectors(
    slot: usize,
    pairs: usize,
    #[comptime] layout: RopeLayout,
) -> (usize, usize) {
    let split = comptime!(layout == RopeLayout::HalfSplit).runtime() && slot < pairs;
    (select(split, slot, slot * 2), select(split, slot + pairs, slot * 2 + 1))
}

/// Slots of a head of `width` vectors: `pairs` slots that are rotated, and one per two vectors that
/// are copied.
#[cube]
pub(in crate::ops) fn slots_per_head(width: usize, pairs: usize) -> usize {
    pairs + (width - 2 * pairs).div_ceil(2)
}

/// Computes the cosines and sines of a slot's `vector` pairs, and stores them from element `at` on.
#[cube]
pub(in crate::ops) fn slot_angles(
    position: u32,
    inv_freq: &[f32],
    slot: usize,
    factor: f32,
    cos: &mut Array<f32>,
    sin: &mut Array<f32>,
    #[comptime] at: usize,
    #[comptime] vector: usize,
) {
    // All loads come before the first sine: its branches would delay them.
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

/// Rotates the pairs of a slot. Its cosines and sines start at element `at`, the values of its two
/// vectors at `2 * at`.
#[cube]
pub(in crate::ops) fn rotate_slot(
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

/// Rotates the pairs of vectors `first` and `second` of x.
#[cube]
fn rotate_vectors<X: Int, V: Size>(
    x: &[Vector<X, V>],
    y: &mut [Vector<X, V>],
    first: usize,
    second: usize,
    cos: &Array<f32>,
    sin: &Array<f32>,
    #[comptime] config: RopeConfig,
) {
    let vector = comptime!(config.vector);
    let mut values = Array::<f32>::new(comptime!(2 * vector));
    unpack::<X, V>(x[first], &mut values, 0usize, vector, config.dtype);
    unpack::<X, V>(x[second], &mut values, vector, vector, config.dtype);
    rotate_slot(&mut values, cos, sin, 0usize, vector, config.layout);
    y[first] = pack::<X, V>(&values, 0usize, vector, config.dtype);
    y[second] = pack::<X, V>(&values, vector, vector, config.dtype);
}

fn compiled(target: &Target, config: RopeConfig) -> Kernel<Rope<'static>> {
    with_storage!(config.dtype, X => Rope::kernel::<X>(target, UNITS, config.vector, config))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Each layout, type, vector length and direction.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for (layout, vector) in
        [RopeLayout::HalfSplit, RopeLayout::Interleaved].into_iter().flat_map(|l| [(l, 1), (l, 4)])
    {
        for dtype in crate::ops::testing::FLOATS {
            for direction in [Direction::Forth, Direction::Back] {
                kernels.push(compiled(target, RopeConfig { layout, direction, dtype, vector }).code());
            }
        }
    }
    kernels
}

/// So many units keep a GPU busy; where there would be more, each takes more heads and computes
/// fewer sines.
const ENOUGH: usize = 1 << 17;

/// See [`super::rope`] and [`super::rope_backward`]; everything was checked.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    x: &Tensor,
    positions: &Tensor,
    (rope, direction): (&super::Rope, Direction),
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
    let slots = slots_per_head(width / vector, pairs / vector);
    let share = (tokens * heads * slots / ENOUGH).clamp(1, heads);
    let len = tokens * heads.div_ceil(share) * slots;
    check.index(x.len())?;
    let config = RopeConfig { layout: rope.layout, direction, dtype: check.float("x", x)?, vector };
    let sizes = Sizes {
        len: check.index(len)?,
        heads: check.index(heads)?,
        share: check.index(share)?,
        pairs: check.index(pairs / vector)?,
        width: check.index(width / vector)?,
    };
    let arguments = Rope {
        x: x.buffer()?,
        rotation: RotationArgs { positions: positions.buffer()?, inv_freq: inv_freq.buffer()? },
        y: y.buffer()?,
        sizes,
        factor: rope.attention_factor.to_bits(),
    };
    // SAFETY: y is as large as x; the op checked that each token has a position and that heads have
    // all pairs.
    unsafe { gpu.launch(compiled(gpu.target(), config), rows::cubes(len.div_ceil(UNITS)), arguments)? };
    Ok(y)
}
