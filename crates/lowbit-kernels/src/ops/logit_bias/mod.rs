//! Numbers added to some logits before a token is drawn.

mod bench;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod reference;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};
use std::collections::BTreeMap;

/// The operand of [`logit_bias()`], on a device: token ids, each once, and what is added to their
/// logits.
#[derive(Debug)]
pub struct LogitBias {
    /// u32 `[n]`.
    ids: Tensor,
    /// f32 `[n]`.
    biases: Tensor,
}

impl LogitBias {
    /// `biases` are ids and what is added to their logits: -inf for a token that must never be
    /// drawn. Those of an id that is there several times are added up. `None` for no biases.
    ///
    /// # Errors
    /// [`KernelError::Id`] for an id of `count` or more, [`KernelError::Value`] for a bias that is
    /// NaN or infinity, [`KernelError::Gpu`] when a GPU has no memory left.
    pub fn new(biases: &[(u32, f32)], count: usize, device: &Device) -> Result<Option<Self>, KernelError> {
        let mut sums = BTreeMap::<u32, f32>::new();
        for (index, &(id, bias)) in biases.iter().enumerate() {
            if id as usize >= count {
                return Err(KernelError::Id { op: "logit_bias", operand: "ids", index, id, count });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(Check("logit_bias").value("bias", bias, "a finite number or -inf is wanted"));
            }
            *sums.entry(id).or_default() += bias;
        }
        if sums.is_empty() {
            return Ok(None);
        }
        let (ids, biases): (Vec<u32>, Vec<f32>) = sums.into_iter().unzip();
        let ids = Tensor::new(&ids, &[ids.len()], device)?;
        Ok(Some(Self { ids, biases: Tensor::new(&biases, &[biases.len()], device)? }))
    }
}

/// `y[v] = logits[v] + bias[v]`, where an id without a bias has 0.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | logits | `[V]` (or `[1, V]`, ..) | f32, f16, bf16 |
/// | bias | ids less than V | [`LogitBias`] |
/// | y | logits' | f32 |
///
/// The sum is f32.
///
/// Source: mlx-lm 0.32.2 `sample_utils` (`make_logits_processors`), llama.cpp
/// `llama_sampler_init_logit_bias`: both before any penalty.
///
/// # Errors
/// [`KernelError::Value`] for another dtype; [`KernelError::Device`] for a bias on another device;
/// [`KernelError::Id`] for an id beyond V on the CPU: a GPU ignores it.
pub fn logit_bias(logits: &Tensor, bias: &LogitBias) -> Result<Tensor, KernelError> {
    let check = Check("logit_bias");
    check.float("logits", logits)?;
    check.same_device("bias", bias.ids.device(), logits.device())?;
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::logit_bias(check, gpu, logits, bias),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            check.ids("ids", &bias.ids, logits.len())?;
            let mut y = check.widened("logits", logits)?.as_slice::<f32>()?.to_vec();
            for (&id, &bias) in bias.ids.as_slice::<u32>()?.iter().zip(bias.biases.as_slice::<f32>()?) {
                y[id as usize] += bias;
            }
            Tensor::new(&y, logits.shape(), &Device::Cpu(cpu.clone()))
        }
    }
}
