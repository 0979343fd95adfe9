//! A step of Adam with bias correction.
//!
//! Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), algorithm 1; torch
//! 2.15 `torch.optim.Adam` without weight decay.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use cpu::adam_slices;

use super::Check;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;
const EPS: f32 = 1e-8;

/// Numbers that are learned, with the averages that are kept of their gradients and of the squares
/// of these: f32, of one shape.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Adam {
    pub value: Tensor,
    pub mean: Tensor,
    pub square: Tensor,
}

/// One step of all numbers that are learned.
#[derive(Clone, Copy, Debug)]
pub struct AdamStep {
    /// The step of a number whose gradient has been the same for long.
    pub rate: f32,
    /// Steps taken so far, with this one: from 1.
    pub count: u32,
}

/// A step's factors, in f32.
#[derive(Clone, Copy, Debug)]
struct Factors {
    rate: f32,
    /// The factors of the averages, which make up for their start at 0.
    mean: f32,
    square: f32,
}

impl AdamStep {
    fn factors(self) -> Factors {
        let unbias = |beta: f32| 1.0 / (1.0 - f64::from(beta).powi(self.count as i32)) as f32;
        Factors { rate: self.rate, mean: unbias(BETA1), square: unbias(BETA2) }
    }
}

/// Takes a step against `gradient`, in place:
///
/// ```text
/// mean   = 0.9 mean + 0.1 gradient
/// square = 0.999 square + 0.001 gradient^2
/// value -= rate * (mean / (1 - 0.9^count)) / (sqrt(square / (1 - 0.999^count)) + 1e-8)
/// ```
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `value`, `mean`, `square` | any | f32 |
/// | `gradient` | the same | f32 |
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Device`] for operands that do
/// not fit the table; [`KernelError::Value`] for a count of 0.
pub fn adam(state: &mut Adam, gradient: &Tensor, step: AdamStep) -> Result<(), KernelError> {
    let check = Check("adam");
    let Adam { value, mean, square } = state;
    check.dtype("value", value, DType::F32)?;
    for (name, operand) in [("mean", &*mean), ("square", &*square), ("gradient", gradient)] {
        check.dtype(name, operand, DType::F32)?;
        check.shape(name, operand, value.shape(), || "value".into())?;
        check.same_device(name, operand.device(), value.device())?;
    }
    if step.count == 0 {
        return Err(check.value("count", 0, "steps are counted from 1"));
    }
    match value.device().clone() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, &gpu, [value, mean, square], gradient, step.factors()),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match gpu {},
        Device::Cpu(cpu) => {
            let gradient = gradient.as_slice()?;
            let state = [value.as_mut_slice()?, mean.as_mut_slice()?, square.as_mut_slice()?];
            cpu::adam(&cpu, state, gradient, step);
            Ok(())
        }
    }
}
