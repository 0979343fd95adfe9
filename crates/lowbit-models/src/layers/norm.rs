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

    /// The norm with a weight that is no parameter.
    pub fn constant(weight: Tensor, eps: f32) -> Self {
        Self::new(Named { name: "".into(), value: weight }, eps)
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

/// The input of a part of a layer: a sum, or the norm of one.
#[derive(Clone, Copy, Debug)]
pub enum PartInput<'a> {
    /// The norm of a sum.
    Normed(AddRmsNorm<'a>),
    /// `h + x` itself, of layers without norms before their parts.
    Plain {
        /// f32 `[T, hidden_size]`.
        h: &'a Var,
        /// The same shape, in the activations' type.
        x: &'a Var,
    },
}

impl<'a> PartInput<'a> {
    /// The term that is added to the residual stream, `[T, hidden_size]`.
    pub fn update(&self) -> &'a Var {
        match *self {
            Self::Normed(AddRmsNorm { x, .. }) | Self::Plain { x, .. } => x,
        }
    }

    /// True if a tape records it.
    pub(crate) fn is_recorded(&self) -> bool {
        match self {
            Self::Normed(x) => ops::is_recorded(x),
            Self::Plain { h, x } => h.tape().or(x.tape()).is_some(),
        }
    }

    /// The sum in h's type, and the input in x's.
    ///
    /// # Errors
    /// As [`lowbit_kernels::ops::add_rms_norm()`] and [`lowbit_kernels::ops::add()`].
    pub fn make(&self) -> Result<(Var, Var), KernelError> {
        match *self {
            Self::Normed(x) => x.make(),
            Self::Plain { h, x } => {
                let sum = ops::add(h, x)?;
                let same = h.tensor().dtype() == x.tensor().dtype();
                // The other order gives the other type, and both are rounded once.
                let input = if same { sum.clone() } else { ops::add(x, h)? };
                Ok((sum, input))
            }
        }
    }
}
