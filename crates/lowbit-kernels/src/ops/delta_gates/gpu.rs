use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{read, with_storage, write};
use crate::gpu::math::{exp, sigmoid, softplus};
use crate::gpu::{Dispatch, Gpu};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// `(log_decay, beta)` of one token and head.
#[cube]
pub(crate) fn one(a: f32, b: f32, a_log: f32, dt_bias: f32) -> (f32, f32) {
    (-exp(a_log) * softplus(a + dt_bias), sigmoid(b))
}

/// A unit a token and head; `a_log` and `dt_bias` are f32.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube(launch_unchecked)]
fn gates<A: Int, B: Int>(
    a: &[A],
    b: &[B],
    a_log: &[u32],
    dt_bias: &[u32],
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
        let (a, b) = (read(a, i, a_type), read(b, i, b_type));
        let (a_log, dt_bias) = (read(a_log, head, FloatType::F32), read(dt_bias, head, FloatType::F32));
        let (log_decay_i, beta_i) = one(a, b, a_log, dt_bias);
        write(log_decay, i, log_decay_i, FloatType::F32);
        write(beta, i, beta_i, FloatType::F32);
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn kernel(target: &Target, a: FloatType, b: FloatType) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(a, A => with_storage!(b, B => Box::new(gates::Gates::<A, B>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), buffer(), buffer(), (), (), a, b,
    ))))
}

/// One of each type.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32)].map(|(a, b)| kernel(target, a, b)).into()
}

/// See [`super::delta_gates`]; everything was checked.
pub(super) fn delta_gates(
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
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), op.float("a", a)?, op.float("b", b)?),
        cubes: cubes(a.len()),
        buffers: vec![
            a.memory()?,
            b.memory()?,
            a_log.memory()?,
            dt_bias.memory()?,
            log_decay.memory()?,
            beta.memory()?,
        ],
        scalars: vec![op.index(a.len())?, op.index(a_log.len())?],
    })?;
    Ok((log_decay, beta))
}
