//! Soft caps on a GPU: the elementwise kernel (`ops/elementwise/gpu.rs`) with `y * tanh(x / y)`.

use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::math::tanh;
use crate::ops::Check;
use crate::ops::elementwise::{Broadcast, gpu as elementwise};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

struct Softcap;

#[cube]
impl elementwise::Combine for Softcap {
    fn combine(x: f32, y: f32) -> f32 {
        y * tanh(x / y)
    }
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    elementwise::kernels::<Softcap>(target, &[Broadcast::Row])
}

/// See [`super::softcap`]; everything was checked.
pub(super) fn softcap(check: Check, gpu: &Gpu, x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    elementwise::map::<Softcap>(check, gpu, x, y, Broadcast::Row)
}
