use super::adam::rate;
use super::data::Order;
use super::objective::{Lost, Objective};
use super::on_device::OnDevice;
use super::weight::Packed;
use super::{LearnOptions, LearnedWeight, Weights};
use crate::{QuantizeError, threads};
use lowbit_formats::Format;
use lowbit_kernels::ops::{AdamStep, WeightPart};
use lowbit_kernels::{Device, KernelError};
use lowbit_models::Model;
use lowbit_models::tape::{Gradients, Parameter, Parameters};
use std::rc::Rc;

/// A loss this much worse than the best is no noise.
const DIVERGED: f64 = 2.0;

/// The state of learning after a step. The steps to come depend on it and on the weights alone.
pub(super) struct Position {
    pub step: u32,
    pub tokens: u64,
    /// The factor of all rates, below 1 if learning has diverged.
    pub factor: f32,
    pub order: Order,
    /// The lowest loss of the tokens held out, and the weights then.
    pub best: (f64, Weights),
    pub best_step: u32,
    /// That of the weights as they were rounded.
    pub before: f64,
    /// And as they were when learning began, which is the same unless they had learned before.
    pub begun: f64,
    pub went_back: u32,
}

/// A step that was taken.
pub(super) struct Taken {
    /// The mean loss of its windows' tokens before it.
    pub loss: f64,
    /// That of the tokens held out, if they were scored after it.
    pub validation: Option<f64>,
    pub went_back: bool,
    pub tokens: u64,
}

/// Learns weights by an objective.
pub(super) struct Trainer<'a, O> {
    pub model: &'a Model,
    pub objective: O,
    pub options: &'a LearnOptions,
    /// The highest rate for weights of a format, unless the options have one.
    pub rate: fn(Format) -> f32,
    pub weights: Weights,
    pub on_device: OnDevice,
}

impl<O: Objective> Trainer<'_, O> {
    /// Before the first step. `rounded` are the weights as they were rounded, if they have learned
    /// since.
    ///
    /// # Errors
    /// The objective's.
    pub fn start(&self, rounded: Option<Weights>) -> Result<Position, QuantizeError> {
        let begun = self.validate(&self.weights)?;
        let mut best = (begun, self.weights.clone());
        let mut before = begun;
        if let Some(rounded) = rounded {
            before = self.validate(&rounded)?;
            if begun.is_nan() || begun >= before {
                best = (before, rounded);
            }
        }
        Ok(Position {
            step: 0,
            tokens: 0,
            factor: 1.0,
            order: Order::new(self.objective.windows(), self.options.seed),
            best,
            best_step: 0,
            before,
            begun,
            went_back: 0,
        })
    }

    /// Takes a step, and validates where that is due.
    ///
    /// # Errors
    /// The objective's.
    pub fn advance(&mut self, position: &mut Position) -> Result<Taken, QuantizeError> {
        let LearnOptions { steps, batch, validate_every, .. } = *self.options;
        let windows: Vec<usize> = (0..batch).map(|_| position.order.next()).collect();
        position.step += 1;
        let step = position.step;
        let (loss, tokens) = self.step(&windows, step, position.factor)?;
        position.tokens += tokens;
        let mut taken = Taken { loss, validation: None, went_back: false, tokens };
        if step.is_multiple_of(validate_every) || step == steps {
            self.fetch()?;
            let loss = self.validate(&self.weights)?;
            taken.validation = Some(loss);
            if loss < position.best.0 {
                position.best = (loss, self.weights.clone());
                position.best_step = step;
            } else if loss.is_nan() || loss > DIVERGED * position.best.0 {
                self.weights.clone_from(&position.best.1);
                self.on_device.forget();
                position.factor *= 0.5;
                position.went_back += 1;
                taken.went_back = true;
            }
        }
        Ok(taken)
    }

    /// Brings the weights up to date that learn on the model's device.
    ///
    /// # Errors
    /// Those of the device.
    pub fn fetch(&mut self) -> Result<(), QuantizeError> {
        Ok(self.on_device.fetch(&mut self.weights)?)
    }

    /// One step; the mean loss of the windows' tokens before it, and how many these are.
    fn step(&mut self, windows: &[usize], step: u32, factor: f32) -> Result<(f64, u64), QuantizeError> {
        let Lost { loss, tokens, gradients } =
            self.objective.gradients(windows, &self.parameters(&self.weights)?)?;
        self.move_weights(&gradients, step, factor)?;
        Ok((loss, tokens))
    }

    fn move_weights(&mut self, gradients: &Gradients, step: u32, factor: f32) -> Result<(), QuantizeError> {
        let LearnOptions { steps, rate: given, .. } = *self.options;
        let warmup = (steps / 20).min(steps - 1);
        let (threads, mut changes) = (self.threads(), vec![]);
        for (name, weight) in &mut self.weights {
            let Some(gradient) = gradients.parameters().get(name) else { continue };
            let peak = given.unwrap_or_else(|| (self.rate)(weight.format()));
            let step = AdamStep { rate: factor * rate(peak, step, warmup, steps), count: step };
            if !self.on_device.step(name, weight, gradient, step)? {
                changes.push((weight, gradient.to_device(self.model.host())?, step));
            }
        }
        threads::try_map(threads, changes, |(weight, gradient, step)| weight.step(&gradient, step))?;
        Ok(())
    }

    fn validate(&self, weights: &Weights) -> Result<f64, QuantizeError> {
        self.objective.held_out(&self.parameters(weights)?)
    }

    /// Threads of the model's host.
    fn threads(&self) -> usize {
        match self.model.host() {
            Device::Cpu(cpu) => cpu.threads(),
            Device::Gpu(_) => 1,
        }
    }

    fn parameters(&self, weights: &Weights) -> Result<Rc<Parameters>, QuantizeError> {
        let [host, device] = [self.model.host(), self.model.device()];
        let (mut parameters, mut on_host) = (Parameters::new(), vec![]);
        for (name, weight) in weights {
            match self.on_device.learned(name)? {
                Some(there) => {
                    parameters.insert(name.clone(), Parameter::Weight(there, WeightPart::Scales));
                }
                None => on_host.push((name, weight)),
            }
        }
        let packed = threads::try_map(self.threads(), on_host, |(name, weight)| {
            Ok::<_, KernelError>((name, weight, LearnedWeight::packed(weight, host)?))
        })?;
        for (name, weight, packed) in packed {
            let (weight, part) = match packed {
                Packed::Weight(weight, part) => (weight.to_device(device)?, part),
                Packed::Scales(scales) => {
                    let there = self.on_device.with_codes(name, weight, self.model)?;
                    (there.with_scales(&scales)?, WeightPart::Scales)
                }
            };
            parameters.insert(name.clone(), Parameter::Weight(weight, part));
        }
        Ok(Rc::new(parameters))
    }
}
