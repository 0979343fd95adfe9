//! Output gates on a CPU: a gate per element, or one per row.

use crate::{
    Cpu, KernelError, Tensor,
    ops::elementwise,
    simd::{
        Kernel, Simd,
        math::Math,
        slices::{self, Map, Scale},
    },
};
use lowbit_formats::DType;

struct SigmoidMul;

impl Map<2> for SigmoidMul {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, gate]: [S::V; 2]) -> S::V {
        simd.mul(x, simd.sigmoid(gate))
    }
}

pub(super) fn sigmoid_mul(cpu: &Cpu, x: &Tensor, gate: &Tensor) -> Result<Tensor, KernelError> {
    elementwise::map(cpu, SigmoidMul, [x, gate])
}

/// One gate per row of `width` elements.
struct Rows<'a> {
    x: &'a [f32],
    gate: &'a [f32],
    y: &'a mut [f32],
    width: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let rows = self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width));
        for ((x, y), &gate) in rows.zip(self.gate) {
            let mut sigmoid = [0.0];
            simd.store_partial(simd.sigmoid(simd.splat(gate)), &mut sigmoid);
            slices::map(simd, &Scale(sigmoid[0]), [x], y);
        }
    }
}

pub(super) fn sigmoid_mul_rows(cpu: &Cpu, x: &Tensor, gate: &Tensor) -> Result<Tensor, KernelError> {
    let mut y = Tensor::empty(x.shape(), DType::F32, x.device());
    let (width, x, gate) = (x.dim(-1), x.as_slice::<f32>()?, gate.as_slice::<f32>()?);
    cpu.for_each_rows(y.as_mut_slice()?, width, width, |first, y| {
        let x = &x[first * width..first * width + y.len()];
        cpu.isa().dispatch(Rows { x, gate: &gate[first..], y, width });
    });
    Ok(y)
}
