//! Learning one block at a time, each from what the teacher's block gives: only one block's latent
//! weights, gradients and averages exist at a time.
//!
//! Source: EfficientQAT (Chen et al., 2024), "Block-wise training of all parameters": a block reads
//! what the quantised blocks before it give, and is to give what the teacher's block gives of its
//! own input.

use super::objective::{Lost, Objective};
use super::on_device::OnDevice;
use super::pass::{Pass, windows_per_pass};
use super::run::Run;
use super::trainer::Trainer;
use super::{Data, Learn, LearnProgress, LearnedWeight, Learning, default_rate};
use crate::QuantizeError;
use lowbit_formats::DType;
use lowbit_kernels::ops::{self, WeightPart};
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor};
use lowbit_models::Model;
use lowbit_models::tape::{Gradients, Kept, Named, Parameter, Parameters, Tape, Var};
use std::ops::ControlFlow;
use std::rc::Rc;

/// Learns the codes of all blocks that `run` has not finished yet. `rounded` are the student's
/// weights, in the host's memory; `original` gives a weight's values before they were rounded.
///
/// In the host's memory are, besides one block's weights in f32, the states of all windows that are
/// learned from or held out, of both models: `2 * tokens * hidden_size` values in bf16.
///
/// # Errors
/// [`QuantizeError::Interrupted`]; those of the models' passes and of the state.
pub(super) fn learn<P: FnMut(&LearnProgress) -> ControlFlow<()>>(
    run: &mut Run<'_, P>,
    [teacher, student]: [&Model; 2],
    rounded: &[Named<QuantizedTensor>],
    original: impl Fn(&str) -> Result<Vec<f32>, QuantizeError>,
) -> Result<(), QuantizeError> {
    let blocks = student.config().num_hidden_layers;
    if run.finished.blocks.len() >= blocks {
        return Ok(());
    }
    let Learning { data, options, .. } = run.learning;
    let options = &options.for_blocks();
    let (windows, train) = chosen(data, options.batch.saturating_mul(options.steps as usize), options.seed);
    let per_pass = Pass::new(&[teacher], student, 1).tokens;
    let mut targets = States::new(teacher, &windows, per_pass)?;
    let mut inputs = States::new(student, &windows, per_pass)?;
    for index in 0..blocks {
        targets.advance(teacher, index, &Rc::default())?;
        let inventory = student.block_inventory(index)?.weights;
        if index >= run.finished.blocks.len() {
            let weights = inventory.iter().filter_map(|Named { name, .. }| {
                let weight = rounded.iter().find(|weight| weight.name == *name)?;
                let learned = LearnedWeight::new(&weight.value, Learn::Codes, || original(name));
                Some(learned.map(|learned| (name.clone(), learned)))
            });
            let weights = weights.collect::<Result<_, QuantizeError>>()?;
            let objective = OneBlock { student, index, inputs: &inputs, targets: &targets, train };
            let rate = |format| default_rate(Learn::Codes, format);
            let on_device = OnDevice::default();
            run.learn_block(Trainer { model: student, objective, options, rate, weights, on_device })?;
        }
        if index + 1 < blocks {
            let learned = inventory.iter().filter_map(|Named { name, .. }| {
                let weight = run.finished.learned.get(name)?.to_device(student.device());
                // Nobody asks for gradients of these.
                Some(weight.map(|weight| (name.clone(), Parameter::Weight(weight, WeightPart::Scales))))
            });
            let learned = learned.collect::<Result<Parameters, _>>()?;
            inputs.advance(student, index, &Rc::new(learned))?;
        }
    }
    Ok(())
}

/// The windows that `most` draws learn from, and those held out behind them; how many are to learn
/// from. Not more than are drawn, since their states take memory.
fn chosen(data: &Data, most: usize, seed: u64) -> (Vec<&[u32]>, usize) {
    let drawn = data.drawn(most, seed);
    let windows = drawn.iter().map(|&window| &data.train()[window]).chain(data.held_out());
    (windows.map(Vec::as_slice).collect(), drawn.len())
}

