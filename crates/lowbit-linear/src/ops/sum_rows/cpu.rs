//! Sums over rows on a CPU: a task takes [`ROWS`] of them.

use super::ROWS;
use crate::simd::{Kernel, Simd};
use crate::{Cpu, KernelError, Tensor};
use lowbit_formats::DType;

/// Some whole rows, as long as the sums that they are added to.
struct Rows<'a> {
    x: &'a [f32],
    sums: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in self.x.chunks_exact(self.sums.len()) {
            self.sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }
}

/// See [`super::sum_rows`]; x is f32 and not empty.
pub(super) fn sum_rows(cpu: &Cpu, x: &Tensor, width: usize) -> Result<Tensor, KernelError> {
    let mut y = Tensor::allocate(&[width], DType::F32, x.device())?;
    let blocks = x.as_slice::<f32>()?.chunks(ROWS * width).collect();
    sum_blocks(cpu, blocks, y.as_mut_slice()?, |_, x, sums| cpu.isa().dispatch(Rows { x, sums }));
    Ok(y)
}

/// Calls `f(block, task, sums)` for every one of `tasks`, on all threads, with sums of zero that it
/// adds to; `total` becomes all of them, added in the order of the tasks.
pub(in crate::ops) fn sum_blocks<T: Send>(
    cpu: &Cpu,
    tasks: Vec<T>,
    total: &mut [f32],
    f: impl Fn(usize, T, &mut [f32]) + Sync + Send,
) {
    let mut partials = vec![vec![0.0; total.len()]; tasks.len()];
    let tasks = tasks.into_iter().zip(&mut partials).enumerate().collect();
    cpu.for_each(tasks, |(block, (task, sums)): (usize, (T, &mut Vec<f32>))| f(block, task, sums));
    total.fill(0.0);
    for partial in &partials {
        total.iter_mut().zip(partial).for_each(|(total, x)| *total += x);
    }
}
