//! The gates of the gated delta rule on a GPU: `log_decay = -exp(a_log) * softplus(a + dt_bias)`,
//! `beta = sigmoid(b)`.
//!
//! A unit computes both gates of one token and head. The gated delta rule's own kernels use
//! [`compute_gates`] too, so that both round alike: keep all arithmetic there.

#![allow(unsafe_code)] // Launches.

use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{read, with_storage, write};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{exp, sigmoid, softplus};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// `(log_decay, beta)` of one token and head.
#[cube]
pub(crate) fn compute_gates(a: f32, b: f32, a_log: f32, dt_bias: f32) -> (f32, f32) {
    (-exp(a_log) * softplus(a + dt_bias), sigmoid(b))
}

/// The inputs of the gates: `a` and `b` of each token and head, `a_log` and `dt_bias` of each head,
/// in f32.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Inputs<A: Int, B: Int> {
    a: Box<[A]>,
    b: Box<[B]>,
    a_log: Box<[u32]>,
    dt_bias: Box<[u32]>,
}

/// `len` counts the gates.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn delta_gates<A: Int, B: Int>(
    inputs: &Inputs<A, B>,
    log_decay: &mut [u32],
    beta: &mut [u32],
    len: u32,
    heads: u32,
    #[comptime] a_type: FloatType,
    #[comptime] b_type: FloatType,
) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        let head = i % heads as usize;
        let (a, b) = (read(&inputs.a, i, a_type), read(&inputs.b, i, b_type));
        let (a_log, dt_bias) =
            (read(&inputs.a_log, head, FloatType::F32), read(&inputs.dt_bias, head, FloatType::F32));
        let (log_decay_i, beta_i) = compute_gates(a, b, a_log, dt_bias);
        write(log_decay, i, log_decay_i, FloatType::F32);
        write(beta, i, beta_i, FloatType::F32);
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target, a: FloatType, b: FloatType) -> Kernel<DeltaGates<'static>> {
    with_storage!(a, A => with_storage!(b, B => DeltaGates::kernel::<A, B>(target, UNITS, a, b)))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// One of each type.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32)].map(|(a, b)| compiled(target, a, b).code()).into()
}

/// See [`super::delta_gates`]; everything was checked.
pub(super) fn launch(
    op: Check,
    gpu: &Gpu,
    [a, b]: [&Tensor; 2],
    [a_log, dt_bias]: [&Tensor; 2],
) -> Result<(Tensor, Tensor), KernelError> {
    let result = || Tensor::allocate(a.shape(), DType::F32, a.device());
    let (log_decay, beta) = (result()?, result()?);
    if a.is_empty() {
        return Ok((log_decay, beta));
    }
    let (a_log, dt_bias) = (a_log.cast(DType::F32)?, dt_bias.cast(DType::F32)?);
    let kernel = compiled(gpu.target(), op.float("a", a)?, op.float("b", b)?);
    let inputs =
        InputsArgs { a: a.buffer()?, b: b.buffer()?, a_log: a_log.buffer()?, dt_bias: dt_bias.buffer()? };
    let arguments = DeltaGates {
        inputs,
        log_decay: log_decay.buffer()?,
        beta: beta.buffer()?,
        len: op.index(a.len())?,
        heads: op.index(a_log.len())?,
    };
    // SAFETY: the op checked that b and both results are as large as a, and that a_log and dt_bias
    // have one per head.
    unsafe { gpu.launch(kernel, cubes(a.len()), arguments)? };
    Ok((log_decay, beta))
}
