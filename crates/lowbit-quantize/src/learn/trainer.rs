use super::adam::{Step, rate};
use super::data::Order;
use super::state::Identity;
use super::weight::Packed;
use super::{Data, LearnOptions, LearnProgress, LearnReport, LearnedWeight, Saving, default_rate};
use crate::{QuantizeError, threads};
use lowbit_kernels::{Device, KernelError, QuantizedTensor};
use lowbit_models::tape::{Gradients, Named, Parameters};
use lowbit_models::{Distillation, Model};
use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

/// Tokens that are in one pass on the CPU: what layers keep for their gradients grows with them.
const PASS: usize = 2048;
/// On a GPU more tokens take fewer launches, and products of more rows. Layers keep about so many values of the hidden size per token,
const KEPT_VALUES: usize = 48;
/// for which there is half of the memory that the models and what works on the logits leave. Where the device does not tell how much it
/// has, it is taken for this. What others use does not count: sums depend on how texts are put together, and a run is to be repeatable.
const GPU_MEMORY: usize = 8 << 30;
const LOGITS: usize = 12 << 30;
/// A divergence this much worse than the best is no noise.
const DIVERGED: f64 = 2.0;

/// Those that are learned, by name.
pub(super) type Weights = BTreeMap<Arc<str>, LearnedWeight>;

/// Where a run is after a step: with its weights all that the steps to come depend on.
pub(super) struct Position {
    pub step: u32,
    pub tokens: u64,
    /// What rates are multiplied with, because learning diverged.
    pub factor: f32,
    pub order: Order,
    /// The lowest divergence of the tokens held out, and the weights then.
    pub best: (f64, Weights),
    pub best_step: u32,
    /// That of the weights as they were rounded.
    pub before: f64,
    pub went_back: u32,
}

/// Learns a student's weights.
pub struct Trainer<'a> {
    student: &'a Model,
    distillation: Distillation<'a>,
    data: &'a Data,
    options: &'a LearnOptions,
    weights: Weights,
    /// Tokens that are in one pass.
    pass_tokens: usize,
    /// The student's, as they were rounded, where it computes.
    rounded: HashMap<Arc<str>, QuantizedTensor>,
    report: LearnReport,
}

