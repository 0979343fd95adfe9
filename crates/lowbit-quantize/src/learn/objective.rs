//! What weights are learned by.

use super::Data;
use crate::QuantizeError;
use lowbit_kernels::Device;
use lowbit_models::tape::{Gradients, Parameters};
use lowbit_models::{Distillation, Model};
use std::rc::Rc;

/// Tokens that are in one pass on the CPU: what layers keep for their gradients grows with them.
const PASS: usize = 2048;
/// On a GPU more tokens take fewer launches, as long as what is kept, about so many values of the hidden size per token and layer, fits into
/// so many bytes.
const KEPT_VALUES: usize = 64;
const KEPT_BYTES: usize = 24 << 30;

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
    student: &'a Model,
    distillation: Distillation<'a>,
    data: &'a Data,
}

impl<'a> WholeModel<'a> {
    /// # Errors
    /// As [`Distillation::new`].
    pub fn new(
        [teacher, student]: [&'a Model; 2],
        data: &'a Data,
        temperature: f32,
    ) -> Result<Self, QuantizeError> {
        let distillation = Distillation::new(student, teacher, temperature)?;
        Ok(Self { student, distillation, data })
    }

    /// Windows that go together through the model.
    fn passes<'w>(&self, windows: &'w [&'w [u32]]) -> impl Iterator<Item = &'w [&'w [u32]]> + use<'w> {
        let longest = windows.iter().map(|window| window.len()).max().unwrap_or(1);
        windows.chunks(windows_per_pass(self.student, self.student.config().num_hidden_layers, longest))
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

/// How many windows, the longest of so many tokens, go together through so many of the model's layers.
pub fn windows_per_pass(model: &Model, layers: usize, longest: usize) -> usize {
    let tokens = match model.device() {
        Device::Cpu(_) => PASS,
        Device::Gpu(_) => {
            let kept = KEPT_VALUES * size_of::<f32>() * model.config().hidden_size * layers;
            KEPT_BYTES / kept.max(1)
        }
    };
    (tokens / longest.max(1)).max(1)
}
