//! What weights are learned by.

use super::Data;
use crate::QuantizeError;
use lowbit_kernels::Device;
use lowbit_models::tape::{Gradients, Kept, Parameters};
use lowbit_models::{Distillation, Model};
use std::rc::Rc;

/// Tokens that are in one pass on the CPU: what layers keep for their gradients grows with them.
const PASS: usize = 2048;
/// On a GPU more tokens take fewer launches, and products of more rows. Layers keep about so many values of the hidden size per token,
const KEPT_VALUES: usize = 48;
/// for which there is half of the memory that the models and what works on the logits leave. Where the device does not tell how much it
/// has, it is taken for this. What others use does not count: sums depend on how texts are put together, and a run is to be repeatable.
const GPU_MEMORY: usize = 8 << 30;
const LOGITS: usize = 12 << 30;
/// More tokens than this do not make products faster.
const GPU_PASS: usize = 1 << 15;
/// With fewer, blocks are computed twice instead: a pass decodes all weights, and sums up gradients of all weights, whatever its tokens. On an
/// H200 a step of Qwen3.5-9B's shapes took 2.4 times as long in passes of 512 tokens as in passes of 4096.
const FEW: usize = 1 << 12;

/// Windows of text, and how badly weights do on them.
pub trait Objective {
    /// How many windows there are to learn from.
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

/// The divergence of the student's next-token distribution from the teacher's, in nats.
pub struct WholeModel<'a> {
    distillation: Distillation<'a>,
    data: &'a Data,
    /// Tokens that go together through the models.
    per_pass: usize,
}

impl<'a> WholeModel<'a> {
    /// # Errors
    /// As [`Distillation::new`].
    pub fn new(
        [teacher, student]: [&'a Model; 2],
        data: &'a Data,
        temperature: f32,
    ) -> Result<Self, QuantizeError> {
        let pass = Pass::new([teacher, student], student.config().num_hidden_layers);
        let distillation = Distillation::new(student, teacher, temperature)?.keeping(pass.kept);
        Ok(Self { distillation, data, per_pass: pass.tokens })
    }

    /// Windows that go together through the model.
    fn passes<'w>(&self, windows: &'w [&'w [u32]]) -> impl Iterator<Item = &'w [&'w [u32]]> + use<'w> {
        let longest = windows.iter().map(|window| window.len()).max().unwrap_or(1);
        windows.chunks(windows_per_pass(self.per_pass, longest))
    }
}

impl Objective for WholeModel<'_> {
    fn windows(&self) -> usize {
        self.data.train().len()
    }

    fn gradients(&self, windows: &[usize], parameters: &Rc<Parameters>) -> Result<Lost, QuantizeError> {
        let windows: Vec<&[u32]> = windows.iter().map(|&i| &self.data.train()[i][..]).collect();
        let tokens: usize = windows.iter().map(|window| window.len()).sum();
        let (mut kl, mut gradients) = (0.0, Gradients::default());
        for pass in self.passes(&windows) {
            let distilled = self.distillation.gradients(pass, parameters, 1.0 / tokens as f32)?;
            kl += distilled.kl;
            gradients.merge(distilled.gradients)?;
        }
        Ok(Lost { loss: kl / tokens as f64, tokens: tokens as u64, gradients })
    }

    fn held_out(&self, parameters: &Rc<Parameters>) -> Result<f64, QuantizeError> {
        let (mut kl, mut tokens) = (0.0, 0);
        let windows: Vec<&[u32]> = self.data.held_out().iter().map(Vec::as_slice).collect();
        for pass in self.passes(&windows) {
            kl += self.distillation.kl(pass, parameters)?;
            tokens += pass.iter().map(|window| window.len()).sum::<usize>();
        }
        Ok(kl / tokens as f64)
    }
}

/// How many windows, the longest of so many tokens, are about this many tokens together.
pub fn windows_per_pass(tokens: usize, longest: usize) -> usize {
    (tokens / longest.max(1)).max(1)
}

/// What goes through a model at a time.
#[derive(Clone, Copy)]
pub struct Pass {
    /// Tokens.
    pub tokens: usize,
    /// What of them is kept for gradients.
    pub kept: Kept,
}

impl Pass {
    /// Of so many of the student's layers, where both models are on one device.
    pub fn new(models: [&Model; 2], layers: usize) -> Self {
        let [_, student] = models;
        let Device::Gpu(_) = student.device() else { return Self { tokens: PASS, kept: Kept::Ops } };
        let weights = models.map(|model| model.inventory().weights);
        let used: usize = weights.iter().flatten().map(|weight| weight.value.size_bytes()).sum();
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
