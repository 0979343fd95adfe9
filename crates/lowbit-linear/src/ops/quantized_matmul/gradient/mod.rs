//! The gradients of [`quantized_matmul()`](super::quantized_matmul()): of x, of a weight's scales
//! and biases, and of its values.
//!
//! | operand | shape | dtype |
//! |---|---|---|
//! | `x` | `[.., K]` | f32, f16, bf16 |
//! | `dy` | `[.., N]`, leading dimensions as `x` | f32, f16, bf16 |
//! | `weight` | `[N, K]`, or `[B, N, K]` with the forward product's broadcast | any format, not repacked |
//! | `dx` | `[.., K]` | as `dy` |
//! | `dscales`, `dbiases` | `[N, K / group]`, or `[B, N, K / group]` | f32 |
//! | `dweight` | the weight's | f32 |
//!
//! These are derivatives of the exact formula: where the forward product rounds x to 8 bits or a
//! weight to bf16, the rounding counts as the identity (the straight-through estimate). All sums
//! are f32, in an order that does not depend on the number of threads. A GPU multiplies a weight
//! that it has decoded to dy's type, and x and dy in x's type, or in f32 where they differ.

pub(in crate::ops) mod cpu;
#[cfg(feature = "gpu")]
pub(in crate::ops) mod gpu;
#[cfg(feature = "gpu")]
pub(in crate::ops) mod library;
#[cfg(test)]
pub(in crate::ops) mod reference;
#[cfg(test)]
mod tests;

use super::output_shape;
use crate::ops::Check;
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use cpu::Rows;
use lowbit_formats::FormatError;

/// The gradients of what multiplies codes and of what is added, by group.
#[derive(Clone, Debug)]
pub struct ScalesGradient {
    /// Of the number that multiplies a group's codes, all of its factors together: in a K-quant
    /// that is `scale * sub_scale`.
    pub dscales: Tensor,
    /// Of the number that is added to a group, in formats that have one: in a K-quant that is
    /// `-(min * sub_minimum)`.
    pub dbiases: Option<Tensor>,
}

/// The part of a weight whose gradient is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightPart {
    /// Those of its scales and biases, with its codes as constants: of a weight that has codes.
    Scales,
    /// That of all its values: of a dense weight, or of the latent weight whose rounding makes the
    /// codes.
    Values,
}

/// The gradient of a weight.
#[derive(Clone, Debug)]
pub enum WeightGradient {
    /// [`WeightPart::Scales`].
    Scales(ScalesGradient),
    /// [`WeightPart::Values`], of the weight's shape.
    Values(Tensor),
}

impl WeightGradient {
    /// Its tensors: of scales and perhaps biases, or of values.
    pub fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Scales(scales) => [&scales.dscales].into_iter().chain(&scales.dbiases).collect(),
            Self::Values(values) => vec![values],
        }
    }

    /// The same on another device.
    ///
    /// # Errors
    /// As [`Tensor::to_device`].
    pub fn to_device(&self, device: &Device) -> Result<Self, KernelError> {
        Ok(match self {
            Self::Scales(ScalesGradient { dscales, dbiases }) => Self::Scales(ScalesGradient {
                dscales: dscales.to_device(device)?,
                dbiases: dbiases.as_ref().map(|dbiases| dbiases.to_device(device)).transpose()?,
            }),
            Self::Values(values) => Self::Values(values.to_device(device)?),
        })
    }

    /// Adds the gradient of another use of the same weight.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when it is another weight's, or of another part.
    pub fn add(&mut self, other: &Self) -> Result<(), KernelError> {
        let shapes =
            |gradient: &Self| gradient.tensors().iter().map(|x| x.shape().to_vec()).collect::<Vec<_>>();
        let (mine, others) = (shapes(self), shapes(other));
        if mine != others {
            let (got, want) =
                (others.concat(), format!("gradients of {mine:?} and of {others:?} were added"));
            return Err(KernelError::Shape { op: "WeightGradient::add", operand: "other", got, want });
        }
        let sums: Vec<&mut Tensor> = match self {
            Self::Scales(scales) => [&mut scales.dscales].into_iter().chain(&mut scales.dbiases).collect(),
            Self::Values(values) => vec![values],
        };
        for (sum, other) in sums.into_iter().zip(other.tensors()) {
            *sum = crate::ops::add(sum, other)?;
        }
        Ok(())
    }
}

/// `dx[.., k] = sum over n of dy[.., n] * weight[n, k]`; operands are the [module](self)'s. Blocks
/// of the weight are decoded where they are multiplied.
///
/// # Errors
/// [`KernelError::Shape`] when the shapes do not fit each other; [`KernelError::Value`] when `dy`
/// is no float; [`KernelError::Unsupported`] for a repacked weight; [`KernelError::TooLarge`].
pub fn quantized_matmul_backward_x(dy: &Tensor, weight: &QuantizedTensor) -> Result<Tensor, KernelError> {
    let check = Check("quantized_matmul_backward_x");
    let dtype = check.float("dy", dy)?;
    check.same_device("weight", weight.device(), dy.device())?;
    weight.by_rows(check.0)?;
    // As the forward product checks x, with N and K exchanged.
    let mut shape = dy.shape().to_vec();
    let fits = shape.last() == Some(&weight.n()) && {
        *shape.last_mut().expect("it was compared") = weight.k();
        output_shape(&shape, weight).is_ok()
    };
    if !fits {
        return Err(check.shape_error("dy", dy, format!("weight is {:?}", weight.shape())));
    }
    match dy.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward_x(gpu, dy, weight, &shape),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let mut dx = check.result(&shape, dy.device())?;
            let dy = check.widened("dy", dy)?;
            let dy = Rows::of_each(dy.as_slice()?, matrices(weight.shape()), weight.n());
            cpu::backward_x(cpu, weight, &dy, dx.as_mut_slice()?);
            dx.cast(dtype.dtype())
        }
    }
}

