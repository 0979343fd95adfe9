use crate::tape::{Gradients, Kept, Parameters, Tape, Var, Weight};
use crate::{Model, ModelError};
use lowbit_formats::{DType, FloatType};
use lowbit_kernels::ops::{
    self, DistillationLoss, DistillationTarget, OutputDistillation, OutputDistillationGradient, TopKTargets,
};
use lowbit_kernels::{KernelError, Tensor};
use std::ops::Range;
use std::rc::Rc;

/// Distillation of one model into another: the mean over tokens of the Kullback-Leibler divergence
/// of the student's next-token distribution from the teacher's, see
/// [`distillation_loss`](ops::distillation_loss()).
#[derive(Clone, Copy, Debug)]
pub struct Distillation<'a> {
    student: &'a Model,
    teacher: &'a Model,
    temperature: f32,
    kept: Kept,
}

/// The sum over a batch's tokens of their divergence, and its gradients.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Distilled {
    pub kl: f64,
    pub gradients: Gradients,
}

impl<'a> Distillation<'a> {
    /// Distillation at this temperature, by which logits are divided.
    ///
    /// # Errors
    /// [`ModelError::Vocabulary`] for models of different vocabularies.
    pub fn new(student: &'a Model, teacher: &'a Model, temperature: f32) -> Result<Self, ModelError> {
        let sizes = [student, teacher].map(|model| model.config().vocab_size);
        if sizes[0] != sizes[1] {
            return Err(ModelError::Vocabulary { model: sizes[0], teacher: sizes[1] });
        }
        Ok(Self { student, teacher, temperature, kept: Kept::Ops })
    }

    /// With tapes that keep no more than this of the student's passes.
    #[must_use]
    pub fn keeping(self, kept: Kept) -> Self {
        Self { kept, ..self }
    }

    /// The gradients, by the student's `parameters` (with their current values), of `dkl` times the
    /// sum of the tokens' divergences over the texts of `batch`.
    ///
    /// # Errors
    /// As [`Model::forward_batch`]; those of the ops' gradients: [`KernelError::Unsupported`] for a
    /// student that was not loaded [for gradients](crate::Target::for_gradients).
    ///
    /// # Panics
    /// As [`Tape::backward`].
    pub fn gradients(
        &self,
        batch: &[&[u32]],
        parameters: &Rc<Parameters>,
        dkl: f32,
    ) -> Result<Distilled, ModelError> {
        let logits = TeacherLogits::new(self.teacher, batch)?;
        let (dkl, tape) = (vec![dkl; tokens(batch)], Tape::keeping(self.kept, parameters.clone()));
        gradients(self.student, batch, &tape, (&dkl, self.temperature), |rows| logits.rows(rows))
    }

    /// The sum over the tokens of `batch` of their divergence.
    ///
    /// # Errors
    /// As [`Model::forward_batch`].
    pub fn kl(&self, batch: &[&[u32]], parameters: &Rc<Parameters>) -> Result<f64, ModelError> {
        let logits = TeacherLogits::new(self.teacher, batch)?;
        kl(self.student, batch, parameters, self.temperature, |rows| logits.rows(rows))
    }
}

/// Distillation from a teacher's stored targets ([`top_k_targets`]), see
/// [`distillation_loss_top_k`](ops::distillation_loss_top_k()). The teacher itself need not be in
/// memory.
#[derive(Clone, Copy, Debug)]
pub struct TargetDistillation<'a> {
    student: &'a Model,
    temperature: f32,
    kept: Kept,
}

impl<'a> TargetDistillation<'a> {
    /// Distillation at this temperature, by which the student's logits are divided. The targets
    /// must have been made with the same one.
    pub fn new(student: &'a Model, temperature: f32) -> Self {
        Self { student, temperature, kept: Kept::Ops }
    }

    /// As [`Distillation::keeping`].
    #[must_use]
    pub fn keeping(self, kept: Kept) -> Self {
        Self { kept, ..self }
    }

