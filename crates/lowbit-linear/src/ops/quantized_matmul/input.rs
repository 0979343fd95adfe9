//! The forms of a product's x.

use crate::ops::glu::{self, Gate};
use crate::ops::{Check, add_rms_norm, rms_norm};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::FloatType;

pub(in crate::ops) const CHECK: Check = Check("quantized_matmul");
/// The log that says which kernel each product takes, and why.
pub(in crate::ops) const PLAN: &str = "lowbit::plan";

/// A product's x `[.., K]`: a tensor, or the result of an op for this product alone. A product that
/// reads x only once makes it itself, without a launch of its own; any other calls the op first.
///
/// Either way x has the op's rounding: all in f32, once to x's dtype. On the CPU it is the op's bit
/// for bit; on a GPU sums may be in another order, and a sigmoid be within 2^-17 of itself or
/// 2^-119, so that a value of x can be a neighbour of the op's.
#[derive(Debug)]
pub enum Input<'a, T: Operand = Tensor> {
    /// x itself.
    Tensor(&'a T),
    /// [`glu`](super::super::glu()); the gate is `[.., K]`, or `[.., H, G]` of H heads.
    #[allow(missing_docs)]
    Glu { x: &'a T, gate: &'a T, by: Gate },
    /// [`gated_rms_norm`](super::super::gated_rms_norm()) of each head of x and gate, both
    /// `[.., K]`: as many values as the norm's weight has.
    #[allow(missing_docs)]
    GatedRmsNorm { x: &'a T, gate: &'a T, norm: Norm<'a, T> },
    /// The second result of [`add_rms_norm`](super::super::add_rms_norm()).
    AddRmsNorm(AddRmsNorm<'a, T>),
}

/// The operands of [`add_rms_norm`](super::super::add_rms_norm()), h and x `[.., K]`.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct AddRmsNorm<'a, T: Operand = Tensor> {
    pub h: &'a T,
    pub x: &'a T,
    pub norm: Norm<'a, T>,
}

/// A norm: its weight, and the number that is added to the mean square.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Norm<'a, T: Operand = Tensor> {
    pub weight: &'a T::Parameter,
    pub eps: f32,
}

/// A product's operands: tensors, or values that stand for one and record the ops on them.
pub trait Operand: AsRef<Tensor> + Clone + std::fmt::Debug {
    /// The weight of a norm.
    type Parameter: AsRef<Tensor> + std::fmt::Debug;

    /// [`Tensor::reshape`].
    ///
    /// # Errors
    /// As the op.
    fn reshape(&self, shape: &[usize]) -> Result<Self, KernelError>;

    /// [`glu`](super::super::glu()).
    ///
    /// # Errors
    /// As the op.
    fn glu(x: &Self, gate: &Self, by: Gate) -> Result<Self, KernelError>;

    /// [`gated_rms_norm`](super::super::gated_rms_norm()).
    ///
    /// # Errors
    /// As the op.
    fn gated_rms_norm(x: &Self, gate: &Self, norm: Norm<'_, Self>) -> Result<Self, KernelError>;

    /// [`add_rms_norm`](super::super::add_rms_norm()).
    ///
    /// # Errors
    /// As the op.
    fn add_rms_norm(x: &AddRmsNorm<'_, Self>) -> Result<(Self, Self), KernelError>;
}

impl Operand for Tensor {
    type Parameter = Tensor;

    fn reshape(&self, shape: &[usize]) -> Result<Self, KernelError> {
        self.reshape(shape)
    }

    fn glu(x: &Self, gate: &Self, by: Gate) -> Result<Self, KernelError> {
        glu::glu(x, gate, by)
    }

    fn gated_rms_norm(x: &Self, gate: &Self, norm: Norm<'_>) -> Result<Self, KernelError> {
        rms_norm::gated_rms_norm(x, gate, norm.weight, norm.eps)
    }

    fn add_rms_norm(&AddRmsNorm { h, x, norm }: &AddRmsNorm<'_>) -> Result<(Self, Self), KernelError> {
        add_rms_norm::add_rms_norm(h, x, norm.weight, norm.eps)
    }
}

// Not derived: that would ask for operands that are `Copy`.
impl<T: Operand> Clone for Input<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: Operand> Copy for Input<'_, T> {}
impl<T: Operand> Clone for AddRmsNorm<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: Operand> Copy for AddRmsNorm<'_, T> {}
impl<T: Operand> Clone for Norm<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: Operand> Copy for Norm<'_, T> {}

impl<'a, T: Operand> From<&'a T> for Input<'a, T> {
    fn from(x: &'a T) -> Self {
        Self::Tensor(x)
    }
}

impl<'a, T: Operand> From<AddRmsNorm<'a, T>> for Input<'a, T> {
    fn from(x: AddRmsNorm<'a, T>) -> Self {
        Self::AddRmsNorm(x)
    }
}

