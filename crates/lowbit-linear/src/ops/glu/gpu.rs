//! Gates on a GPU: their formulas, and the elementwise kernel (`ops/elementwise/gpu.rs`) with them.

use super::constants::{GELU, GELU_LINEAR, OAI_ALPHA, OAI_LIMIT};
use super::gate::{Gate, with_gate};
use super::{CHECK, cpu};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::math::{sigmoid, unless_nan};
use crate::ops::elementwise::{Broadcast, gpu as elementwise};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use std::cmp::Ordering;

/// A sigmoid: that of `gpu/math.rs`, or a rougher one.
#[cube]
pub(in crate::ops) trait Sigmoid: 'static + Send + Sync {
    fn sigmoid(x: f32) -> f32;
}

/// Within 2.5 ulp.
pub(in crate::ops) struct Exact;

#[cube]
impl Sigmoid for Exact {
    fn sigmoid(x: f32) -> f32 {
        sigmoid(x)
    }
}

/// `y = value(x) * factor(gate)`.
#[cube]
pub(in crate::ops) fn glu<S: Sigmoid>(x: f32, gate: f32, #[comptime] by: Gate) -> f32 {
    factor::<S>(gate, by) * value(x, by)
}

/// The function of the gate.
#[cube]
pub(in crate::ops) fn factor<S: Sigmoid>(gate: f32, #[comptime] by: Gate) -> f32 {
    match comptime!(by) {
        Gate::Silu => gate * S::sigmoid(gate),
        Gate::GeluTanh => gate * S::sigmoid(gelu_argument(gate)),
        Gate::Sigmoid => S::sigmoid(gate),
        Gate::Relu => unless_nan(gate, select(gate > 0.0f32, gate, 0.0f32.runtime())),
        Gate::SwigluOai => {
            let gate = at_most(gate, OAI_LIMIT);
            gate * S::sigmoid(gate * comptime!(OAI_ALPHA).runtime())
        }
    }
}

/// `v` times the derivative of [`factor`].
#[cube]
pub(in crate::ops) fn factor_slope(v: f32, gate: f32, #[comptime] by: Gate) -> f32 {
    // 1 - s is sigmoid(-argument), which keeps its digits.
    match comptime!(by) {
        Gate::Silu => v * silu_slope(gate),
        Gate::GeluTanh => {
            let gate = clamp(gate, GELU_LINEAR);
            let argument = gelu_argument(gate);
            let steep = fma(gate * gate, comptime!(3.0 * GELU[1]).runtime(), comptime!(GELU[0]).runtime());
            v * (sigmoid(argument) * fma(gate * sigmoid(-argument), steep, 1.0f32))
        }
        Gate::Sigmoid => v * sigmoid(gate) * sigmoid(-gate),
        Gate::Relu => unless_nan(gate, select(gate > 0.0f32, v, 0.0f32.runtime())),
        Gate::SwigluOai => {
            let slope = silu_slope(gate * comptime!(OAI_ALPHA).runtime());
            let cut = gate > comptime!(OAI_LIMIT).runtime();
            unless_nan(gate, select(cut, 0.0f32.runtime(), v * slope))
        }
    }
}

/// The derivative of silu: `s * (1 + x * (1 - s))` with `s = 1 / (1 + e^-x)`.
#[cube]
pub(in crate::ops) fn silu_slope(x: f32) -> f32 {
    sigmoid(x) * fma(x, sigmoid(-x), 1.0f32)
}

/// The factor of x.
#[cube]
pub(in crate::ops) fn value(x: f32, #[comptime] by: Gate) -> f32 {
    if comptime!(by == Gate::SwigluOai) { clamp(x, OAI_LIMIT) + 1.0f32 } else { x }
}

/// `v` times the derivative of [`value`].
#[cube]
pub(in crate::ops) fn value_slope(v: f32, x: f32, #[comptime] by: Gate) -> f32 {
    if comptime!(by == Gate::SwigluOai) {
        let limit = comptime!(OAI_LIMIT).runtime();
        select(x > limit, 0.0f32.runtime(), select(x < -limit, 0.0f32.runtime(), v))
    } else {
        v
    }
}

#[cube]
fn gelu_argument(gate: f32) -> f32 {
    gate * fma(gate * gate, comptime!(GELU[1]).runtime(), comptime!(GELU[0]).runtime())
}

/// The lesser; NaN for NaN.
#[cube]
fn at_most(x: f32, #[comptime] limit: f32) -> f32 {
    let limit = comptime!(limit).runtime();
    unless_nan(x, select(x > limit, limit, x))
}

/// From `-limit` to `limit`; NaN for NaN.
#[cube]
fn clamp(x: f32, #[comptime] limit: f32) -> f32 {
    let least = comptime!(-limit).runtime();
    unless_nan(x, at_most(select(x < least, least, x), limit))
}

/// Implements the elementwise kernel's function for gates.
macro_rules! combine {
    ($($name:ident)*) => {$(
        #[cube]
        impl elementwise::Combine for cpu::$name {
            fn combine(x: f32, y: f32) -> f32 {
                glu::<Exact>(x, y, Gate::$name)
            }
        }
    )*};
}
combine!(Silu GeluTanh Sigmoid SwigluOai Relu);

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op by one gate, and one way of lying of the others.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let all = [Broadcast::None, Broadcast::Last, Broadcast::Column];
    let of = |by| {
        let ways = if by == Gate::Sigmoid { &all[..] } else { &all[..1] };
        with_gate!(by, G => elementwise::kernels::<G>(target, ways))
    };
    Gate::ALL.into_iter().flat_map(of).collect()
}

/// See [`super::glu`]; everything was checked.
pub(super) fn launch(gpu: &Gpu, x: &Tensor, gate: &Tensor, by: Gate) -> Result<Tensor, KernelError> {
    let broadcast = match x.len().cmp(&gate.len()) {
        Ordering::Less => Broadcast::Last,
        Ordering::Equal => Broadcast::None,
        Ordering::Greater => Broadcast::Column,
    };
    with_gate!(by, G => elementwise::map::<G>(CHECK, gpu, x, gate, broadcast))
}