    /// As [`Distillation::gradients`]; `targets` are those of all tokens of `batch`, on the
    /// student's device.
    ///
    /// # Errors
    /// As [`Distillation::gradients`] and
    /// [`distillation_loss_top_k`](ops::distillation_loss_top_k()).
    pub fn gradients(
        &self,
        (batch, targets): (&[&[u32]], &TopKTargets),
        parameters: &Rc<Parameters>,
        dkl: f32,
    ) -> Result<Distilled, ModelError> {
        let (dkl, tape) = (vec![dkl; tokens(batch)], Tape::keeping(self.kept, parameters.clone()));
        gradients(self.student, batch, &tape, (&dkl, self.temperature), |rows| of_rows(targets, &rows))
    }

    /// As [`Distillation::kl`].
    ///
    /// # Errors
    /// As [`Self::gradients`].
    pub fn kl(
        &self,
        (batch, targets): (&[&[u32]], &TopKTargets),
        parameters: &Rc<Parameters>,
    ) -> Result<f64, ModelError> {
        kl(self.student, batch, parameters, self.temperature, |rows| of_rows(targets, &rows))
    }
}

fn of_rows(targets: &TopKTargets, rows: &Range<usize>) -> Result<DistillationTarget, KernelError> {
    Ok(DistillationTarget::TopK(targets.rows(rows.start, rows.end)?))
}

/// The targets of `teacher` for the tokens of `batch`, in the host's memory: its `k` most likely
/// next tokens at a temperature, and the rest, see [`ops::top_k_targets`].
///
/// # Errors
/// As [`Model::forward_batch`] and [`ops::top_k_targets`].
pub fn top_k_targets(
    teacher: &Model,
    batch: &[&[u32]],
    k: usize,
    temperature: f32,
) -> Result<TopKTargets, ModelError> {
    let (logits, mut blocks) = (TeacherLogits::new(teacher, batch)?, vec![]);
    for rows in logits.blocks() {
        let logits = logits.of(rows)?.to_device(teacher.host())?;
        blocks.push(ops::top_k_targets(&logits, k, temperature)?);
    }
    let joined = |of: fn(&TopKTargets) -> &Tensor| {
        ops::concat_rows(&blocks.iter().map(|block| of(block).clone()).collect::<Vec<_>>())
    };
    Ok(TopKTargets {
        ids: joined(|block| &block.ids)?,
        ln_p: joined(|block| &block.ln_p)?,
        ln_rest: joined(|block| &block.ln_rest)?,
    })
}

/// The logits of a model for a batch, made for a block of tokens at a time.
struct TeacherLogits<'a> {
    model: &'a Model,
    x: Var,
    head: Weight,
}

impl<'a> TeacherLogits<'a> {
    fn new(model: &'a Model, batch: &[&[u32]]) -> Result<Self, ModelError> {
        Ok(Self { model, x: model.normed(batch, None)?, head: model.output(&Parameters::new())? })
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        blocks(self.model, &self.x)
    }

    fn of(&self, rows: Range<usize>) -> Result<Tensor, KernelError> {
        logits(self.model, &self.head, &self.x, rows)
    }

    fn rows(&self, rows: Range<usize>) -> Result<DistillationTarget, KernelError> {
        self.of(rows).map(DistillationTarget::Logits)
    }
}

/// The gradients, by `parameters`, of the sum over `batch` of `-ln p` of each text's next tokens.
///
/// # Errors
/// As [`Distillation::gradients`].
pub fn likelihood_gradients(
    model: &Model,
    batch: &[&[u32]],
    parameters: &Rc<Parameters>,
) -> Result<Gradients, ModelError> {
    let vocab_size = model.config().vocab_size;
    // A token that nothing follows counts nothing.
    let labels: Vec<Option<u32>> =
        batch.iter().flat_map(|text| (1..=text.len()).map(|next| text.get(next).copied())).collect();
    let weights: Vec<f32> = labels.iter().map(|label| if label.is_some() { 1.0 } else { 0.0 }).collect();
    // The divergence from a teacher that is sure of the next token is -ln p of that token.
    let logits = |rows: Range<usize>| {
        let mut logits = vec![f32::NEG_INFINITY; rows.len() * vocab_size];
        for (row, label) in logits.chunks_exact_mut(vocab_size).zip(&labels[rows.clone()]) {
            row[label.unwrap_or(0) as usize] = 0.0;
        }
        Tensor::new(&logits, &[rows.len(), vocab_size], model.device()).map(DistillationTarget::Logits)
    };
    Ok(gradients(model, batch, &Tape::new(parameters.clone()), (&weights, 1.0), logits)?.gradients)
}

