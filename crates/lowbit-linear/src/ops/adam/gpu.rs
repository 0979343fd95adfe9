//! A step of Adam on a GPU: a unit a number.

#![allow(unsafe_code)] // Launches.

use super::{BETA1, BETA2, EPS, Factors};
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The number of numbers, and the bits of [`Factors`].
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Scalars {
    len: u32,
    rate: u32,
    mean: u32,
    square: u32,
}

#[kernel]
fn adam_kernel(
    values: &mut [f32],
    means: &mut [f32],
    squares: &mut [f32],
    gradient: &[f32],
    scalars: Scalars,
) {
    let rate = f32::reinterpret(scalars.rate);
    let (mean_factor, square_factor) = (f32::reinterpret(scalars.mean), f32::reinterpret(scalars.square));
    let mut i = ABSOLUTE_POS;
    while i < scalars.len as usize {
        let dx = gradient[i];
        let mean = BETA1 * means[i] + comptime!(1.0f32 - BETA1) * dx;
        let square = BETA2 * squares[i] + comptime!(1.0f32 - BETA2) * dx * dx;
        means[i] = mean;
        squares[i] = square;
        values[i] -= rate * (mean * mean_factor) / ((square * square_factor).sqrt() + EPS);
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target) -> Kernel<AdamKernel<'static>> {
    AdamKernel::kernel(target, UNITS)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    vec![compiled(target).code()]
}

/// See [`super::adam()`]; everything was checked.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    [value, mean, square]: [&mut Tensor; 3],
    gradient: &Tensor,
    factors: Factors,
) -> Result<(), KernelError> {
    let len = value.len();
    if len == 0 {
        return Ok(());
    }
    for state in [&mut *value, &mut *mean, &mut *square] {
        state.unshare()?;
    }
    let Factors { rate, mean: mean_factor, square: square_factor } = factors;
    let [rate, mean_factor, square_factor] = [rate, mean_factor, square_factor].map(f32::to_bits);
    let arguments = AdamKernel {
        values: value.buffer()?,
        means: mean.buffer()?,
        squares: square.buffer()?,
        gradient: gradient.buffer()?,
        scalars: Scalars { len: check.index(len)?, rate, mean: mean_factor, square: square_factor },
    };
    // SAFETY: all four have as many numbers, and nothing else sees the three that are written.
    unsafe { gpu.launch(compiled(gpu.target()), cubes(len), arguments) }
}