impl<'a> Trainer<'a> {
    /// `weights` are the student's, in the host's memory; `original` gives a weight's values before they were rounded.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for options that nothing can be learned with and for a student without anything to learn; as
    /// [`Distillation::new`].
    pub fn new(
        [teacher, student]: [&'a Model; 2],
        rounded: &[Named<QuantizedTensor>],
        data: &'a Data,
        options: &'a LearnOptions,
        original: impl Fn(&str) -> Result<Vec<f32>, QuantizeError>,
    ) -> Result<Self, QuantizeError> {
        options.check()?;
        let distillation = Distillation::new(student, teacher, options.temperature)?;
        let (mut weights, mut report) = (Weights::new(), LearnReport::default());
        for weight in rounded {
            match LearnedWeight::new(&weight.value, options.learn, || original(&weight.name))? {
                Some(learned) => drop(weights.insert(weight.name.clone(), learned)),
                None => report.skipped.push(weight.name.to_string()),
            }
        }
        if weights.is_empty() {
            return Err(QuantizeError::Learn("no weight has scales and biases that can be learned".into()));
        }
        report.weights = weights.len();
        let of_student = student.inventory().weights.into_iter();
        let rounded = of_student.map(|weight| (weight.name, weight.value)).collect();
        let pass_tokens = pass_tokens([teacher, student]);
        Ok(Self { student, distillation, data, options, weights, pass_tokens, rounded, report })
    }

    /// Learns, and gives the best weights. `progress` is called after each step; `Break` stops, once the state is saved.
    ///
    /// # Errors
    /// [`QuantizeError::Interrupted`]; as [`Distillation::gradients`]; those of the state, if one is saved.
    pub fn run(
        mut self,
        saving: Option<Saving<'_>>,
        mut progress: impl FnMut(&LearnProgress) -> ControlFlow<()>,
    ) -> Result<(Weights, LearnReport), QuantizeError> {
        let identity = Identity::new(self.options, self.data, &self.weights);
        let saved = saving.map(|saving| saving.load(&identity, &mut self.weights)).transpose()?.flatten();
        let mut position = saved.map_or_else(|| self.start(), Ok)?;
        while position.step < self.options.steps {
            let done = self.advance(&mut position)?;
            let stop = progress(&done).is_break();
            if let Some(saving) = saving.filter(|_| stop || done.validation.is_some()) {
                saving.save(&identity, &self.weights, &position)?;
            }
            if stop {
                return Err(QuantizeError::Interrupted);
            }
        }
        let Position { best, best_step, before, went_back, .. } = position;
        Ok((best.1, LearnReport { before, after: best.0, best_step, went_back, ..self.report }))
    }

    /// Before the first step.
    fn start(&self) -> Result<Position, QuantizeError> {
        let before = self.validate()?;
        Ok(Position {
            step: 0,
            tokens: 0,
            factor: 1.0,
            order: Order::new(self.data.train().len(), self.options.seed),
            best: (before, self.weights.clone()),
            best_step: 0,
            before,
            went_back: 0,
        })
    }

    /// Takes a step, and validates where that is due.
    fn advance(&mut self, position: &mut Position) -> Result<LearnProgress, QuantizeError> {
        let LearnOptions { steps, batch, validate_every, .. } = *self.options;
        let windows: Vec<&[u32]> =
            (0..batch).map(|_| &self.data.train()[position.order.next()][..]).collect();
        let step_tokens = windows.iter().map(|window| window.len() as u64).sum::<u64>();
        position.step += 1;
        position.tokens += step_tokens;
        let (step, tokens) = (position.step, position.tokens);
        let loss = self.step(&windows, step, position.factor)?;
        let mut done =
            LearnProgress { step, steps, loss, validation: None, went_back: false, tokens, step_tokens };
        if step.is_multiple_of(validate_every) || step == steps {
            let kl = self.validate()?;
            done.validation = Some(kl);
            if kl < position.best.0 {
                position.best = (kl, self.weights.clone());
                position.best_step = step;
            } else if kl.is_nan() || kl > DIVERGED * position.best.0 {
                self.weights.clone_from(&position.best.1);
                position.factor *= 0.5;
                position.went_back += 1;
                done.went_back = true;
            }
        }
        Ok(done)
    }

    /// One step; the mean divergence of the windows' tokens before it.
    fn step(&mut self, windows: &[&[u32]], step: u32, factor: f32) -> Result<f64, QuantizeError> {
        let parameters = self.parameters()?;
        let tokens: usize = windows.iter().map(|window| window.len()).sum();
        let (mut kl, mut sum) = (0.0, Gradients::default());
        for pass in self.passes(windows) {
            let distilled = self.distillation.gradients(pass, &parameters, 1.0 / tokens as f32)?;
            kl += distilled.kl;
            sum.merge(distilled.gradients)?;
        }
        drop(parameters);
        let LearnOptions { learn, steps, rate: given, .. } = *self.options;
        let warmup = (steps / 20).min(steps - 1);
        let (threads, mut changes) = (self.threads(), vec![]);
        for (name, weight) in &mut self.weights {
            let Some(gradient) = sum.parameters().get(name) else { continue };
            let peak = given.unwrap_or_else(|| default_rate(learn, weight.format()));
            let step = Step { rate: factor * rate(peak, step, warmup, steps), count: step };
            changes.push((weight, gradient.to_device(self.student.host())?, step));
        }
        threads::try_map(threads, changes, |(weight, gradient, step)| weight.step(&gradient, step))?;
        Ok(kl / tokens as f64)
    }

    /// The mean divergence of the tokens held out.
    fn validate(&self) -> Result<f64, QuantizeError> {
        let (parameters, mut kl, mut tokens) = (self.parameters()?, 0.0, 0);
        let windows: Vec<&[u32]> = self.data.held_out().iter().map(Vec::as_slice).collect();
        for pass in self.passes(&windows) {
            kl += self.distillation.kl(pass, &parameters)?;
            tokens += pass.iter().map(|window| window.len()).sum::<usize>();
        }
        Ok(kl / tokens as f64)
    }

    /// Threads of the student's host.
    fn threads(&self) -> usize {
        match self.student.host() {
            Device::Cpu(cpu) => cpu.threads(),
            Device::Gpu(_) => 1,
        }
    }

    fn parameters(&self) -> Result<Rc<Parameters>, QuantizeError> {
        let host = self.student.host();
        let weights = self.weights.iter().collect();
        let packed =
            threads::try_map(self.threads(), weights, |(name, weight): (&Arc<str>, &LearnedWeight)| {
                Ok::<_, KernelError>((name.clone(), weight.packed(host)?))
            })?;
        let of = |(name, packed): (Arc<str>, Packed)| {
            let parameter = packed.parameter(&self.rounded[&name])?;
            Ok((name, parameter))
        };
        packed.into_iter().map(of).collect::<Result<_, QuantizeError>>().map(Rc::new)
    }

    /// Windows that go together through the model.
    fn passes<'w>(&self, windows: &'w [&'w [u32]]) -> impl Iterator<Item = &'w [&'w [u32]]> + use<'w> {
        let tokens = self.pass_tokens;
        let longest = windows.iter().map(|window| window.len()).max().unwrap_or(1);
        windows.chunks((tokens / longest.max(1)).max(1))
    }
}

/// Tokens that go together through the models.
fn pass_tokens(models: [&Model; 2]) -> usize {
    let [_, student] = models;
    let Device::Gpu(_) = student.device() else { return PASS };
    let weights = models.map(|model| model.inventory().weights);
    let used: usize = weights.iter().flatten().map(|weight| weight.value.size_bytes()).sum();
    let left = student.device().gpu_memory().unwrap_or(GPU_MEMORY).saturating_sub(used);
    let config = student.config();
    let kept = KEPT_VALUES * student.activations().size() * config.hidden_size * config.num_hidden_layers;
    left.saturating_sub(LOGITS).max(left / 4) / 2 / kept.max(1)
}
