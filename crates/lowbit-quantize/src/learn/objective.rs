//! The objectives of learning.

use super::Data;
use super::targets::TargetsFile;
use crate::QuantizeError;
use lowbit_kernels::Device;
use lowbit_models::tape::{Gradients, Kept, Parameters};
use lowbit_models::{Distillation, Distilled, Model, TargetDistillation};
use std::rc::Rc;

/// Tokens that are in one pass on the CPU: what layers keep for their gradients grows with them.
const PASS: usize = 2048;
/// On a GPU more tokens take fewer launches, and products of more rows. Layers keep about so many
/// values of the hidden size per token,
const KEPT_VALUES: usize = 48;
/// for which there is half of the memory that the models and what works on the logits leave. Where
/// the device does not tell how much it has, it is taken for this. Memory that others use does not
/// count: sums depend on how texts are put together, and a run must be repeatable.
const GPU_MEMORY: usize = 8 << 30;
const LOGITS: usize = 12 << 30;
/// More tokens than this do not make products faster.
const GPU_PASS: usize = 1 << 15;
/// With fewer, blocks are computed twice instead: a pass decodes all weights, and sums up gradients
/// of all weights, whatever its tokens. On an H200 a step of Qwen3.5-9B's shapes took 2.4 times as
/// long in passes of 512 tokens as in passes of 4096.
const FEW: usize = 1 << 12;

/// Windows of text, and how badly weights do on them.
pub trait Objective {
    /// The number of windows to learn from.
    fn windows(&self) -> usize;

    /// The loss of these windows' tokens and its gradients.
    ///
    /// # Errors
    /// Those of the models' passes.
    fn gradients(&self, windows: &[usize], parameters: &Rc<Parameters>) -> Result<Lost, QuantizeError>;

    /// The mean loss of the tokens held out.
    ///
    /// # Errors
    /// Those of the models' passes.
    fn held_out(&self, parameters: &Rc<Parameters>) -> Result<f64, QuantizeError>;
}

/// The mean loss of some tokens, and its gradients.
pub struct Lost {
    pub loss: f64,
    pub tokens: u64,
    pub gradients: Gradients,
}

/// The teacher that the student learns from.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    Teacher(&'a Model),
    /// The teacher's targets, on the disk.
    Targets(&'a TargetsFile),
}

/// The divergence of the student's next-token distribution from the teacher's, in nats.
pub struct WholeModel<'a> {
    distillation: FromSource<'a>,
    data: &'a Data,
    /// Tokens that go together through the models.
    per_pass: usize,
}

enum FromSource<'a> {
    Teacher(Distillation<'a>),
    Targets(TargetDistillation<'a>, &'a TargetsFile, &'a Model),
}

impl<'a> WholeModel<'a> {
    /// # Errors
    /// [`ModelError::Vocabulary`](lowbit_models::ModelError::Vocabulary) where the student's is not
    /// that of what it learns from.
    pub fn new(
        source: Source<'a>,
        student: &'a Model,
        data: &'a Data,
        temperature: f32,
    ) -> Result<Self, QuantizeError> {
        let layers = student.config().num_hidden_layers;
        let (distillation, pass) = match source {
            Source::Teacher(teacher) => {
                let pass = Pass::new(&[teacher], student, layers);
                let distillation = Distillation::new(student, teacher, temperature)?.keeping(pass.kept);
                (FromSource::Teacher(distillation), pass)
            }
            Source::Targets(targets) => {
                targets.check_vocabulary(student)?;
                let pass = Pass::new(&[], student, layers);
                let distillation = TargetDistillation::new(student, temperature).keeping(pass.kept);
                (FromSource::Targets(distillation, targets, student), pass)
            }
        };
        Ok(Self { distillation, data, per_pass: pass.tokens })
    }

    /// A window to learn from, or behind these one that is held out.
    fn window(&self, index: usize) -> &'a [u32] {
        let train = self.data.train();
        train.get(index).unwrap_or_else(|| &self.data.held_out()[index - train.len()])
    }

    /// Calls `f` with the windows that go together through the model, and their tokens.
    /// Returns how many tokens all have.
    fn each_pass(
        &self,
        windows: &[usize],
        mut f: impl FnMut(&[usize], &[&[u32]]) -> Result<(), QuantizeError>,
    ) -> Result<usize, QuantizeError> {
        let longest = windows.iter().map(|&window| self.window(window).len()).max().unwrap_or(1);
        for pass in windows.chunks(windows_per_pass(self.per_pass, longest)) {
            let tokens: Vec<&[u32]> = pass.iter().map(|&window| self.window(window)).collect();
            f(pass, &tokens)?;
        }
        Ok(windows.iter().map(|&window| self.window(window).len()).sum())
    }
}

