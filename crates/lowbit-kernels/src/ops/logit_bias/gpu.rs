//! A copy of the logits in f32, and a unit per bias that adds it there.

#![allow(unsafe_code)] // Launches.

use super::LogitBias;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::launch::{Kernel, kernel};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Each id is there once, so that no two units write to one logit.
#[kernel]
fn logit_bias_add(ids: &[u32], biases: &[f32], y: &mut [f32], count: u32, len: u32) {
    let mut i = ABSOLUTE_POS;
    while i < count as usize {
        let id = ids[i];
        if id < len {
            y[id as usize] += biases[i];
        }
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target) -> Kernel<LogitBiasAdd<'static>> {
    LogitBiasAdd::kernel(target, UNITS)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    vec![compiled(target).code()]
}

/// See [`super::logit_bias`]; everything was checked.
pub(super) fn logit_bias(
    check: Check,
    gpu: &Gpu,
    logits: &Tensor,
    bias: &LogitBias,
) -> Result<Tensor, KernelError> {
    let dtype = check.float("logits", logits)?;
    let y = gpu.convert(logits.buffer()?, logits.len(), (dtype, FloatType::F32))?;
    let y = logits.over(y, DType::F32);
    let arguments = LogitBiasAdd {
        ids: bias.ids.buffer()?,
        biases: bias.biases.buffer()?,
        y: y.buffer()?,
        count: check.index(bias.ids.len())?,
        len: check.index(logits.len())?,
    };
    // SAFETY: there are as many ids as biases, and ids beyond the logits are passed over.
    unsafe { gpu.launch(compiled(gpu.target()), cubes(bias.ids.len()), arguments)? };
    Ok(y)
}
