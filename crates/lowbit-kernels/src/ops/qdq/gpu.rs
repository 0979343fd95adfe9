//! A plane takes a group after another; its units go through the group together.

use super::Qdq;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::{Dispatch, Gpu};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

const CHECK: Check = Check("qdq");

/// Grid and codes of each group.
#[cube(launch_unchecked)]
fn init(
    w: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
    groups: u32,
    size: u32,
    levels: u32,
) {
    let plane = PLANE_DIM as usize;
    let lane = UNIT_POS_X as usize % plane;
    let size = size as usize;
    let mut group = ABSOLUTE_POS / plane;
    while group < groups as usize {
        let first = group * size;
        let mut least = w[first];
        let mut most = least;
        let mut spoiled = 0u32;
        let mut i = lane;
        while i < size {
            let value = w[first + i];
            least = select(value < least, value, least);
            most = select(value > most, value, most);
            // By its bits: drivers may take it that nothing is NaN.
            if (u32::reinterpret(value) & 0x7fff_ffffu32) > 0x7f80_0000u32 {
                spoiled = 1u32;
            }
            i += plane;
        }
        let bias = select(plane_max(spoiled) == 1u32, f32::reinterpret(0x7fc0_0000u32), plane_min(least));
        let step = (plane_max(most) - bias) / f32::cast_from(levels - 1u32);
        let scale = select(step > 0.0f32, step, 1.0f32);
        let mut i = lane;
        while i < size {
            let steps = (w[first + i] - bias) / scale;
            let whole = f32::floor(steps);
            let rounded = select(steps - whole >= 0.5f32, whole + 1.0f32, whole);
            // Comparisons with NaN are false: it becomes 0.
            let code = select(rounded > 0.0f32, rounded, 0.0f32);
            codes[first + i] = u8::cast_from(u32::cast_from(min(code, f32::cast_from(levels - 1u32))));
            i += plane;
        }
        if lane == 0 {
            scales[group] = scale;
            biases[group] = bias;
        }
        group += (CUBE_COUNT_X * CUBE_DIM_X) as usize / plane;
    }
}

/// Codes back onto their grids, a unit a value.
#[cube(launch_unchecked)]
fn forward(codes: &[u8], scales: &[f32], biases: &[f32], y: &mut [f32], len: u32, size: u32) {
    let mut i = ABSOLUTE_POS as u32;
    while i < len {
        let group = (i / size) as usize;
        y[i as usize] = fma(f32::cast_from(u32::cast_from(codes[i as usize])), scales[group], biases[group]);
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

/// Sums of each group; `codes` count only with `weighted`.
#[cube(launch_unchecked)]
fn backward(codes: &[u8], dy: &[f32], sums: &mut [f32], groups: u32, size: u32, #[comptime] weighted: bool) {
    let plane = PLANE_DIM as usize;
    let lane = UNIT_POS_X as usize % plane;
    let size = size as usize;
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

fn init_kernel(target: &Target) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    let [w, codes, scales, biases] = [buffer(), buffer(), buffer(), buffer()];
    Box::new(init::Init::new(settings, properties, registers, w, codes, scales, biases, (), (), ()))
}

fn forward_kernel(target: &Target) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    let [codes, scales, biases, y] = [buffer(), buffer(), buffer(), buffer()];
    Box::new(forward::Forward::new(settings, properties, registers, codes, scales, biases, y, (), ()))
}

fn backward_kernel(target: &Target, weighted: bool) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    let [codes, dy, sums] = [buffer(), buffer(), buffer()];
    Box::new(backward::Backward::new(settings, properties, registers, codes, dy, sums, (), (), weighted))
}

/// Every kernel of the ops.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    vec![
        init_kernel(target),
        forward_kernel(target),
        backward_kernel(target, false),
        backward_kernel(target, true),
    ]
}

/// Cubes for planes that take a group each; a plane has 4 units at least.
fn planes(groups: usize) -> [u32; 3] {
    cubes(groups.saturating_mul(32))
}

/// See [`super::qdq_init`]; everything was checked.
pub(super) fn init_on(
    gpu: &Gpu,
    w: &Tensor,
    qdq: &Qdq,
    group_size: usize,
    levels: usize,
) -> Result<(), KernelError> {
    let Qdq { codes, scales, biases } = qdq;
    if w.is_empty() {
        return Ok(());
    }
    CHECK.index(w.len())?;
    gpu.launch(Dispatch {
        kernel: init_kernel(gpu.target()),
        cubes: planes(scales.len()),
        buffers: vec![w.memory()?, codes.memory()?, scales.memory()?, biases.memory()?],
        scalars: vec![CHECK.index(scales.len())?, group_size as u32, levels as u32],
    })
}

/// See [`super::qdq_forward`]; everything was checked.
pub(super) fn forward_on(gpu: &Gpu, qdq: &Qdq, y: &Tensor, group_size: usize) -> Result<(), KernelError> {
    let Qdq { codes, scales, biases } = qdq;
    if y.is_empty() {
        return Ok(());
    }
    gpu.launch(Dispatch {
        kernel: forward_kernel(gpu.target()),
        cubes: cubes(y.len()),
        buffers: vec![codes.memory()?, scales.memory()?, biases.memory()?, y.memory()?],
        scalars: vec![CHECK.index(y.len())?, group_size as u32],
    })
}

/// See [`super::qdq_backward_scales`]; everything was checked.
pub(super) fn backward_on(
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
    gpu.launch(Dispatch {
        kernel: backward_kernel(gpu.target(), codes.is_some()),
        cubes: planes(sums.len()),
        // Without codes their buffer is not read, and anything may stand for it.
        buffers: vec![codes.unwrap_or(dy).memory()?, dy.memory()?, sums.memory()?],
        scalars: vec![CHECK.index(sums.len())?, group_size as u32],
    })
}
