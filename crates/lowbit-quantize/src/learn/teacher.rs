use super::objective::{Source, WholeModel};
use super::on_device::OnDevice;
use super::run::Run;
use super::targets::TargetsFile;
use super::trainer::Trainer;
use super::{Learn, LearnProgress, LearnReport, LearnedWeight, Learning, Weights, blocks, default_rate};
use crate::QuantizeError;
use lowbit_files::Checkpoint;
use lowbit_formats::Format;
use lowbit_kernels::QuantizedTensor;
use lowbit_models::tape::Named;
use lowbit_models::{Model, Target};
use std::ops::ControlFlow;
use std::path::Path;

/// The model that is quantised, which its rounded form learns from.
pub struct Teacher<'a> {
    says: Says,
    learning: Learning<'a>,
}

/// A teacher, or its stored targets.
enum Says {
    Now(Box<Model>),
    Before(TargetsFile),
}

impl<'a> Teacher<'a> {
    /// Loads `checkpoint`, or opens the file with what it has said, which is made where it is not
    /// there. `progress` is called while that is made, with the windows done and of all.
    ///
    /// # Errors
    /// As [`Model::load_for`] and [`TargetsFile::open_or_make`].
    pub fn load(
        checkpoint: &Checkpoint,
        learning: Learning<'a>,
        progress: impl FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Self, QuantizeError> {
        let load = || -> Result<Model, QuantizeError> {
            let target = Target::for_gradients(learning.device, learning.options.activations)?;
            Ok(Model::load_for(checkpoint, target)?)
        };
        let says = match &learning.options.targets {
            None => Says::Now(load()?.into()),
            Some(_) => Says::Before(TargetsFile::open_or_make(checkpoint, learning, load, progress)?),
        };
        Ok(Self { says, learning })
    }

    /// Learns the weights of the checkpoint `rounded`, by the names that modules have there.
    /// `original` gives a module's values before they were rounded. Nothing of that checkpoint is
    /// in use in the end.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for a student without anything to learn; as [`Model::load_for`],
    /// [`WholeModel::new`] and [`Run::learn`].
    pub fn teach(
        &self,
        rounded: &Path,
        original: impl Fn(&str) -> Result<Vec<f32>, QuantizeError>,
        progress: impl FnMut(&LearnProgress) -> ControlFlow<()>,
    ) -> Result<(Weights, LearnReport), QuantizeError> {
        let Learning { data, options, device, .. } = self.learning;
        let checkpoint = Checkpoint::open(rounded)?;
        let student = Model::load_for(&checkpoint, Target::for_gradients(device, options.activations)?)?;
        // On a GPU weights have a layout of their own: what is learned begins with what the file
        // has.
        let mapped = Model::load_for(&checkpoint, Target::for_gradients(student.host(), None)?)?;
        let weights = mapped.inventory().weights;
        let (weights, skipped): (Vec<_>, Vec<_>) =
            weights.into_iter().partition(|weight| LearnedWeight::can_learn(weight.value.format()));
        if weights.is_empty() {
            return Err(QuantizeError::Learn("no weight has scales and biases that can be learned".into()));
        }
        let (source, digest) = match &self.says {
            Says::Now(teacher) => (Source::Teacher(teacher), None),
            Says::Before(targets) => (Source::Targets(targets), Some(targets.digest())),
        };
        let objective = WholeModel::new(source, &student, data, options.temperature)?;
        let layers = student.config().num_hidden_layers;
        let mut run = Run::new(self.learning, layers, (&weights, digest), progress)?;
        let mut learn = options.learn;
        if let (true, Source::Teacher(teacher)) = (options.by_block, source) {
            blocks::learn(&mut run, [teacher, &student], &weights, &original)?;
            learn = Learn::Scales;
        }
        let of = |learned: &dyn Fn(&Named<QuantizedTensor>) -> QuantizedTensor| {
            let each = weights.iter().map(|weight| {
                let name = weight.name.clone();
                Ok((name, LearnedWeight::new(&learned(weight), learn, || original(&weight.name))?))
            });
            each.collect::<Result<Weights, QuantizeError>>()
        };
        let rounded = options.by_block.then(|| of(&|weight| weight.value.clone())).transpose()?;
        let learned = &run.finished.learned;
        let begun = of(&|weight| learned.get(&weight.name).unwrap_or(&weight.value).clone())?;
        let count = weights.len();
        drop((weights, mapped, checkpoint));
        let rate: fn(Format) -> f32 = match (options.by_block, learn) {
            (false, Learn::Scales) => |format| default_rate(Learn::Scales, format),
            (false, Learn::Codes) => |format| default_rate(Learn::Codes, format),
            // Long steps would lose what the blocks have learned: a third was worse than a tenth.
            (true, _) => |format| default_rate(Learn::Scales, format) / 10.0,
        };
        // Blocks have learned other codes than the student was loaded with.
        let on_device = match options.by_block {
            true => OnDevice::default(),
            false => OnDevice::new(&begun, student.inventory().weights),
        };
        let trainer = Trainer { model: &student, objective, options, rate, weights: begun, on_device };
        let end = run.learn(trainer, rounded)?;
        let report = LearnReport {
            before: end.before,
            after: end.best.0,
            blocks: run.finished.blocks,
            after_blocks: options.by_block.then_some(end.begun),
            best_step: end.best_step,
            weights: count,
            skipped: skipped.iter().map(|weight| weight.name.to_string()).collect(),
            went_back: end.went_back,
        };
        Ok((end.best.1, report))
    }

    /// Removes the saved state, once the output is there.
    ///
    /// # Errors
    /// [`QuantizeError::Io`].
    pub fn finish(&self) -> Result<(), QuantizeError> {
        self.learning.saving.map_or(Ok(()), |saving| saving.remove())
    }
}
