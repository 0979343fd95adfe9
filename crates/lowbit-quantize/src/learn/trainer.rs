use super::adam::{Step, rate};
use super::data::Order;
use super::{Data, LearnOptions, LearnProgress, LearnReport, LearnedWeight, default_rate};
use crate::QuantizeError;
use lowbit_models::tape::{Gradients, Parameters};
use lowbit_models::{Distillation, Model};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

/// Tokens that are in one pass: what a layer keeps for its gradients grows with them.
const PASS: usize = 2048;
/// A divergence this much worse than the best is no noise.
const DIVERGED: f64 = 2.0;

type Weights = BTreeMap<Arc<str>, LearnedWeight>;

/// Learns a student's weights.
pub struct Trainer<'a> {
    student: &'a Model,
    distillation: Distillation<'a>,
    data: &'a Data,
    options: &'a LearnOptions,
    weights: Weights,
    report: LearnReport,
}

impl<'a> Trainer<'a> {
    /// `original` gives a weight's values before they were rounded.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for options that nothing can be learned with and for a student without anything to learn; as
    /// [`Distillation::new`].
    pub fn new(
        [teacher, student]: [&'a Model; 2],
        data: &'a Data,
        options: &'a LearnOptions,
        original: impl Fn(&str) -> Result<Vec<f32>, QuantizeError>,
    ) -> Result<Self, QuantizeError> {
        options.check()?;
        let distillation = Distillation::new(student, teacher, options.temperature)?;
        let (mut weights, mut report) = (Weights::new(), LearnReport::default());
        for weight in student.inventory().weights {
            match LearnedWeight::new(&weight.value, options.learn, || original(&weight.name))? {
                Some(learned) => drop(weights.insert(weight.name, learned)),
                None => report.skipped.push(weight.name.to_string()),
            }
        }
        if weights.is_empty() {
            return Err(QuantizeError::Learn("no weight has scales and biases that can be learned".into()));
        }
        report.weights = weights.len();
        Ok(Self { student, distillation, data, options, weights, report })
    }

    /// Learns, and gives the best weights. `progress` is called after each step; `Break` stops.
    ///
    /// # Errors
    /// [`QuantizeError::Interrupted`]; as [`Distillation::gradients`].
    pub fn run(
        mut self,
        mut progress: impl FnMut(&LearnProgress) -> ControlFlow<()>,
    ) -> Result<(Weights, LearnReport), QuantizeError> {
        let LearnOptions { steps, seed, validate_every, .. } = *self.options;
        let mut order = Order::new(self.data.train().len(), seed);
        let (mut factor, mut tokens) = (1.0, 0);
        let mut best = (self.validate()?, self.weights.clone());
        (self.report.before, self.report.after) = (best.0, best.0);
        for step in 1..=steps {
            let windows: Vec<&[u32]> =
                (0..self.options.batch).map(|_| &self.data.train()[order.next()][..]).collect();
            tokens += windows.iter().map(|window| window.len() as u64).sum::<u64>();
            let loss = self.step(&windows, step, factor)?;
            let mut done = LearnProgress { step, steps, loss, validation: None, went_back: false, tokens };
            if step.is_multiple_of(validate_every) || step == steps {
                let kl = self.validate()?;
                done.validation = Some(kl);
                if kl < best.0 {
                    best = (kl, self.weights.clone());
                    self.report.best_step = step;
                } else if kl.is_nan() || kl > DIVERGED * best.0 {
                    self.weights.clone_from(&best.1);
                    factor *= 0.5;
                    self.report.went_back += 1;
                    done.went_back = true;
                }
            }
            if progress(&done).is_break() {
                return Err(QuantizeError::Interrupted);
            }
        }
        self.report.after = best.0;
        Ok((best.1, self.report))
    }

    /// One step; the mean divergence of the windows' tokens before it.
    fn step(&mut self, windows: &[&[u32]], step: u32, factor: f32) -> Result<f64, QuantizeError> {
        let parameters = self.parameters()?;
        let tokens: usize = windows.iter().map(|window| window.len()).sum();
        let (mut kl, mut sum) = (0.0, Gradients::default());
        for pass in passes(windows) {
            let distilled = self.distillation.gradients(pass, &parameters, 1.0 / tokens as f32)?;
            kl += distilled.kl;
            sum.merge(distilled.gradients)?;
        }
        drop(parameters);
        let LearnOptions { learn, steps, rate: given, .. } = *self.options;
        let warmup = (steps / 20).min(steps - 1);
        for (name, weight) in &mut self.weights {
            let Some(gradient) = sum.parameters().get(name) else { continue };
            let peak = given.unwrap_or_else(|| default_rate(learn, weight.format()));
            weight.step(gradient, Step { rate: factor * rate(peak, step, warmup, steps), count: step })?;
        }
        Ok(kl / tokens as f64)
    }

    /// The mean divergence of the tokens held out.
    fn validate(&self) -> Result<f64, QuantizeError> {
        let (parameters, mut kl, mut tokens) = (self.parameters()?, 0.0, 0);
        let windows: Vec<&[u32]> = self.data.held_out().iter().map(Vec::as_slice).collect();
        for pass in passes(&windows) {
            kl += self.distillation.kl(pass, &parameters)?;
            tokens += pass.iter().map(|window| window.len()).sum::<usize>();
        }
        Ok(kl / tokens as f64)
    }

    fn parameters(&self) -> Result<Rc<Parameters>, QuantizeError> {
        let device = self.student.device();
        let of = |(name, weight): (&Arc<str>, &LearnedWeight)| Ok((name.clone(), weight.parameter(device)?));
        self.weights.iter().map(of).collect::<Result<_, QuantizeError>>().map(Rc::new)
    }
}

/// Windows that go together through the model.
fn passes<'w>(windows: &'w [&'w [u32]]) -> impl Iterator<Item = &'w [&'w [u32]]> {
    let longest = windows.iter().map(|window| window.len()).max().unwrap_or(1);
    windows.chunks((PASS / longest.max(1)).max(1))
}
