//! Soft caps on a GPU: the elementwise kernel (`ops/elementwise/gpu.rs`) with
//! `y * tanh(x / y)`, and with its slope.

use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::math::{exp, tanh, unless_nan};
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

struct Slope;

#[cube]
impl elementwise::Combine for Slope {
    fn combine(x: f32, y: f32) -> f32 {
        let x = x / y;
        let e = exp(-2.0f32 * select(x < 0.0f32, -x, x));
        let root = 1.0f32 + e;
        unless_nan(x, 4.0f32 * e / (root * root))
    }
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut all = elementwise::kernels::<Softcap>(target, &[Broadcast::Row]);
    all.extend(elementwise::kernels::<Slope>(target, &[Broadcast::Row]));
    all
}

/// See [`super::softcap`]; everything was checked.
pub(super) fn softcap(check: Check, gpu: &Gpu, x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    elementwise::map::<Softcap>(check, gpu, x, y, Broadcast::Row)
}

/// The slopes of [`super::softcap`] in x's dtype; everything was checked.
pub(super) fn slope(check: Check, gpu: &Gpu, x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    elementwise::map::<Slope>(check, gpu, x, y, Broadcast::Row)
}
