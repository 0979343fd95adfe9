use crate::{ModelError, Weights};
use lowbit_kernels::{KernelError, Tensor, ops};

/// `x * rsqrt(mean(x^2) + eps) * w`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    /// The weight of `len` values. With `offset` the checkpoint stores `w - 1`, as Hugging Face's Qwen3-Next and
    /// Qwen3.5 do.
    ///
    /// # Errors
    /// As [`Weights::values`].
    pub fn load(
        weights: &Weights<'_>,
        (json, gguf): (&str, &str),
        len: usize,
        eps: f32,
        offset: bool,
    ) -> Result<Self, ModelError> {
        let mut values = weights.values(&format!("{json}.weight"), &format!("{gguf}.weight"), len)?;
        if offset {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(Self { weight: Tensor::new(&values, &[len], weights.device())?, eps })
    }

    /// The weight and eps, as [`ops::RmsNormRope`] takes them.
    pub fn parts(&self) -> (&Tensor, f32) {
        (&self.weight, self.eps)
    }

    /// `[.., D]` to `[.., D]`.
    ///
    /// # Errors
    /// As [`ops::rms_norm()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, KernelError> {
        ops::rms_norm(x, &self.weight, self.eps)
    }

    /// `h + x` in h's dtype, and the norm of that sum in x's.
    ///
    /// # Errors
    /// As [`ops::add_rms_norm()`].
    pub fn forward_sum(&self, h: &Tensor, x: &Tensor) -> Result<(Tensor, Tensor), KernelError> {
        ops::add_rms_norm(h, x, &self.weight, self.eps)
    }

    /// The norm of `x` times `silu(gate)`.
    ///
    /// # Errors
    /// As [`ops::gated_rms_norm()`].
    pub fn gated(&self, x: &Tensor, gate: &Tensor) -> Result<Tensor, KernelError> {
        ops::gated_rms_norm(x, gate, &self.weight, self.eps)
    }
}
