//! A step of Adam on a CPU.

use super::{AdamStep, BETA1, BETA2, EPS, Factors};
use crate::Cpu;

/// Numbers of a task.
const TASK: usize = 1 << 14;

/// A step of numbers in the host's memory, on this thread: [`adam`](super::adam()) of their values,
/// averages and averages of squares.
pub fn adam_slices([values, means, squares]: [&mut [f32]; 3], gradient: &[f32], step: AdamStep) {
    let Factors { rate, mean: mean_factor, square: square_factor } = step.factors();
    let averages = means.iter_mut().zip(squares);
    for ((value, (mean, square)), &gradient) in values.iter_mut().zip(averages).zip(gradient) {
        *mean = BETA1 * *mean + (1.0 - BETA1) * gradient;
        *square = BETA2 * *square + (1.0 - BETA2) * gradient * gradient;
        *value -= rate * (*mean * mean_factor) / ((*square * square_factor).sqrt() + EPS);
    }
}

pub(super) fn adam(cpu: &Cpu, [values, means, squares]: [&mut [f32]; 3], gradient: &[f32], step: AdamStep) {
    let averages = means.chunks_mut(TASK).zip(squares.chunks_mut(TASK));
    let tasks = values.chunks_mut(TASK).zip(averages).zip(gradient.chunks(TASK));
    cpu.for_each(tasks.collect(), |((values, (means, squares)), gradient)| {
        adam_slices([values, means, squares], gradient, step);
    });
}