/// The loss of one block of the student against the teacher's: the squared error of a token's
/// state, as a share of the square of the teacher's. Layers norm a state before they read it, so
/// that its size does not matter.
struct OneBlock<'a> {
    student: &'a Model,
    index: usize,
    inputs: &'a States,
    targets: &'a States,
    /// Windows to learn from; the others are held out.
    train: usize,
}

impl OneBlock<'_> {
    /// The sum of the tokens' losses, and their number. `each` gets the output of each pass and the
    /// gradient of the mean loss by it, and a tape that kept this of the pass.
    fn lost(
        &self,
        windows: &[usize],
        (parameters, kept): (&Rc<Parameters>, Kept),
        mut each: impl FnMut(&Tape, &Var, &[f32]) -> Result<(), QuantizeError>,
    ) -> Result<(f64, usize), QuantizeError> {
        let tokens: usize = windows.iter().map(|&window| self.inputs.windows[window].dim(0)).sum();
        let mut loss = 0.0;
        for pass in windows.chunks(self.inputs.per_pass()) {
            let tape = Tape::keeping(kept, parameters.clone());
            let (x, lengths) = self.inputs.gather(pass, self.student)?;
            let y = self.student.block(self.index, &tape.leaf(x), &lengths)?;
            let (got, want) = (y.tensor().to_device(self.student.host())?, self.targets.joined(pass)?);
            let want = want.cast(DType::F32)?;
            let (lost, dy) =
                relative_error(got.as_slice()?, want.as_slice()?, y.dim(-1), 1.0 / tokens as f32);
            loss += lost;
            each(&tape, &y, &dy)?;
        }
        Ok((loss, tokens))
    }
}

impl Objective for OneBlock<'_> {
    fn windows(&self) -> usize {
        self.train
    }

    fn gradients(&self, windows: &[usize], parameters: &Rc<Parameters>) -> Result<Lost, QuantizeError> {
        let mut gradients = Gradients::default();
        let (loss, tokens) = self.lost(windows, (parameters, Kept::Ops), |tape, y, dy| {
            let dy = Tensor::new(dy, y.tensor().shape(), self.student.device())?;
            Ok(gradients.merge(tape.backward(&[(y, &dy)])?)?)
        })?;
        Ok(Lost { loss: loss / tokens as f64, tokens: tokens as u64, gradients })
    }

    fn held_out(&self, parameters: &Rc<Parameters>) -> Result<f64, QuantizeError> {
        let windows: Vec<usize> = (self.train..self.inputs.windows.len()).collect();
        let (loss, tokens) = self.lost(&windows, (parameters, Kept::Nothing), |_, _, _| Ok(()))?;
        Ok(loss / tokens as f64)
    }
}

/// The sum over rows of `|got - want|^2 / |want|^2`, and its gradient by `got` times
/// `scale * width`: values of states, not of whole rows, are what is of the order of 1, so that
/// gradients stay far above Adam's eps for rows of any width.
fn relative_error(got: &[f32], want: &[f32], width: usize, scale: f32) -> (f64, Vec<f32>) {
    let (mut sum, mut dy) = (0.0, Vec::with_capacity(got.len()));
    for (got, want) in got.chunks_exact(width).zip(want.chunks_exact(width)) {
        let square = |x: f32| f64::from(x) * f64::from(x);
        // A state of zeros has no size that an error could be a share of.
        let share = match want.iter().map(|&want| square(want)).sum::<f64>() {
            0.0 => 0.0,
            size => 1.0 / size,
        };
        sum += share * got.iter().zip(want).map(|(&got, &want)| square(got - want)).sum::<f64>();
        let factor = (2.0 * share * f64::from(scale) * width as f64) as f32;
        dy.extend(got.iter().zip(want).map(|(got, want)| factor * (got - want)));
    }
    (sum, dy)
}

/// The states of windows between two blocks, bf16 `[tokens, hidden_size]` each, in the host's
/// memory: several times as exact as what quantising changes in them, in half of the memory.
struct States {
    windows: Vec<Tensor>,
    /// Tokens that go together through a block.
    per_pass: usize,
}

