//! Soft caps on a GPU: the elementwise kernel (`ops/elementwise/gpu.rs`) with
//! `y * tanh(x / y)`, and with its slope.

use super::{SERIES, SMALL};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::math::{exp, unless_nan};
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

/// The CPU's, step by step: what devices call tanh is rougher, and may overflow.
#[cube]
fn tanh(x: f32) -> f32 {
    let magnitude = select(x < 0.0f32, -x, x);
    let e = exp(-2.0f32 * magnitude);
    let large = (1.0f32 - e) / (1.0f32 + e);
    let large = select(x < 0.0f32, -large, large);
    let square = x * x;
    let mut series = fma(square, comptime!(SERIES[0]).runtime(), comptime!(SERIES[1]).runtime());
    series = fma(series, square, comptime!(SERIES[2]).runtime());
    series = fma(series, square, comptime!(SERIES[3]).runtime());
    let small = fma(series * square, x, x);
    unless_nan(x, select(magnitude < comptime!(SMALL).runtime(), small, large))
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
