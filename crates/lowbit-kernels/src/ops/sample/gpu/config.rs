//! Shared by all kernels of a draw: their compile-time configuration, the cut of the logits, and
//! sums over a plane.

use super::super::{DecodeState, SampleParams, cpu};
use crate::gpu::compile::Target;
use crate::gpu::launch::LaunchArgs;
use crate::gpu::{Gpu, Memory};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The kernels' compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SampleConfig {
    /// The logits' type.
    pub dtype: FloatType,
    /// Units of a cube, which are within one plane.
    pub lanes: usize,
    /// True if top-p is on.
    pub top_p: bool,
    /// True if top-k is on.
    pub top_k: bool,
}

/// Units of a cube: no more than the smallest plane has, so that a cube is always within one plane.
pub(super) fn lanes(target: &Target) -> usize {
    target.smallest_plane().min(32)
}

impl SampleConfig {
    pub fn of(target: &Target, dtype: FloatType, params: &SampleParams, len: usize) -> Self {
        let lanes = lanes(target);
        Self { dtype, lanes, top_p: params.top_p < 1.0, top_k: (1..len).contains(&params.top_k) }
    }

    /// True if a threshold is searched.
    pub fn searches(self) -> bool {
        self.top_p || self.top_k
    }
}

/// The cut of the logits.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Sizes {
    /// Logits.
    pub len: u32,
    /// Logits per slice.
    pub slice: u32,
    pub slices: u32,
}

/// The filters and the weights of logits.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Filters {
    /// 1 / temperature, an f32.
    pub rate: u32,
    /// The bits of an f32, 0 or less: min-p keeps logits at least this above the greatest one.
    pub floor: u32,
    pub top_k: u32,
}

/// The tensors of [`DecodeState`].
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct State {
    pub token: Box<[u32]>,
    pub position: Box<[u32]>,
    pub step: Box<[u32]>,
    pub history: Box<[u32]>,
}

/// Moves the state on to the token `id`, which takes the place of the oldest in the ring of
/// `window` tokens.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
pub(super) fn append_token(id: u32, state: &mut State, window: u32) {
    let at = state.position[0usize] + 1u32;
    state.token[0usize] = id;
    state.position[0usize] = at;
    state.step[0usize] += 1u32;
    if window > 0u32 {
        state.history[(at % window) as usize] = id;
    }
}

/// The logits of one draw and what the kernels share.
pub(super) struct Draw<'a> {
    pub gpu: &'a Gpu,
    pub logits: &'a Tensor,
    pub config: SampleConfig,
    pub sizes: Sizes,
    pub params: &'a SampleParams,
    /// Each slice's greatest key, then each slice's id of it.
    pub greatest: Memory,
}

impl Draw<'_> {
    pub fn filters(&self) -> Filters {
        Filters {
            rate: cpu::rate(self.params.temperature).to_bits(),
            floor: self.params.min_p.ln().to_bits(),
            top_k: self.top_k(),
        }
    }

    pub fn top_k(&self) -> u32 {
        self.params.top_k.min(u32::MAX as usize) as u32
    }

    /// A plane per slice.
    pub fn cubes(&self) -> [u32; 3] {
        [self.sizes.slices, 1, 1]
    }
}

impl<'a> StateArgs<'a> {
    pub fn of(state: &'a DecodeState) -> Result<Self, KernelError> {
        let [token, position, step, history] = state.tensors();
        Ok(Self {
            token: token.buffer()?,
            position: position.buffer()?,
            step: step.buffer()?,
            history: history.buffer()?,
        })
    }
}

/// The sum over the plane, for all its units.
#[cube]
pub(super) fn all_sum(x: u32, #[comptime] lanes: usize) -> u32 {
    if comptime!(lanes == 1) { x } else { plane_sum(x) }
}

/// The sum over the plane of numbers below 2^62, for all its units: in parts, because not every
/// device adds 64 bits up.
#[cube]
pub(super) fn all_sum_wide(x: u64, #[comptime] lanes: usize) -> u64 {
    if comptime!(lanes == 1) {
        x
    } else {
        let low = plane_sum(u32::cast_from(x) & 0x3f_ffffu32);
        let middle = plane_sum(u32::cast_from(x >> 22u64) & 0x3f_ffffu32);
        let high = plane_sum(u32::cast_from(x >> 44u64));
        u64::cast_from(low) + (u64::cast_from(middle) << 22u64) + (u64::cast_from(high) << 44u64)
    }
}
