use crate::names::Name;
use crate::tape::ops::{self, AddRmsNorm, Input, Norm};
use crate::tape::{Inventory, Named, Var};
use crate::{ModelError, Weights};
use lowbit_kernels::{KernelError, Tensor};

/// `x * rsqrt(mean(x^2) + eps) * w`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Named<Tensor>,
    eps: f32,
}

impl RmsNorm {
    /// The norm with `weight` `[D]`, f32.
    pub fn new(weight: Named<Tensor>, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// The norm of this name, with a weight of `len` values.
    ///
    /// # Errors
    /// As [`Weights::norm`].
    pub fn load(weights: &Weights<'_>, name: Name<'_>, len: usize, eps: f32) -> Result<Self, ModelError> {
        Ok(Self::new(weights.norm(name, len)?, eps))
    }

    /// The weight and eps.
    pub fn parts(&self) -> (&Tensor, f32) {
        (&self.weight.value, self.eps)
    }

    /// The weight, with its name.
    pub fn weight(&self) -> &Named<Tensor> {
        &self.weight
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        all.tensors.push(self.weight.clone());
    }

    /// The norm of each row of `x`, `[.., D]`.
    ///
    /// # Errors
    /// As [`lowbit_kernels::ops::rms_norm()`].
    pub fn forward(&self, x: &Var) -> Result<Var, KernelError> {
        ops::rms_norm(x, self.norm())
    }

    fn norm(&self) -> Norm<'_> {
        Norm { weight: &self.weight, eps: self.eps }
    }

    /// The norm of `h + x` in x's dtype, with that sum in h's.
    pub fn of_sum<'a>(&'a self, h: &'a Var, x: &'a Var) -> AddRmsNorm<'a> {
        AddRmsNorm { h, x, norm: self.norm() }
    }

    /// The norm of each head of `x` times `silu(gate)`, both `[T, H * D]`, as a product takes it.
    pub fn gated<'a>(&'a self, x: &'a Var, gate: &'a Var) -> Input<'a> {
        Input::GatedRmsNorm { x, gate, norm: self.norm() }
    }
}
