//! Rows scaled to length one.

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

pub use gradient::l2_norm_backward;

use super::Check;
use crate::{Device, KernelError, Tensor};

/// `y[.., d] = x[.., d] / sqrt(sum over e of x[.., e]^2 + eps)`: each row of the last dimension
/// divided by its length. The epsilon prevents a division by zero.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | f32, f16, bf16 |
/// | y | `[.., D]` | x's |
///
/// All arithmetic is f32, rounded once to x's dtype. Sources: transformers 5.23 `qwen3_next`
/// `l2norm`, flash-linear-attention. (mlx-lm 0.32 `qwen3_next` adds `D eps`, ggml's `ggml_l2_norm`
/// takes the larger of length and eps.)
///
/// # Errors
/// [`KernelError::Value`] for other dtypes and for an eps that is negative or not finite.
pub fn l2_norm(x: &Tensor, eps: f32) -> Result<Tensor, KernelError> {
    let check = Check("l2_norm");
    if x.shape().is_empty() {
        return Err(check.shape_error("x", x, "[.., D] is wanted".into()));
    }
    check.eps(eps)?;
    let dtype = check.float("x", x)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, x, eps),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::l2_norm(cpu, &check.widened("x", x)?, eps)?.cast(dtype.dtype()),
    }
}
