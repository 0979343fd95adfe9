//! The gates on a GPU: a unit computes both of one token and head. The gated delta rule's own
//! kernel uses [`compute_step_gates`] too, so that both round alike.

#![allow(unsafe_code)] // Launches.

use super::StepLimits;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{read, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{exp, softplus, unless_nan};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// `(log_decay, beta)` of one token and head; `limits` are the bits of the step's.
#[cube]
pub(crate) fn compute_step_gates(
    dt: f32,
    a_log: f32,
    dt_bias: f32,
    #[comptime] limits: [u32; 2],
) -> (f32, f32) {
    let x = dt + dt_bias;
    let least = comptime!(f32::from_bits(limits[0])).runtime();
    let most = f32::reinterpret(comptime!(limits[1]).runtime());
    let step = softplus(x);
    let step = select(step < least, least, step);
    let step = unless_nan(x, select(step > most, most, step));
    (-exp(a_log) * step, step)
}

/// The inputs of the gates: `dt` of each token and head, `a_log` and `dt_bias` of each head.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct StepInputs<X: Int> {
    dt: Box<[X]>,
    a_log: Box<[f32]>,
    dt_bias: Box<[f32]>,
}

/// `len` counts the gates.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn step_gates<X: Int>(
    inputs: &StepInputs<X>,
    log_decay: &mut [f32],
    beta: &mut [f32],
    len: u32,
    heads: u32,
    #[comptime] dtype: FloatType,
    #[comptime] limits: [u32; 2],
) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        let head = i % heads as usize;
        let dt = read(&inputs.dt, i, dtype);
        let (log_decay_i, beta_i) = compute_step_gates(dt, inputs.a_log[head], inputs.dt_bias[head], limits);
        log_decay[i] = log_decay_i;
        beta[i] = beta_i;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target, dtype: FloatType, limits: StepLimits) -> Kernel<StepGates<'static>> {
    with_storage!(dtype, X => StepGates::kernel::<X>(target, UNITS, dtype, limits.bits()))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// One of each type.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    [F32, F16, BF16].map(|dtype| compiled(target, dtype, StepLimits::NONE).code()).into()
}

/// See [`super::step_gates`]; everything was checked.
pub(super) fn launch(
    op: Check,
    gpu: &Gpu,
    dt: &Tensor,
    [a_log, dt_bias]: [&Tensor; 2],
    limits: StepLimits,
) -> Result<(Tensor, Tensor), KernelError> {
    let result = || Tensor::allocate(dt.shape(), DType::F32, dt.device());
    let (log_decay, beta) = (result()?, result()?);
    if dt.is_empty() {
        return Ok((log_decay, beta));
    }
    let (a_log, dt_bias) = (a_log.cast(DType::F32)?, dt_bias.cast(DType::F32)?);
    let kernel = compiled(gpu.target(), op.float("dt", dt)?, limits);
    let arguments = StepGates {
        inputs: StepInputsArgs { dt: dt.buffer()?, a_log: a_log.buffer()?, dt_bias: dt_bias.buffer()? },
        log_decay: log_decay.buffer()?,
        beta: beta.buffer()?,
        len: op.index(dt.len())?,
        heads: op.index(a_log.len())?,
    };
    // SAFETY: the op checked that both results are as large as dt, and that a_log and dt_bias have
    // one per head.
    unsafe { gpu.launch(kernel, cubes(dt.len()), arguments)? };
    Ok((log_decay, beta))
}