/// The gradients of the sum of each token's divergence from the teacher's distribution, times its
/// weight.
fn gradients(
    student: &Model,
    batch: &[&[u32]],
    tape: &Tape,
    (weights, temperature): (&[f32], f32),
    teacher: impl FnMut(Range<usize>) -> Result<DistillationTarget, KernelError>,
) -> Result<Distilled, ModelError> {
    let x = student.normed(batch, Some(tape))?;
    let head = student.output(tape.parameters())?;
    let params = OutputDistillation {
        logits: student.decoder().logit_function(),
        temperature,
        block: block(student),
        dweight: head.wanted,
    };
    let dkl = Tensor::new(weights, &[x.dim(0)], student.device())?;
    let OutputDistillationGradient { kl, dx, dweight } =
        ops::output_distillation(x.tensor(), &head.value, &dkl, teacher, &params)?;
    let mut gradients = tape.backward(&[(&x, &dx)])?;
    if let Some(dweight) = dweight {
        gradients.add_parameter(&head.name, dweight)?;
    }
    Ok(Distilled { kl: sum(student, &kl)?, gradients })
}

/// The sum of the tokens' divergences.
fn kl(
    student: &Model,
    batch: &[&[u32]],
    parameters: &Rc<Parameters>,
    temperature: f32,
    teacher: impl Fn(Range<usize>) -> Result<DistillationTarget, KernelError>,
) -> Result<f64, ModelError> {
    // A tape is what computes with other parameters than the model's.
    let x = student.normed(batch, Some(&Tape::keeping(Kept::Nothing, parameters.clone())))?;
    let (head, mut total) = (student.output(parameters)?, 0.0);
    for rows in blocks(student, &x) {
        let dkl = Tensor::allocate_zeros(&[rows.len()], DType::F32, x.tensor().device())?;
        let logits = logits(student, &head, &x, rows.clone())?;
        let DistillationLoss { kl, .. } = teacher(rows)?.loss(&logits, &dkl, temperature)?;
        total += sum(student, &kl)?;
    }
    Ok(total)
}

fn tokens(batch: &[&[u32]]) -> usize {
    batch.iter().map(|tokens| tokens.len()).sum()
}

fn sum(model: &Model, kl: &Tensor) -> Result<f64, KernelError> {
    let kl = kl.to_device(model.host())?;
    Ok(kl.as_slice::<f32>()?.iter().map(|&kl| f64::from(kl)).sum())
}

/// The tokens of x, as many at a time as have their logits exist.
fn blocks(model: &Model, x: &Var) -> impl Iterator<Item = Range<usize>> + use<> {
    let (tokens, block) = (x.dim(0), block(model));
    (0..tokens).step_by(block).map(move |start| start..tokens.min(start + block))
}

/// Tokens whose logits exist at a time.
fn block(model: &Model) -> usize {
    // The student's logits, the teacher's, and their gradients: as many of each.
    (model.device().plan().floats / model.config().vocab_size.max(1)).max(1)
}

/// The logits of some rows of what the output layer `head` reads.
fn logits(model: &Model, head: &Weight, x: &Var, rows: Range<usize>) -> Result<Tensor, KernelError> {
    let rows = x.tensor().rows(rows.start, rows.end)?;
    let products = ops::quantized_matmul_to(&rows, &head.value, FloatType::F32)?;
    model.decoder().logit_function().of(products)
}
