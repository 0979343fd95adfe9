//! Drawing the next token.

mod batch;
mod bench;
pub(crate) mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod kind;
mod next;
#[cfg(test)]
mod peer;
mod philox;
pub(crate) mod reference;
mod rows;
#[cfg(test)]
mod rows_tests;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};
pub use batch::{DecodeBatch, DrawnRows, RowText};
pub use kind::SampleKind;
pub use next::{DecodeState, Drawn, sample_next};
pub use rows::sample_rows;

/// Options of [`sample`]; the default is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleParams {
    /// Divides the logits; at 0 the greatest is taken.
    pub temperature: f32,
    /// Keep this many of the most likely; 0 keeps all.
    pub top_k: usize,
    /// Keep the most likely until they have this probability together; 1 keeps all, 0 the most
    /// likely alone.
    pub top_p: f32,
    /// Keep what has at least this share of the most likely one's probability; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive and multiplies the negative logits of tokens in the history; 1 changes
    /// nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the history, once each; 0 changes nothing.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the history as often as they are there; 0 changes
    /// nothing.
    pub frequency_penalty: f32,
    /// With the step, all that the random number depends on.
    pub seed: u64,
}

impl Default for SampleParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl SampleParams {
    /// That every parameter is in its range: known before a model has run.
    ///
    /// # Errors
    /// [`KernelError::Value`].
    pub fn validate(&self) -> Result<(), KernelError> {
        self.check(Check("sample"))
    }

    fn check(&self, check: Check) -> Result<(), KernelError> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(check.value("temperature", self.temperature, "a finite number from 0 is wanted"));
        }
        if !(self.top_p >= 0.0 && self.top_p <= 1.0) {
            return Err(check.value(
                "top_p",
                self.top_p,
                "0 to 1 is wanted (1 keeps all, 0 the most likely alone)",
            ));
        }
        if !(self.min_p >= 0.0 && self.min_p <= 1.0) {
            return Err(check.value("min_p", self.min_p, "0 to 1 is wanted (0 keeps all)"));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let want = "a positive finite number is wanted (1 changes nothing)";
            return Err(check.value("repetition_penalty", self.repetition_penalty, want));
        }
        for (name, penalty) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            if !penalty.is_finite() {
                return Err(check.value(name, penalty, "a finite number is wanted (0 changes nothing)"));
            }
        }
        Ok(())
    }

    /// True if the history changes logits.
    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// Draws a token id from `softmax(logits)`, penalised, filtered and cooled in mlx-lm's order:
///
/// 1. Penalties: each logit `l` whose id is `n` times in `history`, `n > 0`, becomes
///    `r(l) - n frequency_penalty - presence_penalty`, where `r(l)` is `l repetition_penalty` below
///    zero and `l / repetition_penalty` from there on: each once, however large `n` is.
/// 2. `p = softmax(logits)`, at temperature 1. Kept are the ids that pass all of: *top-p*: those
///    more likely have less than `top_p` together (ids that tie with the last one kept stay);
///    *min-p*: `p >= min_p max(p)`; *top-k*: the `top_k` most likely, of those that tie the lowest
///    ids.
/// 3. Temperature: of those kept, id `i` is drawn with probability proportional to
///    `exp(logits[i] / temperature)`: in the order of ids, the first at which the sum of
///    probabilities passes the random number.
///
/// At temperature 0 it is the greatest penalised logit, the lowest id of those that tie.
/// (llama.cpp's default chain takes top-k first, so that its top-p counts the share of what top-k
/// left.)
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | logits | `[V]` (or `[1, V]`, ..) | f32, f16, bf16 |
/// | history | ids less than V | |
///
/// The random number is Philox4x32-10 of the counter `step` and the key `seed`: the same seed and
/// step draw the same token whatever was drawn before. Filters are decided on f32 logits;
/// probabilities are f32 exponentials in units of 2^-40 of the greatest, whose sums are integers
/// and exact, so that no order of summation changes the choice. Logits of -inf are never drawn.
///
/// Source: mlx-lm 0.32.2 `sample_utils` (`make_sampler`, `make_logits_processors`); the penalties
/// are also those of llama.cpp's `llama_sampler_init_penalties`.
///
/// # Errors
/// [`KernelError::Shape`] for no logits or several rows; [`KernelError::Value`] for another dtype,
/// a parameter outside its range, logits that are NaN or infinite, or -inf altogether;
/// [`KernelError::Id`] for a history beyond V.
pub fn sample(
    logits: &Tensor,
    history: &[u32],
    params: &SampleParams,
    step: u64,
) -> Result<u32, KernelError> {
    let check = Check("sample");
    params.check(check)?;
    one_row(check, logits)?;
    let count = logits.len();
    if let Some(index) = history.iter().position(|&id| id as usize >= count) {
        return Err(KernelError::Id { op: "sample", operand: "history", index, id: history[index], count });
    }
    let logits = check.widened("logits", logits)?;
    match logits.device() {
        Device::Gpu(gpu) => Err(check.unsupported(gpu)),
        Device::Cpu(cpu) => {
            cpu::sample(check, cpu, logits.as_slice()?, history, params, philox::word(step, params.seed))
        }
    }
}

fn one_row(check: Check, logits: &Tensor) -> Result<(), KernelError> {
    if logits.is_empty() || logits.len() != logits.shape().last().copied().unwrap_or(0) {
        return Err(check.shape_error("logits", logits, "one row [V] is wanted".into()));
    }
    Ok(())
}
