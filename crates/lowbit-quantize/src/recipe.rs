//! The one way in: what a checkpoint becomes, and how.

use crate::gguf::{self, Mix};
use crate::learn::{LearnReport, Learning, Progress, Teacher, Weights};
use crate::planned::{Asked, Planned};
use crate::round::{self, MlxFormat};
use crate::sensitivity::allocate_bits;
use crate::{Budget, QuantizeError, Rule, Summary, output_path};
use lowbit_files::Checkpoint;
use lowbit_models::{Config, Outline, arch};
use std::ops::ControlFlow;
use std::path::Path;

/// The layout and the formats of a new checkpoint.
#[derive(Clone, Debug)]
pub enum OutputFormat {
    /// A directory in MLX's layout: codes, scales and biases equal those of `mlx_lm convert -q`
    /// (mlx-lm 0.32, MLX's CPU backend) bit for bit.
    Mlx(MlxFormat),
    /// A GGUF file: types and bytes of all tensors are those of `llama-quantize` without an
    /// importance matrix (llama.cpp of llama-cpp-python 0.3.36), for a directory after
    /// `convert_hf_to_gguf.py`.
    Gguf(Mix),
}

impl OutputFormat {
    /// By the name of one of MLX's modes ([`MlxFormat::MODES`]), or of a [`Mix`], in upper or lower
    /// case; of `nvfp4` and `NVFP4` the first is MLX's.
    pub fn from_name(name: &str) -> Option<Self> {
        let mode = MlxFormat::MODES.iter().find(|mode| mode.eq_ignore_ascii_case(name));
        let mix = Mix::from_name(name).filter(|mix| mode.is_none() || mix.name() == name);
        mix.map(Self::Gguf).or_else(|| mode.map(|mode| MlxFormat::for_mode(*mode).into()))
    }

    /// All names that [`Self::from_name`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MlxFormat::MODES.into_iter().chain(Mix::names())
    }
}

impl From<MlxFormat> for OutputFormat {
    fn from(format: MlxFormat) -> Self {
        Self::Mlx(format)
    }
}

impl From<Mix> for OutputFormat {
    fn from(mix: Mix) -> Self {
        Self::Gguf(mix)
    }
}

/// The settings for quantising a checkpoint of any layout.
///
/// ```no_run
/// use lowbit_files::Checkpoint;
/// use lowbit_quantize::{MlxFormat, Recipe};
/// use std::ops::ControlFlow::Continue;
///
/// let recipe = Recipe::new(MlxFormat::new("affine", 4, 64)).with_rules(vec!["lm_head=6".parse()?]);
/// let checkpoint = Checkpoint::open("Qwen3-0.6B".as_ref())?;
/// recipe.run(&checkpoint, "Qwen3-0.6B-4bit".as_ref(), |_| Continue(()))?;
/// # Ok::<(), lowbit_quantize::QuantizeError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Recipe<'a> {
    /// The new layout and formats.
    pub into: OutputFormat,
    /// Other formats for some weights. In MLX's layout routers and shared-expert gates without a
    /// rule get 8 bits in groups of 64, but for routers that are no linear layers in mlx-lm
    /// (GLM-4.5's), which stay as they are.
    pub rules: Vec<Rule>,
    /// True to replace a checkpoint of the same kind that has the output's name already.
    pub replace: bool,
    /// Bits to share out among the weights that have no rule and are no routers, so that rounding
    /// costs little: only for affine formats.
    pub budget: Option<Budget<'a>>,
    /// Learning after rounding; `None` to round to nearest alone.
    pub learning: Option<Learning<'a>>,
}

/// A new checkpoint that was written.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Made {
    /// Its tensors' formats and sizes, and what rounding lost.
    pub summary: Summary,
    /// The rules it was made with: the recipe's, then those that share out its budget.
    pub rules: Vec<Rule>,
    /// The result of learning.
    pub learned: Option<LearnReport>,
}

impl<'a> Recipe<'a> {
    /// Rounds to nearest, and replaces nothing.
    pub fn new(into: impl Into<OutputFormat>) -> Self {
        Self { into: into.into(), rules: vec![], replace: false, budget: None, learning: None }
    }

    /// With other formats for some weights.
    #[must_use]
    pub fn with_rules(self, rules: Vec<Rule>) -> Self {
        Self { rules, ..self }
    }

    /// With or without replacing a checkpoint that has the output's name already.
    #[must_use]
    pub fn with_replace(self, replace: bool) -> Self {
        Self { replace, ..self }
    }

    /// With bits shared out among the weights.
    #[must_use]
    pub fn with_budget(self, budget: Budget<'a>) -> Self {
        Self { budget: Some(budget), ..self }
    }

    /// With learning after rounding. The model's next-token distributions then come closer to those
    /// of the source; formats stay. Weights in formats without scales to learn (floats, IQ4 and
    /// MXFP4) stay as they were rounded, and are listed in the report. Both models and the learned
    /// values in f32 are in memory (the source only while its targets are made, with
    /// [`LearnOptions::targets`](crate::LearnOptions::targets)).
    #[must_use]
    pub fn with_learning(self, learning: Learning<'a>) -> Self {
        Self { learning: Some(learning), ..self }
    }

