//! The objectives of learning.

use super::Data;
use super::pass::{Pass, windows_per_pass};
use super::targets::TargetsFile;
use crate::QuantizeError;
use lowbit_models::tape::{Gradients, Parameters};
use lowbit_models::{Distillation, Distilled, Model, TargetDistillation};
use std::rc::Rc;

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
