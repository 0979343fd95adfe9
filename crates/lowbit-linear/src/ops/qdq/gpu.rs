//! Affine quantise-dequantise for training on a GPU, and its gradients: see [`super`] for the
//! formulas.
//!
//! `qdq_init` and `qdq_backward` go through the groups plane by plane: the units of a plane share a
//! group, take every `PLANE_DIM`th of its values and reduce across the plane. `qdq_forward` has a
//! unit per value. Planes may have any size, so the order of `qdq_backward`'s sums differs between
//! devices.

#![allow(unsafe_code)] // Launches.

use super::Qdq;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

const CHECK: Check = Check("qdq");

/// The component tensors of a quantised weight: a code per value, a scale and a bias per group.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct QdqComponents {
    codes: Box<[u8]>,
    scales: Box<[f32]>,
    biases: Box<[f32]>,
}

impl Qdq {
    /// The component tensors as an argument of a launch.
    fn buffers(&self) -> Result<QdqComponentsArgs<'_>, KernelError> {
        let Self { codes, scales, biases } = self;
        Ok(QdqComponentsArgs { codes: codes.buffer()?, scales: scales.buffer()?, biases: biases.buffer()? })
    }
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct InitSizes {
    groups: u32,
    group_size: u32,
    levels: u32,
}

/// Chooses the scale, the bias and the codes of each group.
#[kernel]
fn qdq_init(w: &[f32], qdq: &mut QdqComponents, sizes: InitSizes) {
    let plane = PLANE_DIM as usize;
    let lane = UNIT_POS_X as usize % plane;
    let size = sizes.group_size as usize;
    let mut group = ABSOLUTE_POS / plane;
    while group < sizes.groups as usize {
        let first = group * size;
        let mut least = w[first];
        let mut most = least;
        let mut has_nan = 0u32;
        let mut i = lane;
        while i < size {
            let value = w[first + i];
            least = select(value < least, value, least);
            most = select(value > most, value, most);
            // Compares bits: drivers may assume that nothing is NaN.
            if (u32::reinterpret(value) & 0x7fff_ffffu32) > 0x7f80_0000u32 {
                has_nan = 1u32;
            }
            i += plane;
        }
        let bias = select(plane_max(has_nan) == 1u32, f32::reinterpret(0x7fc0_0000u32), plane_min(least));
        let step = (plane_max(most) - bias) / f32::cast_from(sizes.levels - 1u32);
        let scale = select(step > 0.0f32, step, 1.0f32);
        let mut i = lane;
        while i < size {
            let steps = (w[first + i] - bias) / scale;
            let whole = f32::floor(steps);
            let rounded = select(steps - whole >= 0.5f32, whole + 1.0f32, whole);
            // Comparisons with NaN are false: it becomes 0.
            let code = select(rounded > 0.0f32, rounded, 0.0f32);
            qdq.codes[first + i] =
                u8::cast_from(u32::cast_from(min(code, f32::cast_from(sizes.levels - 1u32))));
            i += plane;
        }
        if lane == 0 {
            qdq.scales[group] = scale;
            qdq.biases[group] = bias;
        }
        group += (CUBE_COUNT_X * CUBE_DIM_X) as usize / plane;
    }
}