impl<T: Operand> AddRmsNorm<'_, T> {
    /// The sum and its norm, for several readers.
    ///
    /// # Errors
    /// As [`add_rms_norm`](super::super::add_rms_norm()).
    pub fn make(&self) -> Result<(T, T), KernelError> {
        T::add_rms_norm(self)
    }
}

impl<'a, T: Operand> Input<'a, T> {
    /// x, or what an op makes it of: the operand that has its shape and dtype, and the other one.
    pub fn operands(&self) -> (&'a T, Option<&'a T>) {
        match *self {
            Self::Tensor(x) => (x, None),
            Self::Glu { x, gate, .. } | Self::GatedRmsNorm { x, gate, .. } => (x, Some(gate)),
            Self::AddRmsNorm(AddRmsNorm { h, x, .. }) => (x, Some(h)),
        }
    }

    /// The operand that has x's shape and dtype.
    fn like(&self) -> &'a Tensor {
        self.operands().0.as_ref()
    }

    /// Its type, for the op that `check` is of.
    pub(in crate::ops) fn dtype(&self, check: Check) -> Result<FloatType, KernelError> {
        check.float("x", self.like())
    }

    pub(in crate::ops) fn device(&self) -> &'a Device {
        self.like().device()
    }

    pub(in crate::ops) fn shape(&self) -> &'a [usize] {
        self.like().shape()
    }

    /// That the op takes its operands, for the product that `check` is of.
    pub(in crate::ops) fn check(&self, check: Check) -> Result<(), KernelError> {
        match *self {
            Self::Tensor(_) => {}
            Self::Glu { x, gate, .. } => drop(glu::check(glu::CHECK, x.as_ref(), gate.as_ref())?),
            Self::GatedRmsNorm { x, gate, norm: Norm { weight, eps } } => {
                let (weight, shape) = (weight.as_ref(), heads(x.as_ref(), weight.as_ref())?);
                let [x, gate] = [x.as_ref(), gate.as_ref()];
                rms_norm::CHECK_GATED.shape("gate", gate, x.shape(), || "x".into())?;
                rms_norm::check_gated(&x.reshape(&shape)?, &gate.reshape(&shape)?, weight, eps)?;
            }
            Self::AddRmsNorm(AddRmsNorm { h, x, norm }) => {
                add_rms_norm::check(h.as_ref(), x.as_ref(), norm.weight.as_ref(), norm.eps)?;
            }
        }
        self.dtype(check).map(drop)
    }

    /// The op's result: x, and the sum that it is the norm of.
    ///
    /// # Errors
    /// Those of the op.
    pub fn make(&self) -> Result<(T, Option<T>), KernelError> {
        Ok(match *self {
            Self::Tensor(x) => (x.clone(), None),
            Self::Glu { x, gate, by } => (T::glu(x, gate, by)?, None),
            Self::GatedRmsNorm { x, gate, norm } => {
                let shape = heads(x.as_ref(), norm.weight.as_ref())?;
                let y = T::gated_rms_norm(&x.reshape(&shape)?, &gate.reshape(&shape)?, norm)?;
                (y.reshape(x.as_ref().shape())?, None)
            }
            Self::AddRmsNorm(x) => {
                let (sum, y) = x.make()?;
                (y, Some(sum))
            }
        })
    }
}

/// The shape of x `[.., H * D]` as heads `[.., H, D]`, each as long as the norm's `weight`.
fn heads(x: &Tensor, weight: &Tensor) -> Result<Vec<usize>, KernelError> {
    match (x.shape(), weight.shape()) {
        ([rows @ .., all], &[width]) if width > 0 && all.is_multiple_of(width) => {
            Ok([rows, &[all / width, width]].concat())
        }
        _ => {
            let want = format!("x {:?} wants one whose length divides its last size", x.shape());
            Err(rms_norm::CHECK_GATED.shape_error("weight", weight, want))
        }
    }
}
