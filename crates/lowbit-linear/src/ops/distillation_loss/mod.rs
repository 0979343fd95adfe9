//! The loss of distillation: the Kullback-Leibler divergence of a student's next-token distribution
//! from its teacher's, and its gradients.
//! ```text
//! p = softmax(teacher[t] / temperature), q = softmax(logits[t] / temperature)     over the vocabulary
//! kl[t] = sum over v of p[v] * (ln p[v] - ln q[v])
//! dlogits[t, v] = dkl[t] / temperature * (q[v] - p[v])
//! ```
//! | operand | shape | dtype |
//! |---|---|---|
//! | `logits`, `teacher` | `[T, V]` | f32, f16, bf16 |
//! | `dkl` | `[T]`: the gradient of what is minimised by each token's kl, 1/T for their mean, 0 for padding | f32 |
//! | `kl` | `[T]` | f32 |
//! | `dlogits` | `[T, V]` | f32 |
//!
//! A teacher's probability of 0 contributes nothing, whatever the student's is; NaN passes through.
//! All arithmetic is f32, but a CPU's sums over the vocabulary are f64 from 1024 terms to the next.
//!
//! Source: mlx-lm 0.32 `quant/dwq.py` (`kl_div_loss` with logits times `1 / temperature`).

pub(super) mod cpu;
#[cfg(feature = "gpu")]
pub(super) mod gpu;
mod logits;
mod loss;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use logits::LogitFunction;
pub use loss::DistillationLoss;
pub(super) use loss::{check_dkl, check_temperature};

use super::Check;
use super::distillation_loss_top_k::{TopKTargets, distillation_loss_top_k};
use super::{
    WeightGradient, WeightPart, concat_rows, quantized_matmul_backward_scales,
    quantized_matmul_backward_weight, quantized_matmul_backward_x, quantized_matmul_to,
};
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use lowbit_formats::{DType, FloatType};
use std::ops::Range;

/// The loss of some tokens and its gradient by the student's logits.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that are
/// not as the [module](self) says, and for a temperature that is not above 0 and finite.
pub fn distillation_loss(
    logits: &Tensor,
    teacher: &Tensor,
    dkl: &Tensor,
    temperature: f32,
) -> Result<DistillationLoss, KernelError> {
    let check = Check("distillation_loss");
    let [tokens, vocabulary] = check.dims("logits", logits, "[T, V]")?;
    check.shape("teacher", teacher, logits.shape(), || "logits".into())?;
    check_dkl(check, dkl, ("logits", logits))?;
    check_temperature(check, temperature)?;
    for (name, operand) in [("teacher", teacher), ("dkl", dkl)] {
        check.same_device(name, operand.device(), logits.device())?;
    }
    let (student, teacher) = (check.widened("logits", logits)?, check.widened("teacher", teacher)?);
    let mut kl = Tensor::allocate_zeros(&[tokens], DType::F32, logits.device())?;
    let mut dlogits = check.result(logits.shape(), logits.device())?;
    match logits.device() {
        _ if dlogits.is_empty() => {}
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            gpu::launch(check, gpu, [&student, &teacher, dkl], temperature, [&kl, &dlogits])?;
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let rows = cpu::Rows {
                student: student.as_slice()?,
                teacher: teacher.as_slice()?,
                dkl: dkl.as_slice()?,
                temperature,
                vocabulary,
            };
            rows.run(cpu, kl.as_mut_slice()?, dlogits.as_mut_slice()?);
        }
    }
    Ok(DistillationLoss { kl, dlogits })
}

/// A teacher's distributions for some tokens.
#[derive(Clone, Debug)]
pub enum DistillationTarget {
    /// Its logits, `[T, V]`.
    Logits(Tensor),
    /// The greatest of them, at the temperature of the loss.
    TopK(TopKTargets),
}

impl DistillationTarget {
    /// The loss of these tokens and its gradient by the student's logits.
    ///
    /// # Errors
    /// As [`distillation_loss`] and [`distillation_loss_top_k`].
    pub fn loss(
        &self,
        logits: &Tensor,
        dkl: &Tensor,
        temperature: f32,
    ) -> Result<DistillationLoss, KernelError> {
        match self {
            Self::Logits(teacher) => distillation_loss(logits, teacher, dkl, temperature),
            Self::TopK(targets) => distillation_loss_top_k(logits, targets, dkl, temperature),
        }
    }
}

