//! Root mean square normalisation, plain and gated.

mod bench;
#[doc(hidden)] // rms_norm_rope uses it.
pub mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
pub(in crate::ops) mod gradient;
#[doc(hidden)]
pub mod reference;
#[cfg(test)]
mod tests;

pub use gradient::{GatedRmsNormGradient, RmsNormGradient, gated_rms_norm_backward, rms_norm_backward};

use super::Check;
use crate::{Device, KernelError, Tensor};

/// `y[.., d] = x[.., d] / sqrt(mean(x[..]^2) + eps) * weight[d]`, the mean over the last dimension.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | f32, f16, bf16 |
/// | weight | `[D]` | f32, f16, bf16 |
/// | y | `[.., D]` | x's |
///
/// All arithmetic is f32, rounded once to x's dtype. A row whose sum of squares overflows becomes
/// NaN, not the zeros of `x / inf`, so that sampling reports it. For checkpoints that store
/// `weight - 1`, models add 1 at load.
///
/// Source: mlx 0.32 `fast.rms_norm`; transformers 5.23 `LlamaRMSNorm` (which rounds to x's dtype
/// before it multiplies by the weight as well).
///
/// # Errors
/// [`KernelError::Shape`] for another weight, [`KernelError::Value`] for other dtypes and for an
/// eps that is negative or not finite.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor, KernelError> {
    normalise(Check("rms_norm"), x, None, weight, eps)
}

/// `y = rms_norm(x, weight, eps) * silu(gate)`, with `silu(g) = g / (1 + e^-g)`: the output norm of
/// gated delta nets, with one row per head.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | f32, f16, bf16 |
/// | gate | `[.., D]` | f32, f16, bf16 |
/// | weight | `[D]` | f32, f16, bf16 |
/// | y | `[.., D]` | x's |
///
/// All arithmetic is f32, rounded once to x's dtype. Source: transformers 5.23
/// `Qwen3NextRMSNormGated`, mlx-lm 0.32 `Qwen3NextRMSNormGated` (both round intermediate results
/// where x is not f32).
///
/// # Errors
/// As [`rms_norm`]; [`KernelError::Shape`] for a gate of another shape than x.
pub fn gated_rms_norm(x: &Tensor, gate: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor, KernelError> {
    normalise(CHECK_GATED, x, Some(gate), weight, eps)
}

pub(in crate::ops) const CHECK_GATED: Check = Check("gated_rms_norm");

/// Checks that [`gated_rms_norm`] takes these operands.
pub(super) fn check_gated(x: &Tensor, gate: &Tensor, weight: &Tensor, eps: f32) -> Result<(), KernelError> {
    check(CHECK_GATED, x, Some(gate), weight, eps)
}

fn normalise(
    check: Check,
    x: &Tensor,
    gate: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<Tensor, KernelError> {
    self::check(check, x, gate, weight, eps)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, x, gate, weight, eps),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (dtype, weight) = (x.dtype(), check.widened("weight", weight)?);
            let x = check.widened("x", x)?;
            let gate = gate.map(|gate| check.widened("gate", gate)).transpose()?;
            cpu::rms_norm(cpu, &x, gate.as_ref(), &weight, eps)?.cast(dtype)
        }
    }
}

fn check(
    check: Check,
    x: &Tensor,
    gate: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<(), KernelError> {
    let Some(&width) = x.shape().last() else {
        return Err(check.shape_error("x", x, "[.., D] is wanted".into()));
    };
    check.eps(eps)?;
    check.float("x", x)?;
    check.shape("weight", weight, &[width], || format!("x {:?}", x.shape()))?;
    check.float("weight", weight)?;
    check.same_device("weight", weight.device(), x.device())?;
    if let Some(gate) = gate {
        check.shape("gate", gate, x.shape(), || "x".into())?;
        check.float("gate", gate)?;
        check.same_device("gate", gate.device(), x.device())?;
    }
    Ok(())
}
