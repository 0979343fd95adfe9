use crate::tape::{Gradients, Kept, Parameters, Tape, Weight};
use crate::{Model, ModelError};
use lowbit_formats::{DType, FloatType};
use lowbit_kernels::ops::{self, DistillationLoss, OutputDistillation, OutputDistillationGradient};
use lowbit_kernels::{Device, KernelError, Tensor};
use std::ops::Range;
use std::rc::Rc;

/// Logits that exist at a time, of the student, of the teacher, and their gradients: 64 MB each on the CPU, 2 GB each on a GPU, whose
/// products want many rows.
const LOGITS: usize = 1 << 24;
const GPU_LOGITS: usize = 1 << 29;

/// Distillation of one model into another: the mean over tokens of the Kullback-Leibler divergence of the student's next-token
/// distribution from the teacher's, see [`distillation_loss`](ops::distillation_loss()).
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
    /// Logits are divided by `temperature`.
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

    /// The same, with tapes that keep no more than this of the student's passes.
    #[must_use]
    pub fn keeping(self, kept: Kept) -> Self {
        Self { kept, ..self }
    }

    /// What the student's parameters change, over the texts of `batch`: the gradients of `dkl` times the sum of the tokens'
    /// divergences. `parameters` are the student's current ones.
    ///
    /// # Errors
    /// As [`Model::forward_batch`]; those of the ops' gradients: [`KernelError::Unsupported`] for a student that was not loaded
    /// [for gradients](crate::Target::for_gradients).
    ///
    /// # Panics
    /// As [`Tape::backward`].
    pub fn gradients(
        &self,
        batch: &[&[u32]],
        parameters: &Rc<Parameters>,
        dkl: f32,
    ) -> Result<Distilled, ModelError> {
        let teacher = self.teacher.normed(batch, None)?;
        let head = self.teacher.output(&Parameters::new())?;
        let logits = |rows: Range<usize>| head.logits(teacher.tensor(), rows);
        let dkl = vec![dkl; batch.iter().map(|tokens| tokens.len()).sum()];
        let tape = Tape::keeping(self.kept, parameters.clone());
        gradients(self.student, batch, &tape, (&dkl, self.temperature), logits)
    }

    /// The sum over the tokens of `batch` of their divergence.
    ///
    /// # Errors
    /// As [`Model::forward_batch`].
    pub fn kl(&self, batch: &[&[u32]], parameters: &Rc<Parameters>) -> Result<f64, ModelError> {
        // A tape is what computes with other parameters than the model's.
        let x = self.student.normed(batch, Some(&Tape::keeping(Kept::Nothing, parameters.clone())))?;
        let teacher = self.teacher.normed(batch, None)?;
        let (head, mut total) = (self.student.output(parameters)?, 0.0);
        let teacher_head = self.teacher.output(&Parameters::new())?;
        let block = block(self.student);
        for start in (0..x.dim(0)).step_by(block) {
            let rows = start..x.dim(0).min(start + block);
            let dkl = Tensor::allocate_zeros(&[rows.len()], DType::F32, x.tensor().device())?;
            let student = head.logits(x.tensor(), rows.clone())?;
            let teacher = teacher_head.logits(teacher.tensor(), rows)?;
            let DistillationLoss { kl, .. } =
                ops::distillation_loss(&student, &teacher, &dkl, self.temperature)?;
            total += sum(self.student, &kl)?;
        }
        Ok(total)
    }
}

/// The gradients, by `parameters`, of the sum over `batch` of -ln p of each text's next tokens.
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
        Tensor::new(&logits, &[rows.len(), vocab_size], model.device())
    };
    Ok(gradients(model, batch, &Tape::new(parameters.clone()), (&weights, 1.0), logits)?.gradients)
}

/// The gradients of the sum of each token's divergence from the teacher with these logits, times its weight.
fn gradients(
    student: &Model,
    batch: &[&[u32]],
    tape: &Tape,
    (weights, temperature): (&[f32], f32),
    teacher: impl FnMut(Range<usize>) -> Result<Tensor, KernelError>,
) -> Result<Distilled, ModelError> {
    let x = student.normed(batch, Some(tape))?;
    let head = student.output(tape.parameters())?;
    let params = OutputDistillation { temperature, block: block(student), dweight: head.wanted };
    let dkl = Tensor::new(weights, &[x.dim(0)], student.device())?;
    let OutputDistillationGradient { kl, dx, dweight } =
        ops::output_distillation(x.tensor(), &head.value, &dkl, teacher, &params)?;
    let mut gradients = tape.backward(&[(&x, &dx)])?;
    if let Some(dweight) = dweight {
        gradients.add_parameter(&head.name, dweight)?;
    }
    Ok(Distilled { kl: sum(student, &kl)?, gradients })
}

fn sum(model: &Model, kl: &Tensor) -> Result<f64, KernelError> {
    let kl = kl.to_device(model.host())?;
    Ok(kl.as_slice::<f32>()?.iter().map(|&kl| f64::from(kl)).sum())
}

/// Tokens whose logits exist at a time.
fn block(model: &Model) -> usize {
    let logits = match model.device() {
        Device::Cpu(_) => LOGITS,
        Device::Gpu(_) => GPU_LOGITS,
    };
    (logits / model.config().vocab_size.max(1)).max(1)
}

impl Weight {
    /// The logits of some rows of what the output layer reads.
    fn logits(&self, x: &Tensor, rows: Range<usize>) -> Result<Tensor, KernelError> {
        ops::quantized_matmul_to(&x.rows(rows.start, rows.end)?, &self.value, FloatType::F32)
    }
}