/// Options of [`output_distillation`].
#[derive(Clone, Copy, Debug)]
pub struct OutputDistillation<'a> {
    /// From `x weight^T` to the student's logits. The teacher says its logits as they are.
    pub logits: &'a LogitFunction,
    /// Both models' logits are divided by this.
    pub temperature: f32,
    /// Tokens whose logits exist at a time: memory for `2 * block * V` f32 and what the teacher
    /// says.
    pub block: usize,
    /// The gradient of the output weight to compute, if any.
    pub dweight: Option<WeightPart>,
}

/// The result of [`output_distillation`].
#[derive(Clone, Debug)]
pub struct OutputDistillationGradient {
    /// `[T]`: each token's loss.
    pub kl: Tensor,
    /// `[T, H]`, of x.
    pub dx: Tensor,
    /// Of the output weight, if it was asked for.
    pub dweight: Option<WeightGradient>,
}

/// [`distillation_loss`], or [`distillation_loss_top_k`], of the [logits](LogitFunction) of
/// `x weight^T`, a block of tokens at a time, so that the logits of all never exist, and its
/// gradients by what makes them. `teacher` is called for each block of tokens in order.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[T, H]` | f32, f16, bf16 |
/// | weight | `[V, H]` | any format, not repacked |
/// | dkl | `[T]` | f32 |
/// | dx | `[T, H]` | x's |
///
/// Logits are f32. Their gradients are rounded to bf16 where x is bf16, so that all products are of
/// one type; x in f16 is widened, which small gradients would underflow in.
///
/// # Errors
/// As [`distillation_loss`] and those of `teacher`; [`KernelError::Shape`] when x and weight do not
/// fit; [`KernelError::Value`] for a block of 0; [`KernelError::Unsupported`] for a repacked
/// weight.
pub fn output_distillation(
    x: &Tensor,
    weight: &QuantizedTensor,
    dkl: &Tensor,
    mut teacher: impl FnMut(Range<usize>) -> Result<DistillationTarget, KernelError>,
    params: &OutputDistillation<'_>,
) -> Result<OutputDistillationGradient, KernelError> {
    let check = Check("output_distillation");
    let [tokens, _] = check.dims("x", x, "[T, H]")?;
    check_dkl(check, dkl, ("x", x))?;
    check_temperature(check, params.temperature)?;
    weight.by_rows(check.0)?;
    if params.block == 0 {
        return Err(check.value("block", 0, "1 token or more are wanted"));
    }
    let wide = match check.float("x", x)? {
        FloatType::BF16 => x.clone(),
        _ => check.widened("x", x)?,
    };
    let (mut kl, mut dx, mut sum) = (vec![], vec![], None);
    // Without tokens once, for gradients of zero.
    for start in (0..tokens.max(1)).step_by(params.block) {
        let block = start..tokens.min(start + params.block);
        let part = |x: &Tensor| x.rows(block.start, block.end);
        let x = part(&wide)?;
        let products = quantized_matmul_to(&x, weight, FloatType::F32)?;
        let logits = params.logits.of(products.clone())?;
        let loss = teacher(block.clone())?.loss(&logits, &part(dkl)?, params.temperature)?;
        drop(logits);
        kl.push(loss.kl);
        let dlogits = params.logits.backward(products, loss.dlogits)?.cast(x.dtype())?;
        dx.push(quantized_matmul_backward_x(&dlogits, weight)?);
        if let Some(part) = params.dweight {
            let gradient = match part {
                WeightPart::Scales => {
                    WeightGradient::Scales(quantized_matmul_backward_scales(&x, weight, &dlogits)?)
                }
                WeightPart::Values => {
                    WeightGradient::Values(quantized_matmul_backward_weight(&x, &dlogits, weight.shape())?)
                }
            };
            match &mut sum {
                None => sum = Some(gradient),
                Some(sum) => sum.add(&gradient)?,
            }
        }
    }
    let dx = concat_rows(&dx)?.cast(x.dtype())?;
    Ok(OutputDistillationGradient { kl: concat_rows(&kl)?, dx, dweight: sum })
}
