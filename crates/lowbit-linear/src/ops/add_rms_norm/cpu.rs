use crate::ops::add::cpu::Add;
use crate::ops::rms_norm::cpu::RmsNorm;
use crate::simd::{Kernel, Simd, slices};
use crate::{Cpu, KernelError, Tensor};
use lowbit_formats::DType;

/// Whole rows, each as long as the weight.
struct AddRmsNorm<'a> {
    h: &'a [f32],
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    sum: &'a mut [f32],
    y: &'a mut [f32],
}

impl Kernel for AddRmsNorm<'_> {
    type Output = ();

    /// Row by row: a row's sum is still in the nearest cache when its norm is computed.
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { weight, eps, .. } = self;
        let width = weight.len();
        let operands = self.h.chunks_exact(width).zip(self.x.chunks_exact(width));
        let results = self.sum.chunks_exact_mut(width).zip(self.y.chunks_exact_mut(width));
        for ((h, x), (sum, y)) in operands.zip(results) {
            slices::map(simd, &Add, [h, x], sum);
            RmsNorm { x: sum, gate: None, weight, eps, y }.run(simd);
        }
    }
}

/// The sum and its norm, all f32.
pub(super) fn add_rms_norm(
    cpu: &Cpu,
    h: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
) -> Result<(Tensor, Tensor), KernelError> {
    let [mut sum, mut y] = [(); 2].map(|()| Tensor::empty(h.shape(), DType::F32, h.device()));
    let (h, x, weight) = (h.as_slice::<f32>()?, x.as_slice::<f32>()?, weight.as_slice::<f32>()?);
    let width = weight.len();
    let (rows, cost) = (h.len() / width.max(1), 3 * width);
    let piece = (cpu.rows_per_task(rows, cost) * width).max(1);
    let results = sum.as_mut_slice()?.chunks_mut(piece).zip(y.as_mut_slice()?.chunks_mut(piece));
    let tasks = results.zip(h.chunks(piece).zip(x.chunks(piece))).collect();
    cpu.for_each_of(Cpu::work(rows * cost), tasks, |((sum, y), (h, x))| {
        cpu.isa().dispatch(AddRmsNorm { h, x, weight, eps, sum, y });
    });
    Ok((sum, y))
}