impl States {
    /// Before the first block.
    fn new(model: &Model, windows: &[&[u32]], per_pass: usize) -> Result<Self, QuantizeError> {
        let states = windows.iter().map(|window| stored(&model.embed(&[window])?, model));
        Ok(Self { windows: states.collect::<Result<_, _>>()?, per_pass })
    }

    /// From before block `index` to behind it, with these weights in place of the model's.
    fn advance(
        &mut self,
        model: &Model,
        index: usize,
        parameters: &Rc<Parameters>,
    ) -> Result<(), QuantizeError> {
        let all: Vec<usize> = (0..self.windows.len()).collect();
        for pass in all.chunks(self.per_pass()) {
            let (x, lengths) = self.gather(pass, model)?;
            // A tape is what computes with other weights than the model's.
            let x = Tape::keeping(Kept::Nothing, parameters.clone()).leaf(x);
            let y = stored(model.block(index, &x, &lengths)?.tensor(), model)?;
            let mut end = 0;
            for &window in pass {
                let start = end;
                end += self.windows[window].dim(0);
                self.windows[window] = y.rows(start, end)?;
            }
        }
        Ok(())
    }

    /// The number that goes together through a block.
    fn per_pass(&self) -> usize {
        windows_per_pass(self.per_pass, self.windows.iter().map(|states| states.dim(0)).max().unwrap_or(1))
    }

    /// Those of some windows, one after the other.
    fn joined(&self, windows: &[usize]) -> Result<Tensor, KernelError> {
        let states: Vec<Tensor> = windows.iter().map(|&window| self.windows[window].clone()).collect();
        ops::concat_rows(&states)
    }

    /// The same in f32 on the model's device, and how many tokens each window has.
    fn gather(&self, windows: &[usize], model: &Model) -> Result<(Tensor, Vec<usize>), KernelError> {
        let x = self.joined(windows)?.to_device(model.device())?.cast(DType::F32)?;
        Ok((x, windows.iter().map(|&window| self.windows[window].dim(0)).collect()))
    }
}

/// As states are kept.
fn stored(states: &Tensor, model: &Model) -> Result<Tensor, QuantizeError> {
    Ok(states.cast(DType::BF16)?.to_device(model.host())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_and_their_gradients_those_of_the_formula() {
        let want = [3.0, -4.0, 0.03, 0.04, 0.0, 0.0];
        // A token's size does not matter; one without any is of no account.
        let (error, dy) = relative_error(&[3.0, -3.0, 0.03, 0.03, 0.0, 0.1], &want, 2, 0.5);
        assert!((error - (1.0 / 25.0 + 1e-4 / 25e-4)).abs() < 1e-6, "{error}");
        assert!(dy[..1] == [0.0] && dy[4..] == [0.0, 0.0]);
        let got = [2.5, -3.0, 0.05, 0.01];
        let (_, dy) = relative_error(&got, &want[..4], 2, 0.5);
        for (i, dy) in dy.into_iter().enumerate() {
            let moved = |by: f32| {
                let mut got = got;
                got[i] += by * want[i];
                (relative_error(&got, &want[..4], 2, 0.5).0, got[i])
            };
            let ((above, right), (below, left)) = (moved(1e-2), moved(-1e-2));
            let slope = (above - below) / f64::from(right - left);
            assert!((f64::from(dy) - 0.5 * 2.0 * slope).abs() < 1e-3 * slope.abs(), "{i}: {dy} {slope}");
        }
    }

    #[test]
    fn no_more_windows_are_kept_than_are_learned_from() {
        let data = Data::new(&[(0..400).collect()], 4).unwrap();
        let (windows, train) = chosen(&data, 7, 3);
        assert_eq!((windows.len(), train), (7 + 5, 7));
        assert_eq!(windows[7..], data.held_out().iter().map(Vec::as_slice).collect::<Vec<_>>());
        assert!(windows[..7].iter().all(|window| data.train().iter().any(|train| train == window)));
        assert_ne!(windows[..7], chosen(&data, 7, 4).0[..7]);
        assert_eq!(chosen(&data, 1000, 3).1, 95);
    }
}
