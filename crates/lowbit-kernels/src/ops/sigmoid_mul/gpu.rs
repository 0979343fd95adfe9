//! Output gates on a GPU: the elementwise kernel (`ops/elementwise/gpu.rs`) with `x * sigmoid(y)`.

use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::math::sigmoid;
use crate::ops::check::Check;
use crate::ops::elementwise::{Broadcast, gpu as elementwise};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use std::cmp::Ordering;

struct SigmoidMul;

#[cube]
impl elementwise::Combine for SigmoidMul {
    fn combine(x: f32, y: f32) -> f32 {
        x * sigmoid(y)
    }
}

#[cfg(test)]
inventory::submit!(crate::gpu::tests::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    elementwise::kernels::<SigmoidMul>(target, &[Broadcast::None, Broadcast::Last, Broadcast::Column])
}

/// See [`super::sigmoid_mul`]; everything was checked.
pub(super) fn sigmoid_mul(check: Check, gpu: &Gpu, x: &Tensor, gate: &Tensor) -> Result<Tensor, KernelError> {
    let broadcast = match x.len().cmp(&gate.len()) {
        Ordering::Less => Broadcast::Last,
        Ordering::Equal => Broadcast::None,
        Ordering::Greater => Broadcast::Column,
    };
    elementwise::map::<SigmoidMul>(check, gpu, x, gate, broadcast)
}