/// Codes back to values.
#[kernel]
fn qdq_forward(qdq: &QdqComponents, y: &mut [f32], len: u32, group_size: u32) {
    let mut i = ABSOLUTE_POS as u32;
    while i < len {
        let group = (i / group_size) as usize;
        let code = f32::cast_from(u32::cast_from(qdq.codes[i as usize]));
        y[i as usize] = fma(code, qdq.scales[group], qdq.biases[group]);
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

/// The sum of each group's gradients, weighted by their codes if `weighted`; else `codes` is not
/// read.
#[kernel]
fn qdq_backward(
    codes: &[u8],
    dy: &[f32],
    sums: &mut [f32],
    groups: u32,
    group_size: u32,
    #[comptime] weighted: bool,
) {
    let plane = PLANE_DIM as usize;
    let lane = UNIT_POS_X as usize % plane;
    let size = group_size as usize;
    let mut group = ABSOLUTE_POS / plane;
    while group < groups as usize {
        let mut sum = 0.0f32;
        let mut i = lane;
        while i < size {
            let at = group * size + i;
            if comptime!(weighted) {
                sum = fma(f32::cast_from(u32::cast_from(codes[at])), dy[at], sum);
            } else {
                sum += dy[at];
            }
            i += plane;
        }
        let sum = plane_sum(sum);
        if lane == 0 {
            sums[group] = sum;
        }
        group += (CUBE_COUNT_X * CUBE_DIM_X) as usize / plane;
    }
}

fn init_kernel(target: &Target) -> Kernel<QdqInit<'static>> {
    QdqInit::kernel(target, UNITS)
}

fn forward_kernel(target: &Target) -> Kernel<QdqForward<'static>> {
    QdqForward::kernel(target, UNITS)
}

fn backward_kernel(target: &Target, weighted: bool) -> Kernel<QdqBackward<'static>> {
    QdqBackward::kernel(target, UNITS, weighted)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the ops.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    vec![
        init_kernel(target).code(),
        forward_kernel(target).code(),
        backward_kernel(target, false).code(),
        backward_kernel(target, true).code(),
    ]
}

/// Cubes for 32 units per group. Where planes are smaller or larger, or there are too many groups,
/// each plane takes several groups, or none.
fn plane_cubes(groups: usize) -> [u32; 3] {
    cubes(groups.saturating_mul(32))
}

/// See [`super::qdq_init`]; everything was checked.
pub(super) fn launch_init(
    gpu: &Gpu,
    w: &Tensor,
    qdq: &Qdq,
    group_size: usize,
    levels: usize,
) -> Result<(), KernelError> {
    if w.is_empty() {
        return Ok(());
    }
    CHECK.index(w.len())?;
    let groups = qdq.scales.len();
    let sizes =
        InitSizes { groups: CHECK.index(groups)?, group_size: group_size as u32, levels: levels as u32 };
    let arguments = QdqInit { w: w.buffer()?, qdq: qdq.buffers()?, sizes };
    // SAFETY: the op allocated a code per value of w, and a scale and a bias per group.
    unsafe { gpu.launch(init_kernel(gpu.target()), plane_cubes(groups), arguments) }
}

/// See [`super::qdq_forward`]; everything was checked.
pub(super) fn launch_forward(gpu: &Gpu, qdq: &Qdq, y: &Tensor, group_size: usize) -> Result<(), KernelError> {
    if y.is_empty() {
        return Ok(());
    }
    let arguments = QdqForward {
        qdq: qdq.buffers()?,
        y: y.buffer()?,
        len: CHECK.index(y.len())?,
        group_size: group_size as u32,
    };
    // SAFETY: the op checked that there is a code per value of y, and a scale and a bias per group.
    unsafe { gpu.launch(forward_kernel(gpu.target()), cubes(y.len()), arguments) }
}

/// See [`super::qdq_backward_scales`]; everything was checked.
pub(super) fn launch_backward(
    gpu: &Gpu,
    codes: Option<&Tensor>,
    dy: &Tensor,
    sums: &Tensor,
    group_size: usize,
) -> Result<(), KernelError> {
    if dy.is_empty() {
        return Ok(());
    }
    CHECK.index(dy.len())?;
    let arguments = QdqBackward {
        // Without codes, a placeholder.
        codes: codes.unwrap_or(dy).buffer()?,
        dy: dy.buffer()?,
        sums: sums.buffer()?,
        groups: CHECK.index(sums.len())?,
        group_size: group_size as u32,
    };
    let kernel = backward_kernel(gpu.target(), codes.is_some());
    // SAFETY: the op checked that codes are as large as dy, and sums has one per group.
    unsafe { gpu.launch(kernel, plane_cubes(sums.len()), arguments) }
}
