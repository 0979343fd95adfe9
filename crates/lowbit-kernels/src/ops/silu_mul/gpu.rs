use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::math::silu;
use crate::ops::check::Check;
use crate::ops::elementwise::{Broadcast, gpu as elementwise};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

struct SiluMul;

#[cube]
impl elementwise::Combine for SiluMul {
    fn combine(x: f32, y: f32) -> f32 {
        silu(x) * y
    }
}

/// Every kernel of the op.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    elementwise::kernels::<SiluMul>(target, &[Broadcast::None])
}

/// See [`super::silu_mul`]; everything was checked.
pub(super) fn silu_mul(check: Check, gpu: &Gpu, gate: &Tensor, up: &Tensor) -> Result<Tensor, KernelError> {
    elementwise::map::<SiluMul>(check, gpu, gate, up, Broadcast::None)
}
