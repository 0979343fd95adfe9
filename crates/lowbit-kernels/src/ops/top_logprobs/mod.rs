//! Log-probabilities of drawn tokens and of the likeliest ones.

#[cfg(feature = "gpu")]
pub(crate) mod gpu;
mod result;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};
pub use result::{LogprobRows, RowLogprobs};

const CHECK: Check = Check("top_logprobs");

/// For each row r, `ln softmax(logits[r])` of token `tokens[r]` and of the `top` likeliest tokens:
///
/// ```text
/// m = max_i logits[r, i]    s = sum_i exp(logits[r, i] - m)
/// logprob(i) = (logits[r, i] - m) - ln s
/// ```
///
/// The likeliest come first, lower ids first where logits are equal (0 is above -0); a row has no
/// more of them than V. A token that is none of the logits', as [`sample_rows`](super::sample_rows)
/// leaves it where nothing could be drawn, has NaN.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | logits | `[n, V]` | f32, f16, bf16 |
/// | tokens | `[n]` | u32 |
///
/// Differences of logits are f32. On the CPU exponentials, their sum and its logarithm are f64; on
/// a GPU the first two are f32, the sum in parts. A GPU only records the work; the result,
/// `2 top + 2` words for each row, comes when it is waited for. Logits that are NaN, or -inf
/// altogether, have no log-probabilities: the numbers are then any, and sampling reports the
/// logits.
///
/// Source: OpenAI's `top_logprobs`; vLLM 0.11 `gather_logprobs`.
///
/// # Errors
/// [`KernelError::Shape`] and [`KernelError::DType`] for operands that are not as the table says,
/// and for no logits; [`KernelError::Device`] for operands on two devices; [`KernelError::Gpu`].
pub fn top_logprobs(logits: &Tensor, tokens: &Tensor, top: usize) -> Result<LogprobRows, KernelError> {
    let [rows, count] = CHECK.dims("logits", logits, "[n, V]")?;
    let dtype = CHECK.float("logits", logits)?;
    if logits.is_empty() {
        return Err(CHECK.shape_error("logits", logits, "one row and one logit at least are wanted".into()));
    }
    CHECK.shape("tokens", tokens, &[rows], || format!("logits {:?}", logits.shape()))?;
    CHECK.dtype("tokens", tokens, lowbit_formats::DType::U32)?;
    CHECK.same_device("tokens", tokens.device(), logits.device())?;
    let top = top.min(count);
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(gpu, (logits, dtype), tokens, top),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let _ = dtype;
            let logits = CHECK.widened("logits", logits)?;
            let rows = logits.as_slice::<f32>()?.chunks_exact(count).zip(tokens.as_slice::<u32>()?);
            Ok(LogprobRows::here(rows.map(|(row, &id)| RowLogprobs::new(row, id, top)).collect()))
        }
    }
}
