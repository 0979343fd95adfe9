//! The residual stream's sum and its norm, in one op.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use gradient::{AddRmsNormGradient, add_rms_norm_backward};

use super::Check;
use crate::{Device, KernelError, Tensor};

/// Returns `(sum, y)`: `sum = h + x` and
/// `y[.., d] = sum[.., d] / sqrt(mean(sum[..]^2) + eps) * weight[d]`, the mean over the last
/// dimension.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | h | `[.., D]` | f32, f16, bf16 |
/// | x | h's | f32, f16, bf16 |
/// | weight | `[D]` | f32, f16, bf16 |
/// | sum | h's | h's |
/// | y | h's | x's |
///
/// The residual stream h may be f32 while layers compute in f16 or bf16. All arithmetic is f32. The
/// norm is of the f32 sum, before it is rounded to h's dtype, and each result is rounded once.
///
/// Source: "RMSNorm with fused residual"; vLLM `fused_add_rms_norm` (which works in place and
/// rounds the sum first).
///
/// # Errors
/// [`KernelError::Shape`] for another x or weight, [`KernelError::Value`] for other dtypes and for
/// an eps that is negative or not finite, [`KernelError::Device`] for different devices.
pub fn add_rms_norm(
    h: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
) -> Result<(Tensor, Tensor), KernelError> {
    let check = check(h, x, weight, eps)?;
    match h.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, [h, x], weight, eps),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let [wide_h, wide_x] = [check.widened("h", h)?, check.widened("x", x)?];
            let (sum, y) = cpu::add_rms_norm(cpu, &wide_h, &wide_x, &check.widened("weight", weight)?, eps)?;
            Ok((sum.cast(h.dtype())?, y.cast(x.dtype())?))
        }
    }
}

/// Checks that the op takes these operands.
pub(super) fn check(h: &Tensor, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Check, KernelError> {
    let check = Check("add_rms_norm");
    let Some(&width) = h.shape().last() else {
        return Err(check.shape_error("h", h, "[.., D] is wanted".into()));
    };
    check.eps(eps)?;
    check.shape("x", x, h.shape(), || "h".into())?;
    check.shape("weight", weight, &[width], || format!("h {:?}", h.shape()))?;
    for (name, operand) in [("h", h), ("x", x), ("weight", weight)] {
        check.float(name, operand)?;
        check.same_device(name, operand.device(), h.device())?;
    }
    Ok(check)
}
