//! Learns back what rounding lost: a quantised model's scales, biases and codes, by distillation
//! from its source.
//!
//! Source: mlx-lm 0.32 `quant/dwq.py` (scales); EfficientQAT (Chen et al., 2024), end to end and
//! block by block (codes).

mod adam;
mod blocks;
mod data;
mod objective;
mod on_device;
mod pass;
mod run;
mod scales;
mod state;
mod targets;
mod teacher;
mod trainer;
mod weight;

pub use data::Data;
pub use state::{Found, Saving};
pub use targets::Targets;
pub(crate) use teacher::Teacher;
use weight::LearnedWeight;

use crate::QuantizeError;
use lowbit_formats::{FloatType, Format, Scales};
use lowbit_kernels::Device;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Weights that are learned, by name.
pub(crate) type Weights = BTreeMap<Arc<str>, LearnedWeight>;

/// The parts of a weight that learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learn {
    /// Scales and biases; codes stay as rounded.
    Scales,
    /// Codes too, through weights in f32 that are rounded in each step.
    Codes,
}

/// Options for learning.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LearnOptions {
    /// The parts of weights that learn.
    pub learn: Learn,
    /// True to learn codes one block at a time, each from the teacher's block, and then scales and
    /// biases of the whole model: for models whose latent weights do not fit in memory together.
    /// Codes of embeddings and of the output layer stay as rounded.
    pub by_block: bool,
    /// Steps, each of which sees [`Self::batch`] windows.
    pub steps: u32,
    /// Windows per step.
    pub batch: usize,
    /// Windows per step of a block that learns by itself, see [`Self::for_blocks`].
    pub block_batch: usize,
    /// Adam's highest learning rate while a block learns by itself; `None` for the [`default_rate`]
    /// of each weight's format.
    pub block_rate: Option<f32>,
    /// Adam's highest learning rate; `None` for the [`default_rate`] of each weight's format, or a
    /// tenth of it where blocks have learned before.
    pub rate: Option<f32>,
    /// The temperature: the logits of both models are divided by it.
    pub temperature: f32,
    /// The seed of the windows' order.
    pub seed: u64,
    /// Steps between validations. The weights of the best validation are kept.
    pub validate_every: u32,
    /// The type of both models' activations; `None` for the
    /// [device's](lowbit_models::Target::for_gradients).
    pub activations: Option<FloatType>,
    /// The file with the teacher's output for all windows, from which the student learns in the
    /// teacher's place. It is made if it does not exist, and only then the teacher is in memory.
    /// `None` to run the teacher in each step.
    pub targets: Option<Targets>,
}

/// On the demo model, from the same 480 windows at 3 bits, steps of 4, 2 and 1 windows left 0.0497,
/// 0.0484 and 0.0475 of a block's error.
const BLOCK_BATCH: usize = 1;

impl LearnOptions {
    /// 250 steps of 16 windows at a temperature of 2, validated 10 times.
    pub fn new(learn: Learn) -> Self {
        Self {
            learn,
            by_block: false,
            steps: 250,
            batch: 16,
            block_batch: BLOCK_BATCH,
            block_rate: None,
            rate: None,
            temperature: 2.0,
            seed: 0,
            validate_every: 25,
            activations: None,
            targets: None,
        }
    }

    /// The options for a block that learns by itself: as many windows as for the whole model, in
    /// steps of [`Self::block_batch`].
    #[must_use]
    pub fn for_blocks(&self) -> Self {
        let batch = self.block_batch.max(1);
        let windows = (self.batch as u64).saturating_mul(self.steps.into());
        let steps = windows.div_ceil(batch as u64).min(u32::MAX.into());
        let validate_every = u64::from(self.validate_every) * steps / u64::from(self.steps.max(1));
        let validate_every = validate_every.clamp(1, u32::MAX.into()) as u32;
        Self { steps: steps as u32, batch, validate_every, rate: self.block_rate, ..self.clone() }
    }

    /// # Errors
    /// [`QuantizeError::Learn`] for numbers with which nothing can learn, such as 0 steps.
    pub(crate) fn check(&self) -> Result<(), QuantizeError> {
        let refuse = |name, value: &dyn std::fmt::Display, want| {
            Err(QuantizeError::Learn(format!("{name} is {value}, but {want} is wanted")))
        };
        let positive = |value: f32| value > 0.0 && value.is_finite();
        let Self { steps, batch, block_batch, temperature, validate_every, .. } = self;
        let wrong = |rate: Option<f32>| rate.filter(|&rate| !positive(rate));
        match (wrong(self.rate), wrong(self.block_rate)) {
            _ if self.by_block && self.learn == Learn::Scales => {
                Err(QuantizeError::Learn("codes learn block by block, scales alone do not".into()))
            }
            _ if self.by_block && self.targets.is_some() => Err(QuantizeError::Learn(
                "a file of targets has the teacher's probabilities; learning block by block takes the states between its blocks, which it does not have"
                    .into(),
            )),
            _ if self.targets.as_ref().is_some_and(|targets| targets.top_k == 0) => {
                refuse("top_k of the targets", &0, "1 or more")
            }
            _ if *steps == 0 => refuse("steps", steps, "1 or more"),
            _ if *batch == 0 => refuse("batch", batch, "1 or more"),
            _ if *block_batch == 0 => refuse("block_batch", block_batch, "1 or more"),
            _ if *validate_every == 0 => refuse("validate_every", validate_every, "1 or more"),
            _ if !positive(*temperature) => refuse("temperature", temperature, "a finite number above 0"),
            (Some(rate), _) => refuse("rate", &rate, "a finite number above 0"),
            (_, Some(rate)) => refuse("block_rate", &rate, "a finite number above 0"),
            _ => Ok(()),
        }
    }
}

