//! What a product's x may be.

use crate::ops::Check;
use crate::ops::{add_rms_norm, rms_norm, sigmoid_mul, silu_mul};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::FloatType;

pub(in crate::ops) const CHECK: Check = Check("quantized_matmul");
/// The log that says which kernel each product takes, and why.
pub(in crate::ops) const PLAN: &str = "lowbit::plan";

/// A product's x: a tensor, or what an op makes of others for this product alone. A product that reads x only once makes
/// it itself, without a launch of its own; any other calls the op first.
///
/// Either way x has the op's rounding: all in f32, once to x's dtype. On the CPU it is the op's bit for bit; on a GPU sums
/// may be in another order, and a sigmoid be within 2^-17 of itself or 2^-119, so that a value of x can be a neighbour of the
/// op's.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// `[.., K]`.
    Tensor(&'a Tensor),
    /// [`silu_mul`](super::super::silu_mul()) of two `[.., K]`.
    #[allow(missing_docs)]
    SiluMul { gate: &'a Tensor, up: &'a Tensor },
    /// [`gated_rms_norm`](super::super::gated_rms_norm()), of which all heads of a row are one: with x and gate
    /// `[.., H, D]` it is `[.., H * D]`.
    #[allow(missing_docs)]
    GatedRmsNorm { x: &'a Tensor, gate: &'a Tensor, weight: &'a Tensor, eps: f32 },
    /// [`sigmoid_mul`](super::super::sigmoid_mul()), of which all heads of a row are one, too: x is `[.., H, D]`.
    #[allow(missing_docs)]
    SigmoidMul { x: &'a Tensor, gate: &'a Tensor },
    /// The second of what [`add_rms_norm`](super::super::add_rms_norm()) gives.
    AddRmsNorm(AddRmsNorm<'a>),
}

/// The operands of [`add_rms_norm`](super::super::add_rms_norm()), h and x `[.., K]`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct AddRmsNorm<'a> {
    pub h: &'a Tensor,
    pub x: &'a Tensor,
    pub weight: &'a Tensor,
    pub eps: f32,
}

impl<'a> From<&'a Tensor> for Input<'a> {
    fn from(x: &'a Tensor) -> Self {
        Self::Tensor(x)
    }
}

impl<'a> From<AddRmsNorm<'a>> for Input<'a> {
    fn from(x: AddRmsNorm<'a>) -> Self {
        Self::AddRmsNorm(x)
    }
}

impl AddRmsNorm<'_> {
    /// The sum and its norm, for several readers.
    ///
    /// # Errors
    /// As [`add_rms_norm`](super::super::add_rms_norm()).
    pub fn tensors(&self) -> Result<(Tensor, Tensor), KernelError> {
        add_rms_norm::add_rms_norm(self.h, self.x, self.weight, self.eps)
    }
}

impl Input<'_> {
    /// The tensor that says dtype and device.
    fn first(&self) -> &Tensor {
        match self {
            Self::Tensor(x) | Self::GatedRmsNorm { x, .. } | Self::SigmoidMul { x, .. } => x,
            Self::SiluMul { gate, .. } => gate,
            Self::AddRmsNorm(AddRmsNorm { x, .. }) => x,
        }
    }

    /// Its type, for the op that `check` is of.
    pub(in crate::ops) fn dtype(&self, check: Check) -> Result<FloatType, KernelError> {
        check.float("x", self.first())
    }

    pub(in crate::ops) fn device(&self) -> &Device {
        self.first().device()
    }

    pub(in crate::ops) fn shape(&self) -> Vec<usize> {
        match (self, self.first().shape()) {
            (Self::GatedRmsNorm { .. } | Self::SigmoidMul { .. }, [rows @ .., heads, width]) => {
                [rows, &[heads * width]].concat()
            }
            (_, shape) => shape.to_vec(),
        }
    }

    /// That the op takes its operands, for the product that `check` is of.
    pub(in crate::ops) fn check(&self, check: Check) -> Result<(), KernelError> {
        match *self {
            Self::Tensor(_) => {}
            Self::SiluMul { gate, up } => drop(silu_mul::check(gate, up)?),
            Self::GatedRmsNorm { x, gate, weight, eps } => {
                rms_norm::check_gated(x, gate, weight, eps)?;
                has_heads(check, x)?;
            }
            Self::SigmoidMul { x, gate } => {
                sigmoid_mul::check(x, gate)?;
                has_heads(check, x)?;
            }
            Self::AddRmsNorm(AddRmsNorm { h, x, weight, eps }) => {
                add_rms_norm::check(h, x, weight, eps)?;
            }
        }
        self.dtype(check).map(drop)
    }

    /// What the op gives: x, and the sum that it is the norm of.
    pub(in crate::ops) fn tensor(&self) -> Result<(Tensor, Option<Tensor>), KernelError> {
        match *self {
            Self::Tensor(x) => Ok((x.clone(), None)),
            Self::SiluMul { gate, up } => Ok((silu_mul::silu_mul(gate, up)?, None)),
            Self::GatedRmsNorm { x, gate, weight, eps } => {
                let y = rms_norm::gated_rms_norm(x, gate, weight, eps)?;
                Ok((y.reshape(&self.shape())?, None))
            }
            Self::SigmoidMul { x, gate } => {
                Ok((sigmoid_mul::sigmoid_mul(x, gate)?.reshape(&self.shape())?, None))
            }
            Self::AddRmsNorm(x) => {
                let (sum, y) = x.tensors()?;
                Ok((y, Some(sum)))
            }
        }
    }
}

fn has_heads(check: Check, x: &Tensor) -> Result<(), KernelError> {
    if x.shape().len() < 2 {
        return Err(check.shape_error("x", x, "[.., H, D] is wanted".into()));
    }
    Ok(())
}
