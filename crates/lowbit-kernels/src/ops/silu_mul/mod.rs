//! The SwiGLU gate: `silu(gate) * up`.

pub(in crate::ops) mod gradient;
#[cfg(test)]
mod tests;

pub use gradient::{SiluMulGradient, silu_mul_backward};

use super::check::Check;
use super::elementwise::{self, Gate};
#[cfg(feature = "gpu")]
use crate::gpu::math;
use crate::simd::{Simd, math::Math, slices::Map};
use crate::{KernelError, Tensor};
#[cfg(feature = "gpu")]
use cubecl_core as cubecl;
#[cfg(feature = "gpu")]
use cubecl_core::prelude::*;

/// `y = silu(gate) * up`, element by element, with `silu(x) = x / (1 + e^-x)`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | gate | any | f32, f16, bf16 |
/// | up | gate's | f32, f16, bf16 |
/// | y | gate's | gate's |
///
/// All arithmetic is f32, rounded once to gate's dtype. Source: mlx-lm 0.32 `swiglu`.
///
/// # Errors
/// [`KernelError::Shape`] for different shapes, [`KernelError::Value`] for other dtypes.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor, KernelError> {
    SiluMul::run(check(gate, up)?, gate, up)
}

/// Checks that the op takes these operands.
pub(super) fn check(gate: &Tensor, up: &Tensor) -> Result<Check, KernelError> {
    SiluMul::check(gate, up)
}

#[derive(Default)]
pub(super) struct SiluMul;

impl Gate for SiluMul {
    const OP: &'static str = "silu_mul";
    const RUN: elementwise::Run = silu_mul;
    /// silu is within 3.5 ulp, the product is one more.
    const ROUNDINGS: usize = 8;

    fn reference(gate: f64, up: f64) -> f64 {
        silu(gate) * up
    }
}

elementwise::register!(SiluMul);

impl Map<2> for SiluMul {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [gate, up]: [S::V; 2]) -> S::V {
        simd.mul(simd.silu(gate), up)
    }
}

#[cfg(feature = "gpu")]
#[cube]
impl elementwise::gpu::Combine for SiluMul {
    fn combine(x: f32, y: f32) -> f32 {
        math::silu(x) * y
    }
}

/// `x / (1 + e^-x)`.
pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
