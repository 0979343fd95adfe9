//! A unit per logit copies it in f32, or writes -inf.

#![allow(unsafe_code)] // Launches.

use super::LogitMask;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{read, with_storage};
use crate::gpu::launch::{Kernel, kernel};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The result is written as bits: -inf is no constant of every device's compiler.
#[kernel]
fn logit_mask_apply<X: Int>(x: &[X], bits: &[u32], y: &mut [u32], len: u32, #[comptime] float: FloatType) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        let bit = (bits[i / 32] >> u32::cast_from(i % 32)) & 1u32;
        y[i] = select(bit == 1u32, u32::reinterpret(read(x, i, float)), 0xff80_0000u32.runtime());
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target, float: FloatType) -> Kernel<LogitMaskApply<'static>> {
    with_storage!(float, X => LogitMaskApply::kernel::<X>(target, UNITS, float))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    [FloatType::F32, FloatType::F16, FloatType::BF16].map(|float| compiled(target, float).code()).into()
}

/// See [`super::logit_mask`]; everything was checked.
pub(super) fn logit_mask(
    check: Check,
    gpu: &Gpu,
    logits: &Tensor,
    mask: &LogitMask,
) -> Result<Tensor, KernelError> {
    let float = check.float("logits", logits)?;
    let y = Tensor::allocate(logits.shape(), DType::F32, logits.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let len = check.index(logits.len())?;
    let arguments = LogitMaskApply { x: logits.buffer()?, bits: mask.bits.buffer()?, y: y.buffer()?, len };
    // SAFETY: y is as long as the logits, and the mask has a bit for each.
    unsafe { gpu.launch(compiled(gpu.target(), float), cubes(logits.len()), arguments)? };
    Ok(y)
}
