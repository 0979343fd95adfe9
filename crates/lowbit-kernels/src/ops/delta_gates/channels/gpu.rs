//! The gates on a GPU: a unit computes the decay of a channel; that of a head's first one computes
//! the head's beta, too.

#![allow(unsafe_code)] // Launches.

use super::ChannelDecay;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{read, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{exp, sigmoid, softplus};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The inputs of the gates: `a` of each token, head and channel, `b` of each token and head,
/// `a_log` of each head, and `dt_bias` of each of its channels.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct ChannelInputs<A: Int, B: Int> {
    a: Box<[A]>,
    b: Box<[B]>,
    a_log: Box<[f32]>,
    dt_bias: Box<[f32]>,
}

/// `len` counts the channels of all tokens.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct ChannelSizes {
    len: u32,
    heads: u32,
    channels: u32,
}

/// The compile-time configuration: the types of `a` and `b`, and the bits of the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ChannelConfig {
    a: FloatType,
    b: FloatType,
    bound: Option<u32>,
}

#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn channel_gates<A: Int, B: Int>(
    inputs: &ChannelInputs<A, B>,
    log_decay: &mut [f32],
    beta: &mut [f32],
    sizes: ChannelSizes,
    #[comptime] config: ChannelConfig,
) {
    let (heads, channels) = (sizes.heads as usize, sizes.channels as usize);
    let mut i = ABSOLUTE_POS;
    while i < sizes.len as usize {
        let gate = i / channels;
        let head = gate % heads;
        let channel = i % channels;
        let rate = exp(inputs.a_log[head]);
        let x = read(&inputs.a, i, config.a) + inputs.dt_bias[head * channels + channel];
        log_decay[i] = if comptime!(config.bound.is_some()) {
            comptime!(f32::from_bits(config.bound.expect("there is one"))).runtime() * sigmoid(rate * x)
        } else {
            -rate * softplus(x)
        };
        if channel == 0 {
            beta[gate] = sigmoid(read(&inputs.b, gate, config.b));
        }
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target, config: ChannelConfig) -> Kernel<ChannelGates<'static>> {
    with_storage!(config.a, A => with_storage!(config.b, B => {
        ChannelGates::kernel::<A, B>(target, UNITS, config)
    }))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// One of each type and formula.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let bound = Some((-5f32).to_bits());
    [(F32, F32, None), (F16, F16, bound), (BF16, BF16, None), (BF16, F32, bound)]
        .map(|(a, b, bound)| compiled(target, ChannelConfig { a, b, bound }).code())
        .into()
}

/// See [`super::channel_gates`]; everything was checked.
pub(super) fn launch(
    op: Check,
    gpu: &Gpu,
    [a, b]: [&Tensor; 2],
    [a_log, dt_bias]: [&Tensor; 2],
    decay: ChannelDecay,
) -> Result<(Tensor, Tensor), KernelError> {
    let result = |x: &Tensor| Tensor::allocate(x.shape(), DType::F32, x.device());
    let (log_decay, beta) = (result(a)?, result(b)?);
    if a.is_empty() {
        return Ok((log_decay, beta));
    }
    let (a_log, dt_bias) = (a_log.cast(DType::F32)?, dt_bias.cast(DType::F32)?);
    let bound = match decay {
        ChannelDecay::Softplus => None,
        ChannelDecay::Bounded(bound) => Some(bound.to_bits()),
    };
    let config = ChannelConfig { a: op.float("a", a)?, b: op.float("b", b)?, bound };
    let inputs = ChannelInputsArgs {
        a: a.buffer()?,
        b: b.buffer()?,
        a_log: a_log.buffer()?,
        dt_bias: dt_bias.buffer()?,
    };
    let arguments = ChannelGates {
        inputs,
        log_decay: log_decay.buffer()?,
        beta: beta.buffer()?,
        sizes: ChannelSizes {
            len: op.index(a.len())?,
            heads: op.index(a.dim(1))?,
            channels: op.index(a.dim(2))?,
        },
    };
    // SAFETY: the op checked that log_decay is as large as a and beta as b, which has one element
    // per token and head of a, that a_log has one per head, and dt_bias one per channel of each.
    unsafe { gpu.launch(compiled(gpu.target(), config), cubes(a.len()), arguments)? };
    Ok((log_decay, beta))
}
