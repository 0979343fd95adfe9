//! Shared by all kernels of a draw: their compile-time configuration, the cut of the logits, a
//! row's parameters, and sums over a plane.

use super::super::batch::word;
use super::super::{DecodeBatch, SampleKind};
use crate::gpu::compile::Target;
use crate::gpu::launch::LaunchArgs;
use crate::gpu::math::exp;
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
    /// True if top-p is on in some row.
    pub top_p: bool,
    /// True if top-k is on in some row.
    pub top_k: bool,
}

/// Units of a cube: no more than the smallest plane has, so that a cube is always within one plane.
pub(super) fn lanes(target: &Target) -> usize {
    target.smallest_plane().min(32)
}

impl SampleConfig {
    pub fn of(target: &Target, dtype: FloatType, kind: SampleKind) -> Self {
        Self { dtype, lanes: lanes(target), top_p: kind.top_p, top_k: kind.top_k }
    }

    /// True if a threshold is searched in some row.
    pub fn searches(self) -> bool {
        self.top_p || self.top_k
    }
}

/// The cut of each row of the logits.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Sizes {
    /// Logits of a row.
    pub len: u32,
    /// Logits per slice.
    pub slice: u32,
    /// Slices of a row.
    pub slices: u32,
}

/// The parameters of a row: see [`word`].
#[derive(CubeType)]
pub(super) struct Parameters {
    pub rate: u32,
    pub floor: u32,
    pub top_k: u32,
    pub share: u32,
    /// True if a sequence uses the row.
    pub is_used: bool,
    /// True if the row has a threshold that is searched.
    pub searches: bool,
}

/// The parameters of a row of the batch.
#[cube]
pub(super) fn parameters_of(parameters: &[u32], row: u32) -> Parameters {
    let at = row as usize * word::COUNT;
    let (top_k, share) = (parameters[at + word::TOP_K], parameters[at + word::SHARE]);
    Parameters {
        rate: parameters[at + word::RATE],
        floor: parameters[at + word::FLOOR],
        top_k,
        share,
        is_used: parameters[at + word::USED] != 0u32,
        searches: top_k != word::ALL || share != word::ALL,
    }
}

/// The tensors of a [`DecodeBatch`] that a draw changes.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct State {
    pub tokens: Box<[u32]>,
    pub positions: Box<[u32]>,
    pub steps: Box<[u32]>,
    pub histories: Box<[u32]>,
}

/// Moves a row on to the token `id`, which takes the place of the oldest in the ring of its window,
/// among the `places` of its history.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
pub(super) fn append_token(id: u32, row: u32, parameters: &[u32], state: &mut State, places: u32) {
    let window = min(parameters[row as usize * word::COUNT + word::WINDOW], places);
    let at = state.positions[row as usize] + 1u32;
    state.tokens[row as usize] = id;
    state.positions[row as usize] = at;
    state.steps[row as usize] += 1u32;
    if window > 0u32 {
        state.histories[(row * places + at % window) as usize] = id;
    }
}

/// The logits of one draw and what the kernels share.
pub(super) struct Draw<'a> {
    pub gpu: &'a Gpu,
    /// `[rows, V]`, or of one row in another shape.
    pub logits: &'a Tensor,
    pub rows: usize,
    pub batch: &'a DecodeBatch,
    pub config: SampleConfig,
    pub sizes: Sizes,
    /// Of each row: each slice's greatest key, then each slice's id of it.
    pub greatest: Memory,
}

impl Draw<'_> {
    /// A plane per slice of each row.
    pub fn cubes(&self) -> [u32; 3] {
        [self.sizes.slices, self.rows as u32, 1]
    }

    /// A plane per row.
    pub fn cubes_of_rows(&self) -> [u32; 3] {
        [1, self.rows as u32, 1]
    }

    /// Places of a row's history.
    pub fn places(&self) -> u32 {
        self.batch.tensors()[3].dim(1) as u32
    }
}

impl<'a> StateArgs<'a> {
    pub fn of(batch: &'a DecodeBatch) -> Result<Self, KernelError> {
        let [tokens, positions, steps, histories, _] = batch.tensors();
        Ok(Self {
            tokens: tokens.buffer()?,
            positions: positions.buffer()?,
            steps: steps.buffer()?,
            histories: histories.buffer()?,
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

/// `exp((x - greatest) * rate)` in units of 2^-40.
#[cube]
pub(super) fn weight(x: f32, greatest: f32, rate: f32) -> u64 {
    let share = exp((x - greatest) * rate) * 1_048_576.0f32;
    let high = u32::cast_from(share);
    let low = u32::cast_from((share - f32::cast_from(high)) * 1_048_576.0f32);
    (u64::cast_from(high) << 20u64) + u64::cast_from(low)
}

/// The first word of the cube's row in `greatest`.
#[cube]
pub(super) fn greatest_at(slices: u32) -> u32 {
    CUBE_POS_Y * 2u32 * slices
}

/// The key of the greatest logit of the cube's row, from those of all slices.
#[cube]
pub(super) fn greatest_key(greatest: &[u32], slices: u32, #[comptime] lanes: usize) -> u32 {
    let at = greatest_at(slices);
    let mut best = 0u32.runtime();
    let mut i = UNIT_POS_X;
    while i < slices {
        best = max(best, greatest[(at + i) as usize]);
        i += comptime!(lanes as u32);
    }
    if comptime!(lanes == 1) { best } else { plane_max(best) }
}