impl FromSource<'_> {
    fn gradients(
        &self,
        windows: &[usize],
        batch: &[&[u32]],
        parameters: &Rc<Parameters>,
        dkl: f32,
    ) -> Result<Distilled, QuantizeError> {
        Ok(match self {
            Self::Teacher(distillation) => distillation.gradients(batch, parameters, dkl)?,
            Self::Targets(distillation, targets, student) => {
                let targets = targets.read(windows, student.host())?.to_device(student.device())?;
                distillation.gradients((batch, &targets), parameters, dkl)?
            }
        })
    }

    fn kl(
        &self,
        windows: &[usize],
        batch: &[&[u32]],
        parameters: &Rc<Parameters>,
    ) -> Result<f64, QuantizeError> {
        Ok(match self {
            Self::Teacher(distillation) => distillation.kl(batch, parameters)?,
            Self::Targets(distillation, targets, student) => {
                let targets = targets.read(windows, student.host())?.to_device(student.device())?;
                distillation.kl((batch, &targets), parameters)?
            }
        })
    }
}

impl Objective for WholeModel<'_> {
    fn windows(&self) -> usize {
        self.data.train().len()
    }

    fn gradients(&self, windows: &[usize], parameters: &Rc<Parameters>) -> Result<Lost, QuantizeError> {
        let tokens: usize = windows.iter().map(|&window| self.window(window).len()).sum();
        let (mut kl, mut gradients) = (0.0, Gradients::default());
        self.each_pass(windows, |pass, batch| {
            let distilled = self.distillation.gradients(pass, batch, parameters, 1.0 / tokens as f32)?;
            kl += distilled.kl;
            Ok(gradients.merge(distilled.gradients)?)
        })?;
        Ok(Lost { loss: kl / tokens as f64, tokens: tokens as u64, gradients })
    }

    fn held_out(&self, parameters: &Rc<Parameters>) -> Result<f64, QuantizeError> {
        let (mut kl, train) = (0.0, self.data.train().len());
        let windows: Vec<usize> = (train..train + self.data.held_out().len()).collect();
        let tokens = self.each_pass(&windows, |pass, batch| {
            kl += self.distillation.kl(pass, batch, parameters)?;
            Ok(())
        })?;
        Ok(kl / tokens as f64)
    }
}

/// The number of windows that have about this many tokens together, if the longest has `longest`.
pub fn windows_per_pass(tokens: usize, longest: usize) -> usize {
    (tokens / longest.max(1)).max(1)
}

/// The tokens that go through a model at a time.
#[derive(Clone, Copy)]
pub struct Pass {
    /// Tokens.
    pub tokens: usize,
    /// The part of a pass that is kept for gradients.
    pub kept: Kept,
}

impl Pass {
    /// Of so many of the student's layers, where it and these others are on one device.
    pub fn new(others: &[&Model], student: &Model, layers: usize) -> Self {
        let Device::Gpu(_) = student.device() else { return Self { tokens: PASS, kept: Kept::Ops } };
        let weights = others.iter().chain([&student]).map(|model| model.inventory().weights);
        let used: usize = weights.flatten().map(|weight| weight.value.size_bytes()).sum();
        let left = student.device().gpu_memory().unwrap_or(GPU_MEMORY).saturating_sub(used);
        let free = left.saturating_sub(LOGITS).max(left / 4) / 2;
        let (hidden, size) = (student.config().hidden_size, student.activations().size());
        // The stream, which is f32, and what the layer before adds to it.
        let (layer, between) = (KEPT_VALUES * size * hidden, (size_of::<f32>() + size) * hidden);
        let tokens = |bytes: usize| (free / bytes.max(1)).min(GPU_PASS);
        match tokens(layer * layers) {
            few if few < FEW => Self { tokens: tokens(layer + between * layers), kept: Kept::Blocks },
            tokens => Self { tokens, kept: Kept::Ops },
        }
    }
}