/// The gradients of a weight's scales and biases, with its codes as constants. Over the k of group
/// g:
///
/// ```text
/// dscales[n, g] = sum over k, m of dy[m, n] * x[m, k] * value(code[n, k])
/// dbiases[n, g] = sum over k, m of dy[m, n] * x[m, k]
/// ```
/// Operands and results are the [module](self)'s. `value(code)` is a code's value before it is
/// scaled ([`Scheme::code_values`](lowbit_formats::Scheme::code_values)). The gradient of all
/// values exists for a few rows at a time.
///
/// Source: the derivative of `mx.quantized_matmul`, mlx 0.32 (`QuantizedMatmul::vjp`).
///
/// # Errors
/// As [`quantized_matmul_backward_x`]; [`KernelError::Format`] for weights of plain floats, which
/// have no scales.
pub fn quantized_matmul_backward_scales(
    x: &Tensor,
    weight: &QuantizedTensor,
    dy: &Tensor,
) -> Result<ScalesGradient, KernelError> {
    let check = Check("quantized_matmul_backward_scales");
    weight.by_rows(check.0)?;
    let scheme = weight.format().scheme();
    let Some(group) = scheme.group_size() else { return Err(FormatError::Codes(weight.format()).into()) };
    check.same_device("weight", weight.device(), x.device())?;
    let operands = Operands::new(check, (x, dy), weight.shape())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward_scales(gpu, [&operands.x, &operands.dy], weight),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let mut shape = weight.shape().to_vec();
            *shape.last_mut().expect("a weight has dimensions") /= group;
            let mut dscales = check.result(&shape, x.device())?;
            let mut dbiases = scheme.biased().then(|| check.result(&shape, x.device())).transpose()?;
            let biases = dbiases.as_mut().map(|dbiases| dbiases.as_mut_slice::<f32>()).transpose()?;
            let pairs = operands.pairs(weight.n())?;
            cpu::backward_scales(cpu, weight, &pairs, (dscales.as_mut_slice()?, biases))?;
            Ok(ScalesGradient { dscales, dbiases })
        }
    }
}

/// The gradient of all of a weight's values, `dweight[n, k] = sum over m of dy[m, n] * x[m, k]`,
/// for a weight of `shape`, `[N, K]` or `[B, N, K]`: of a dense weight, or of the latent weight
/// whose rounding makes the codes. Operands are the [module](self)'s.
///
/// # Errors
/// As [`quantized_matmul_backward_x`].
pub fn quantized_matmul_backward_weight(
    x: &Tensor,
    dy: &Tensor,
    shape: &[usize],
) -> Result<Tensor, KernelError> {
    let check = Check("quantized_matmul_backward_weight");
    let [.., n, _] = *shape else {
        let want = "[N, K] or [B, N, K] is wanted".into();
        return Err(KernelError::Shape { op: check.0, operand: "shape", got: shape.to_vec(), want });
    };
    let operands = Operands::new(check, (x, dy), shape)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward_weight(gpu, [&operands.x, &operands.dy], shape),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let mut dweight = check.result(shape, x.device())?;
            cpu::backward_weight(cpu, &operands.pairs(n)?, dweight.as_mut_slice()?);
            Ok(dweight)
        }
    }
}

/// The number of matrices of a weight of `[N, K]` or `[B, N, K]`.
fn matrices(shape: &[usize]) -> usize {
    if let [count, _, _] = shape { *count } else { 1 }
}

/// x and dy in f32, or in their one type on a GPU, checked against a weight's shape.
struct Operands {
    x: Tensor,
    dy: Tensor,
    k: usize,
    /// Matrices of the weight.
    count: usize,
}

impl Operands {
    fn new(check: Check, (x, dy): (&Tensor, &Tensor), weight: &[usize]) -> Result<Self, KernelError> {
        check.float("x", x)?;
        check.float("dy", dy)?;
        check.same_device("dy", dy.device(), x.device())?;
        let want = super::product_shape(check, x.shape(), weight)?;
        check.shape("dy", dy, &want, || format!("x {:?} with weight {weight:?}", x.shape()))?;
        let (k, count) = (*weight.last().expect("it was matched with x"), matrices(weight));
        let [x, dy] = check.of_one_type(x, dy)?;
        Ok(Self { x, dy, k, count })
    }

    /// The rows of x and of dy that meet each matrix of the weight.
    fn pairs(&self, n: usize) -> Result<Vec<[Rows<'_>; 2]>, KernelError> {
        let x = Rows::of_each(self.x.as_slice()?, self.count, self.k);
        let dy = Rows::of_each(self.dy.as_slice()?, self.count, n);
        Ok(x.into_iter().zip(dy).map(|(x, dy)| [x, dy]).collect())
    }
}
