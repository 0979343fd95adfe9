use crate::tape::{Gradients, Parameters, Tape, Weight};
use crate::{Model, ModelError};
use lowbit_formats::{DType, FloatType};
use lowbit_kernels::ops::{self, DistillationLoss, OutputDistillation, OutputDistillationGradient};
use lowbit_kernels::{Device, KernelError, Tensor};
use std::ops::Range;
use std::rc::Rc;

/// Logits that exist at a time, of the student and of the teacher: 64 MB each.
const LOGITS: usize = 1 << 24;

/// Distillation of one model into another: the mean over tokens of the Kullback-Leibler divergence of the student's next-token
/// distribution from the teacher's, see [`distillation_loss`](ops::distillation_loss()).
#[derive(Clone, Copy, Debug)]
pub struct Distillation<'a> {
    student: &'a Model,
    teacher: &'a Model,
    temperature: f32,
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
    /// [`ModelError::Vocabulary`] for models of different vocabularies; [`KernelError::Unsupported`] for a student on a GPU, where ops
    /// have no gradients.
    pub fn new(student: &'a Model, teacher: &'a Model, temperature: f32) -> Result<Self, ModelError> {
        let sizes = [student, teacher].map(|model| model.config().vocab_size);
        if sizes[0] != sizes[1] {
            return Err(ModelError::Vocabulary { model: sizes[0], teacher: sizes[1] });
        }
        if let Device::Gpu(gpu) = student.device() {
            return Err(KernelError::Unsupported { op: "distillation", device: gpu.to_string() }.into());
        }
        Ok(Self { student, teacher, temperature })
    }

    /// What the student's parameters change, over the texts of `batch`: the gradients of `dkl` times the sum of the tokens'
    /// divergences. `parameters` are the student's current ones.
    ///
    /// # Errors
    /// As [`Model::forward_batch`]; those of the ops' gradients: [`KernelError::Unsupported`] for a student that was not loaded
    /// [exactly](crate::Target::with_exact).
    pub fn gradients(
        &self,
        batch: &[&[u32]],
        parameters: &Rc<Parameters>,
        dkl: f32,
    ) -> Result<Distilled, ModelError> {
        let tape = Tape::new(parameters.clone());
        let x = self.student.normed(batch, Some(&tape))?;
        let teacher = self.teacher.normed(batch, None)?;
        let head = self.student.output(parameters)?;
        let params =
            OutputDistillation { temperature: self.temperature, block: self.block(), dweight: head.wanted };
        let dkl = Tensor::new(&vec![dkl; x.dim(0)], &[x.dim(0)], self.student.device())?;
        let teacher_head = self.teacher.output(&Parameters::new())?;
        let logits = |rows: Range<usize>| teacher_head.logits(teacher.tensor(), rows);
        let OutputDistillationGradient { kl, dx, dweight } =
            ops::output_distillation(x.tensor(), &head.value, &dkl, logits, &params)?;
        let mut gradients = tape.backward(&[(&x, &dx)])?;
        if let Some(dweight) = dweight {
            gradients.add_parameter(&head.name, dweight)?;
        }
        Ok(Distilled { kl: sum(&kl)?, gradients })
    }

    /// The sum over the tokens of `batch` of their divergence.
    ///
    /// # Errors
    /// As [`Model::forward_batch`].
    pub fn kl(&self, batch: &[&[u32]], parameters: &Rc<Parameters>) -> Result<f64, ModelError> {
        // A tape is what computes with other parameters than the model's. Nobody asks this one for gradients.
        let x = self.student.normed(batch, Some(&Tape::new(parameters.clone())))?;
        let teacher = self.teacher.normed(batch, None)?;
        let (head, mut total) = (self.student.output(parameters)?, 0.0);
        let teacher_head = self.teacher.output(&Parameters::new())?;
        for start in (0..x.dim(0)).step_by(self.block()) {
            let rows = start..x.dim(0).min(start + self.block());
            let dkl = Tensor::allocate_zeros(&[rows.len()], DType::F32, x.tensor().device())?;
            let student = head.logits(x.tensor(), rows.clone())?;
            let teacher = teacher_head.logits(teacher.tensor(), rows)?;
            let DistillationLoss { kl, .. } =
                ops::distillation_loss(&student, &teacher, &dkl, self.temperature)?;
            total += sum(&kl)?;
        }
        Ok(total)
    }

    /// Tokens whose logits exist at a time.
    fn block(&self) -> usize {
        (LOGITS / self.student.config().vocab_size.max(1)).max(1)
    }
}

impl Weight {
    /// The logits of some rows of what the output layer reads.
    fn logits(&self, x: &Tensor, rows: Range<usize>) -> Result<Tensor, KernelError> {
        ops::quantized_matmul_to(&x.rows(rows.start, rows.end)?, &self.value, FloatType::F32)
    }
}

fn sum(kl: &Tensor) -> Result<f64, KernelError> {
    Ok(kl.as_slice::<f32>()?.iter().map(|&kl| f64::from(kl)).sum())
}