    /// Checks everything, also that the output may be written, and says what would be made, without
    /// rounding errors. Nothing is encoded or written. A budget is not shared out: that takes
    /// gradients.
    ///
    /// # Errors
    /// As [`Self::run`], except for errors in values.
    pub fn plan(&self, checkpoint: &Checkpoint, output: &Path) -> Result<Summary, QuantizeError> {
        match &self.into {
            OutputFormat::Mlx(format) => {
                planned(&round::Plan::new(checkpoint, output, format, &self.asked())?, output)
            }
            OutputFormat::Gguf(mix) => {
                planned(&gguf::Plan::new(checkpoint, output, mix, &self.asked())?, output)
            }
        }
    }

    /// Makes the new checkpoint `output`: a directory, or a GGUF file. Weights that are quantised
    /// already are decoded in f32 first; weights whose format stays keep their bytes. `progress` is
    /// called as [`Progress`] says, and stops the run by returning `Break`.
    ///
    /// The output is [`Staged`](lowbit_files::staging::Staged): it gets its name once all of it is
    /// on the disk. If the run ends earlier, for whatever reason, nothing has that name, or still
    /// the checkpoint that was to be replaced.
    ///
    /// # Errors
    /// [`QuantizeError`], for instance for an output that exists or may not be replaced, a
    /// checkpoint of another kind, files beside it that may not be copied
    /// ([`Checkpoint::companions`]), or a tensor with NaN or an infinity;
    /// [`QuantizeError::Learn`] and [`QuantizeError::Model`] with a budget or learning;
    /// [`QuantizeError::Interrupted`].
    pub fn run(
        &self,
        checkpoint: &Checkpoint,
        output: &Path,
        mut progress: impl FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Made, QuantizeError> {
        if let Some(learning) = &self.learning {
            learning.check()?;
        }
        if self.learning.is_some() || self.budget.is_some() {
            check_gradients(checkpoint)?;
        }
        let mut asked = self.asked();
        if let Some(budget) = self.budget {
            let OutputFormat::Mlx(format) = &self.into else {
                return Err(QuantizeError::Learn(
                    "bits are shared out in affine formats; a GGUF file's mix says its types".into(),
                ));
            };
            let windows = |done, all| progress(Progress::Budget(done, all));
            asked.rules = allocate_bits(checkpoint, output, (format, &asked), budget, windows)?;
        }
        let (summary, learned) = match &self.into {
            OutputFormat::Mlx(format) => {
                let plan = round::Plan::new(checkpoint, output, format, &asked)?;
                self.make(&plan, checkpoint, output, progress)?
            }
            OutputFormat::Gguf(mix) => {
                let plan = gguf::Plan::new(checkpoint, output, mix, &asked)?;
                self.make(&plan, checkpoint, output, progress)?
            }
        };
        Ok(Made { summary, rules: asked.rules, learned })
    }

    fn asked(&self) -> Asked {
        Asked { rules: self.rules.clone(), replace: self.replace }
    }

    /// Writes what was planned, learned values in the place of rounded ones.
    fn make(
        &self,
        plan: &impl Planned,
        checkpoint: &Checkpoint,
        output: &Path,
        mut progress: impl FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<(Summary, Option<LearnReport>), QuantizeError> {
        let targets = |done, all| progress(Progress::Targets(done, all));
        let teacher =
            self.learning.map(|learning| Teacher::load(checkpoint, learning, targets)).transpose()?;
        let mut staged = plan.stage(output)?;
        let (mut weights, mut report) = (Weights::default(), None);
        if let Some(teacher) = &teacher {
            let mut tensors = |done, all| progress(Progress::Tensors(done, all));
            let student = plan.write_student(&mut staged, &mut tensors)?;
            let steps = |step: &_| progress(Progress::Learning(step));
            let (learned, told) = teacher.teach(student.path(), |module| plan.values(module), steps)?;
            student.remove()?;
            (weights, report) = (learned, Some(told));
        }
        let mut tensors = |done, all| progress(Progress::Tensors(done, all));
        let learned = |module: &str| weights.get(module).map(|weight| weight.components());
        let summary = plan.write(&mut staged, &learned, &mut tensors)?;
        output_path::commit(staged, plan.tensors(), tensors)?;
        teacher.map_or(Ok(()), |teacher| teacher.finish())?;
        Ok((summary, report))
    }
}

/// Refuses a model of which some part has no gradient.
fn check_gradients(checkpoint: &Checkpoint) -> Result<(), QuantizeError> {
    let Some(what) = Outline::new(checkpoint)?.spec().without_gradient() else { return Ok(()) };
    let name = arch::find(&Config::new(checkpoint)?)?.model_types[0].name;
    Err(QuantizeError::Learn(format!("gradients of {name} are wanted, but {what} has none")))
}

fn planned(plan: &impl Planned, output: &Path) -> Result<Summary, QuantizeError> {
    plan.check_place(output)?;
    plan.summary()
}
