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

/// The epsilon of [`l2_norm`], which prevents a division by zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct L2Norm {
    /// Its value.
    pub eps: f32,
    /// The place of the epsilon.
    pub convention: L2NormConvention,
}

/// The place of the epsilon of [`l2_norm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum L2NormConvention {
    /// `x / sqrt(sum(x^2) + eps)`: transformers 5.23 `qwen3_next` `l2norm`, flash-linear-attention.
    Sum,
    /// `x / sqrt(sum(x^2) + D eps)`: mlx-lm 0.32 `qwen3_next`, which divides an RMS norm without
    /// weight by `sqrt(D)`.
    Mean,
    /// `x / max(sqrt(sum(x^2)), eps)`: ggml `ggml_l2_norm`.
    Max,
}

/// `y[.., d] = x[.., d] / |x[..]|`: each row of the last dimension divided by its length, with the
/// epsilon of `params`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | f32, f16, bf16 |
/// | y | `[.., D]` | x's |
///
/// All arithmetic is f32, rounded once to x's dtype. Sources: [`L2NormConvention`].
///
/// # Errors
/// [`KernelError::Value`] for other dtypes and for an eps that is negative or not finite.
pub fn l2_norm(x: &Tensor, params: &L2Norm) -> Result<Tensor, KernelError> {
    let check = Check("l2_norm");
    if x.shape().is_empty() {
        return Err(check.shape_error("x", x, "[.., D] is wanted".into()));
    }
    check.eps(params.eps)?;
    let dtype = check.float("x", x)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, x, params),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::l2_norm(cpu, &check.widened("x", x)?, params)?.cast(dtype.dtype()),
    }
}
