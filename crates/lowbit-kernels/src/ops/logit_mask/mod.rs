//! Logits of the tokens that a grammar forbids ruled out before a token is drawn.

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
use lowbit_formats::DType;

/// Tokens per word of a mask.
const PER_WORD: usize = u32::BITS as usize;

/// The operand of [`logit_mask()`], on a device: a bit per token of a vocabulary, 1 for those that
/// may be drawn. New bits are written to the same memory, so that a captured step can be replayed
/// with them.
#[derive(Debug)]
pub struct LogitMask {
    /// u32 `[ceil(V / 32)]`: the bit of token `v` is bit `v % 32` of word `v / 32`.
    bits: Tensor,
    /// V.
    count: usize,
}

impl LogitMask {
    /// A mask of `count` tokens that allows all.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no memory left.
    pub fn new(count: usize, device: &Device) -> Result<Self, KernelError> {
        let bits = vec![u32::MAX; count.div_ceil(PER_WORD)];
        Ok(Self { bits: Tensor::new(&bits, &[bits.len()], device)?, count })
    }

    /// The number of tokens.
    pub fn count(&self) -> usize {
        self.count
    }

    /// u32 `[ceil(V / 32)]`: the bits, on the device.
    pub fn bits(&self) -> &Tensor {
        &self.bits
    }

    /// Sets all bits. Those behind the last token's are ignored. A GPU takes them up in the order
    /// of what is recorded: for [`logit_mask()`] and replays that follow.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for another number of words than `ceil(V / 32)`;
    /// [`KernelError::Gpu`].
    pub fn set(&mut self, bits: &[u32]) -> Result<(), KernelError> {
        if bits.len() != self.bits.len() {
            let (got, want) =
                (vec![bits.len()], format!("{} tokens want {:?}", self.count, self.bits.shape()));
            return Err(KernelError::Shape { op: "logit_mask", operand: "bits", got, want });
        }
        self.bits.write(bits)
    }
}

/// `y[v] = logits[v]` where the mask has a 1 for token `v`, else -inf.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | logits | `[V]` (or `[1, V]`, ..) | f32, f16, bf16 |
/// | mask | V tokens | [`LogitMask`] |
/// | y | logits' | f32 |
///
/// Exact: f16 and bf16 are widened. The logits of forbidden tokens are not read into the result,
/// NaN included. A mask without a 1 leaves -inf altogether, which [`sample()`](super::sample())
/// refuses.
///
/// Source: llguidance 1.9 `SimpleVob` (the mask's layout) and vLLM `apply_grammar_bitmask`.
///
/// # Errors
/// [`KernelError::Value`] for another dtype; [`KernelError::Shape`] for another number of logits
/// than the mask's tokens; [`KernelError::Device`] for a mask on another device.
pub fn logit_mask(logits: &Tensor, mask: &LogitMask) -> Result<Tensor, KernelError> {
    let check = Check("logit_mask");
    check.float("logits", logits)?;
    check.same_device("mask", mask.bits.device(), logits.device())?;
    if logits.len() != mask.count {
        return Err(check.shape_error("logits", logits, format!("the mask is of {} tokens", mask.count)));
    }
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::logit_mask(check, gpu, logits, mask),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let (x, bits) = (check.widened("logits", logits)?, mask.bits.as_slice::<u32>()?);
            let mut y = Tensor::allocate(logits.shape(), DType::F32, logits.device())?;
            let rows =
                y.as_mut_slice::<f32>()?.chunks_mut(PER_WORD).zip(x.as_slice::<f32>()?.chunks(PER_WORD));
            for ((y, x), word) in rows.zip(bits) {
                for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
                    *y = if word >> i & 1 == 1 { *x } else { f32::NEG_INFINITY };
                }
            }
            Ok(y)
        }
    }
}
