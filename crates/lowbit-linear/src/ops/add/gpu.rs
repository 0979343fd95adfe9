//! Addition on a GPU: the elementwise kernel (`ops/elementwise/gpu.rs`) with `x + y`.

use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::ops::Check;
use crate::ops::elementwise::{Broadcast, gpu as elementwise};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

struct Add;

#[cube]
impl elementwise::Combine for Add {
    fn combine(x: f32, y: f32) -> f32 {
        x + y
    }
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    elementwise::kernels::<Add>(target, &[Broadcast::None, Broadcast::Row])
}

/// See [`super::add`]; everything was checked.
pub(super) fn add(check: Check, gpu: &Gpu, x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    let broadcast = if x.shape() == y.shape() { Broadcast::None } else { Broadcast::Row };
    elementwise::map::<Add>(check, gpu, x, y, broadcast)
}
