//! The loss of distillation from a teacher of which only the `K` most likely tokens are known, each
//! with its probability, and what is left for all others together. It is what a teacher's targets
//! on the disk are learned from.
//! ```text
//! q = softmax(logits[t] / temperature)                                 over the vocabulary
//! p[i] = e^ln_p[t, i], p_rest = e^ln_rest[t]                           at the same temperature; they sum to 1
//! q_rest = sum of q[v] over the v that are not among ids[t]
//! kl[t] = sum over i of p[i] * (ln p[i] - ln q[ids[t, i]]) + p_rest * (ln p_rest - ln q_rest)
//! dlogits[t, v] = dkl[t] / temperature * (q[v] - p[i])                           for v = ids[t, i]
//! dlogits[t, v] = dkl[t] / temperature * (q[v] - p_rest * q[v] / q_rest)         for all others
//! ```
//! | operand | shape | dtype |
//! |---|---|---|
//! | `logits` | `[T, V]` | f32, f16, bf16 |
//! | `ids` | `[T, K]`: rising in each row | u32 |
//! | `ln_p` | `[T, K]` | f32 |
//! | `ln_rest` | `[T]`: -inf where nothing is left | f32 |
//! | `dkl` | `[T]`, as in [`distillation_loss`](super::distillation_loss()) | f32 |
//! | `kl` | `[T]` | f32 |
//! | `dlogits` | `[T, V]` | f32 |
//!
//! It is the Kullback-Leibler divergence of distributions over `K + 1` outcomes, so it is never
//! more than that of the whole distributions, and the same for `K = V`: how the student shares out
//! `q_rest` costs nothing, and its gradient leaves those shares as they are. `q_rest` is summed
//! over its own tokens, with their own greatest logit, never as what is missing to 1.
//!
//! A probability of 0 contributes nothing, whatever the student's is; NaN passes through. Where all
//! other logits are -inf, their gradients are 0. Arithmetic is f32, but a CPU's sums over the
//! vocabulary are f64 from 1024 terms to the next, and so is what joins the two sums.
//!
//! Source: the divergence of sums of outcomes (Kullback and Leibler, 1951); the derivative is
//! `d ln q[v] / d logits[w] = (v == w) - q[w]`.

mod cpu;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use super::Check;
use super::distillation_loss::{DistillationLoss, check_dkl, check_temperature};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

/// A teacher's targets for `T` tokens; shapes and dtypes as the [module](self) says.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct TopKTargets {
    pub ids: Tensor,
    pub ln_p: Tensor,
    pub ln_rest: Tensor,
}

impl TopKTargets {
    /// Those of tokens `start..end`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] where there are fewer.
    pub fn rows(&self, start: usize, end: usize) -> Result<Self, KernelError> {
        let of = |x: &Tensor| x.rows(start, end);
        Ok(Self { ids: of(&self.ids)?, ln_p: of(&self.ln_p)?, ln_rest: of(&self.ln_rest)? })
    }

    /// The same on another device.
    ///
    /// # Errors
    /// As [`Tensor::to_device`].
    pub fn to_device(&self, device: &Device) -> Result<Self, KernelError> {
        let of = |x: &Tensor| x.to_device(device);
        Ok(Self { ids: of(&self.ids)?, ln_p: of(&self.ln_p)?, ln_rest: of(&self.ln_rest)? })
    }
}

/// The loss of some tokens and its gradient by the student's logits.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that are
/// not as the [module](self) says, and for a temperature that is not above 0 and finite;
/// [`KernelError::Id`] for an id outside of the vocabulary. On a GPU, ids are not read here: a
/// token whose ids do not rise, or are outside of the vocabulary, has a loss of NaN.
pub fn distillation_loss_top_k(
    logits: &Tensor,
    targets: &TopKTargets,
    dkl: &Tensor,
    temperature: f32,
) -> Result<DistillationLoss, KernelError> {
    let check = Check("distillation_loss_top_k");
    let [tokens, vocabulary] = check.dims("logits", logits, "[T, V]")?;
    check_dkl(check, dkl, ("logits", logits))?;
    check_temperature(check, temperature)?;
    let TopKTargets { ids, ln_p, ln_rest } = targets;
    check_targets(check, targets, logits)?;
    for (name, operand) in [("ids", ids), ("ln_p", ln_p), ("ln_rest", ln_rest), ("dkl", dkl)] {
        check.same_device(name, operand.device(), logits.device())?;
    }
    let student = check.widened("logits", logits)?;
    let mut kl = Tensor::allocate_zeros(&[tokens], DType::F32, logits.device())?;
    let mut dlogits = check.result(logits.shape(), logits.device())?;
    match logits.device() {
        _ if dlogits.is_empty() => {}
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, (&student, targets, dkl), temperature, [&kl, &dlogits])?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let rows = cpu::Rows {
                student: student.as_slice()?,
                ids: ids.as_slice()?,
                ln_p: ln_p.as_slice()?,
                ln_rest: ln_rest.as_slice()?,
                dkl: dkl.as_slice()?,
                temperature,
                sizes: [vocabulary, ids.dim(1)],
            };
            rows.run(cpu, kl.as_mut_slice()?, dlogits.as_mut_slice()?);
        }
    }
    Ok(DistillationLoss { kl, dlogits })
}

