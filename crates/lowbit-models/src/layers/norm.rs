use crate::names::Name;
use crate::{ModelError, Weights};
use lowbit_kernels::ops::{self, AddRmsNorm, Input};
use lowbit_kernels::{KernelError, Tensor};

/// `x * rsqrt(mean(x^2) + eps) * w`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    /// The norm with `weight` `[D]`, f32.
    pub fn new(weight: Tensor, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// The norm of this name, with a weight of `len` values.
    ///
    /// # Errors
    /// As [`Weights::norm`].
    pub fn load(weights: &Weights<'_>, name: Name<'_>, len: usize, eps: f32) -> Result<Self, ModelError> {
        Ok(Self::new(Tensor::new(&weights.norm(name, len)?, &[len], weights.device())?, eps))
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

    /// The norm of `h + x` in x's dtype, with that sum in h's.
    pub fn of_sum<'a>(&'a self, h: &'a Tensor, x: &'a Tensor) -> AddRmsNorm<'a> {
        AddRmsNorm { h, x, weight: &self.weight, eps: self.eps }
    }

    /// The norm of each head of `x` times `silu(gate)`, both `[T, H, D]`, as a product takes it.
    pub fn gated<'a>(&'a self, x: &'a Tensor, gate: &'a Tensor) -> Input<'a> {
        Input::GatedRmsNorm { x, gate, weight: &self.weight, eps: self.eps }
    }
}