/// The highest learning rate for weights of a format: the best one on the demo model, whose weights
/// are about 0.06. The fewer codes, the farther they lie apart, and the longer steps they take.
/// Rates of GGML's types are from short runs; longer ones were not compared.
pub fn default_rate(learn: Learn, format: Format) -> f32 {
    let scheme = format.scheme();
    match (scheme.bits, scheme.scales, learn) {
        (..=2, _, Learn::Scales) => 2e-3,
        (..=2, _, Learn::Codes) => 1e-3,
        (3..=4, Scales::Super { .. } | Scales::SuperWithMinima { .. }, _) => 5e-5,
        (5, Scales::Super { .. } | Scales::SuperWithMinima { .. }, _) => 2e-5,
        (3..=4, ..) if format.unpack().is_some() => 1e-4,
        (6.., ..) if format.unpack().is_some() => 3e-6,
        // At 3e-4 250 steps ended where rounding was, and 1e-4 won back less.
        (4, _, Learn::Codes) => 2e-4,
        (3, _, Learn::Scales) => 5e-4,
        (3..=4, ..) => 3e-4,
        // Rounding lost so little that a step of that length would lose more.
        _ => 3e-5,
    }
}

/// A run of learning: data, options, device and saved state.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Learning<'a> {
    pub data: &'a Data,
    pub options: &'a LearnOptions,
    pub device: &'a Device,
    /// The file for the state from which an interrupted run goes on.
    pub saving: Option<Saving<'a>>,
}

impl Learning<'_> {
    /// Checks all that can be checked before anything is computed.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for numbers that nothing can be learned with, and for a state that
    /// must not be there; [`QuantizeError::File`] for a state and targets that are no regular
    /// files, or another's.
    pub(crate) fn check(&self) -> Result<(), QuantizeError> {
        self.options.check()?;
        self.options.targets.as_ref().map_or(Ok(()), Targets::check)?;
        self.saving.map_or(Ok(()), |saving| saving.resumes().map(drop))
    }
}

/// The progress of [`Recipe::run`](crate::Recipe::run), in this order.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// Windows whose gradients say how to share out a budget, and all.
    Budget(usize, usize),
    /// Windows whose targets are on the disk, and all.
    Targets(usize, usize),
    /// Tensors written, and all; once more when everything is on the disk. With learning, rounded
    /// tensors come before it, and what was learned after it.
    Tensors(usize, usize),
    /// A step of learning.
    Learning(&'a LearnProgress),
}

/// The progress of learning, after a step.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct LearnProgress {
    /// Steps done, those of blocks included.
    pub step: u32,
    pub steps: u32,
    /// While a block learns by itself: its number, from 1, and the number of blocks.
    pub block: Option<(usize, usize)>,
    /// The mean loss of the tokens of this step's windows: the divergence from the teacher, in
    /// nats, at [`LearnOptions::temperature`]; of a block, the squared error of a token's state as
    /// a share of the square of the teacher's.
    pub loss: f64,
    /// The loss of the held-out windows, if they were scored after this step.
    pub validation: Option<f64>,
    /// True if that loss was so bad that the weights went back to the best ones, and rates were
    /// halved.
    pub went_back: bool,
    /// Tokens learned from so far, those before an interruption included; `step_tokens` of them in
    /// this step.
    pub tokens: u64,
    pub step_tokens: u64,
}

/// The result of a block that learned by itself; losses as in [`LearnProgress::loss`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlockReport {
    /// The mean loss of the held-out tokens with the block as rounded, after the blocks before it
    /// had learned.
    pub before: f64,
    /// The same as learned: at most `before`.
    pub after: f64,
    /// The block's step after which it was `after`; 0 if rounding was best.
    pub best_step: u32,
    /// The number of times that weights went back to the best ones.
    pub went_back: u32,
}

/// The result of learning.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LearnReport {
    /// The mean divergence from the teacher on the held-out tokens, in nats, as rounded.
    pub before: f64,
    /// The same as written: at most `before`.
    pub after: f64,
    /// The results of blocks that learned by themselves, from the first to the last.
    pub blocks: Vec<BlockReport>,
    /// The divergence after blocks had learned, before the whole model did.
    pub after_blocks: Option<f64>,
    /// The whole model's step after which it was `after`; 0 if no step was better than the start.
    pub best_step: u32,
    /// Weights that learned.
    pub weights: usize,
    /// Names of weights without scales and biases to learn.
    pub skipped: Vec<String>,
    /// The number of times that weights went back to the best ones.
    pub went_back: u32,
}