fn check_targets(check: Check, targets: &TopKTargets, logits: &Tensor) -> Result<(), KernelError> {
    let TopKTargets { ids, ln_p, ln_rest } = targets;
    let (tokens, vocabulary) = (logits.dim(0), logits.dim(1));
    let [rows, k] = check.dims("ids", ids, "[T, K]")?;
    if rows != tokens || k > vocabulary {
        let want =
            format!("logits {:?} wants [{tokens}, K] with a K of at most {vocabulary}", logits.shape());
        return Err(check.shape_error("ids", ids, want));
    }
    check.shape("ln_p", ln_p, ids.shape(), || format!("ids {:?}", ids.shape()))?;
    check.shape("ln_rest", ln_rest, &[tokens], || format!("ids {:?}", ids.shape()))?;
    check.dtype("ln_p", ln_p, DType::F32)?;
    check.dtype("ln_rest", ln_rest, DType::F32)?;
    check.ids("ids", ids, vocabulary)?;
    if let (Device::Cpu(_), 1..) = (ids.device(), k) {
        let of_tokens = ids.as_slice::<u32>()?.chunks_exact(k);
        if let Some(token) = of_tokens.map(|ids| ids.is_sorted_by(|a, b| a < b)).position(|rises| !rises) {
            return Err(check.value(
                "ids",
                format!("out of order for token {token}"),
                "rising ids are wanted",
            ));
        }
    }
    Ok(())
}

/// The targets for [`distillation_loss_top_k`] from a teacher's logits, in the host's memory.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | logits | `[T, V]` | f32, f16, bf16 |
/// | ids | `[T, k]`: those of the greatest logits, the lowest ids where several tie, in rising order | u32 |
/// | ln_p | `[T, k]`: `ln softmax(logits / temperature)` of these | f32 |
/// | ln_rest | `[T]`: the logarithm of the sum of the others' probabilities, -inf where there are none | f32 |
///
/// It does not run on a GPU: copy a block of logits to the host. NaN among a token's logits makes
/// all of its `ln_p` NaN.
///
/// # Errors
/// [`KernelError::Shape`] and [`KernelError::Value`] for operands that are not as said, for a `k`
/// that is not from 1 to V, and a temperature that is not above 0 and finite;
/// [`KernelError::Unsupported`] on a GPU.
pub fn top_k_targets(logits: &Tensor, k: usize, temperature: f32) -> Result<TopKTargets, KernelError> {
    let check = Check("top_k_targets");
    let [tokens, vocabulary] = check.dims("logits", logits, "[T, V]")?;
    check_temperature(check, temperature)?;
    if k == 0 || k > vocabulary {
        return Err(check.value("k", k, format!("1 to {vocabulary}, the vocabulary, is wanted")));
    }
    let logits = check.widened("logits", logits)?;
    let device = logits.device();
    let cpu = match device {
        Device::Gpu(gpu) => return Err(check.unsupported(gpu)),
        Device::Cpu(cpu) => cpu,
    };
    let mut ids = Tensor::allocate(&[tokens, k], DType::U32, device)?;
    let mut ln_p = Tensor::allocate(&[tokens, k], DType::F32, device)?;
    let mut ln_rest = Tensor::allocate(&[tokens], DType::F32, device)?;
    let rows = ids.as_mut_slice()?.chunks_exact_mut(k).zip(ln_p.as_mut_slice()?.chunks_exact_mut(k));
    let rows =
        rows.zip(ln_rest.as_mut_slice()?).map(|((ids, ln_p), ln_rest)| cpu::Kept { ids, ln_p, ln_rest });
    cpu::keep(cpu, logits.as_slice()?, 1.0 / temperature, rows.collect());
    Ok(TopKTargets { ids, ln_p, ln_rest })
}
