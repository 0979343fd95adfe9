//! Learning what rounding lost: a quantised model's scales, biases and codes by distillation from the model that it was made from.
//!
//! Source: mlx-lm 0.32 `quant/dwq.py` (scales); EfficientQAT (Chen et al., 2024), end to end and block by block (codes).

mod adam;
mod blocks;
mod data;
mod objective;
mod on_device;
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

/// What is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learn {
    /// Scales and biases; codes stay as they were rounded.
    Scales,
    /// Codes too, through weights in f32 that are rounded in each step.
    Codes,
}

/// How a model learns.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LearnOptions {
    /// What is learned.
    pub learn: Learn,
    /// Codes one block at a time, each from the teacher's block, and then scales and biases of the whole model: for models whose latent
    /// weights do not fit in memory together. Codes of embeddings and of the output layer stay as they were rounded.
    pub by_block: bool,
    /// Steps, each of which sees [`Self::batch`] windows.
    pub steps: u32,
    /// Windows per step.
    pub batch: usize,
    /// Windows per step of a block that learns by itself, see [`Self::for_blocks`].
    pub block_batch: usize,
    /// The highest rate of Adam's while a block learns by itself; `None` for each weight's own, see [`default_rate`].
    pub block_rate: Option<f32>,
    /// The highest rate of Adam's; `None` for each weight's own: [`default_rate`], or a tenth of it where blocks have learned before.
    pub rate: Option<f32>,
    /// The logits of both models are divided by this.
    pub temperature: f32,
    /// Of the order of the windows.
    pub seed: u64,
    /// Steps between validations, of which the best is kept.
    pub validate_every: u32,
    /// The type of both models' activations; `None` for the [device's](lowbit_models::Target::for_gradients).
    pub activations: Option<FloatType>,
    /// The file with what the teacher says of all windows, which the student then learns from in the teacher's place. It is made where it
    /// is not there; the teacher is in memory only while it is. `None` to ask the teacher in each step.
    pub targets: Option<Targets>,
}

/// On the demo model, from the same 480 windows at 3 bits, steps of 4, 2 and 1 windows left 0.0497, 0.0484 and 0.0475 of a block's error.
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

    /// How a block learns by itself: from as many windows as the whole model, in steps of [`Self::block_batch`].
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
    /// [`QuantizeError::Learn`] for numbers that nothing can be learned with.
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

/// The highest rate for weights of a format: what was best on the demo model, whose weights are about 0.06. Few codes lie far apart, and
/// take longer steps. Those of GGML's types are from short runs; longer ones were not compared.
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

/// What is learned from what, and where.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Learning<'a> {
    pub data: &'a Data,
    pub options: &'a LearnOptions,
    pub device: &'a Device,
    /// Where the state is saved that an interrupted run goes on from.
    pub saving: Option<Saving<'a>>,
}

impl Learning<'_> {
    /// Checks all that can be checked before anything is computed.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for numbers that nothing can be learned with, and for a state that must not be there;
    /// [`QuantizeError::File`] for a state and targets that are no regular files, or another's.
    pub(crate) fn check(&self) -> Result<(), QuantizeError> {
        self.options.check()?;
        self.options.targets.as_ref().map_or(Ok(()), Targets::check)?;
        self.saving.map_or(Ok(()), |saving| saving.resumes().map(drop))
    }
}

/// What [`quantize_and_learn`](crate::quantize_and_learn) and [`quantize_to_gguf_and_learn`](crate::quantize_to_gguf_and_learn) say while they work.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// Tensors written, and all.
    Tensors(usize, usize),
    /// Windows of which the teacher's targets are on the disk, and all.
    Targets(usize, usize),
    /// A step of learning.
    Learning(&'a LearnProgress),
}

/// Where learning is.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct LearnProgress {
    /// Steps done, of all, those of blocks included.
    pub step: u32,
    pub steps: u32,
    /// The block that learns, from 1, and how many there are, while one learns by itself.
    pub block: Option<(usize, usize)>,
    /// The mean loss of the tokens of this step's windows: the divergence from the teacher, in nats, at [`LearnOptions::temperature`]; of a
    /// block, the squared error of a token's state as a share of the square of the teacher's.
    pub loss: f64,
    /// That of the windows held out, if they were scored after this step.
    pub validation: Option<f64>,
    /// Whether that was so bad that the weights went back to the best ones, and rates were halved.
    pub went_back: bool,
    /// Tokens learned from so far, also before the run was interrupted, and in this step.
    pub tokens: u64,
    pub step_tokens: u64,
}

/// What a block learned by itself: losses as in [`LearnProgress::loss`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlockReport {
    /// The mean loss of the tokens held out, as the block was rounded and the blocks before it had learned,
    pub before: f64,
    /// and as it learned. Never more.
    pub after: f64,
    /// The step of the block's own after which it was this; 0 if rounding was the best.
    pub best_step: u32,
    /// How often weights went back.
    pub went_back: u32,
}

/// What was learned.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LearnReport {
    /// The mean divergence of the tokens held out, in nats, as weights were rounded,
    pub before: f64,
    /// and as they are written. Never more.
    pub after: f64,
    /// What blocks learned by themselves, from the first to the last.
    pub blocks: Vec<BlockReport>,
    /// The divergence then, before the whole model learned.
    pub after_blocks: Option<f64>,
    /// The step of the whole model's after which it was `after`; 0 if that is how it began.
    pub best_step: u32,
    /// Weights that learned.
    pub weights: usize,
    /// Names of those that have no scales and biases to learn.
    pub skipped: Vec<String>,
    /// How often weights went back.
    pub went_back: u32,
}
