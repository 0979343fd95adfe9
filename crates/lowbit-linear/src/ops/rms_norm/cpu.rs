use crate::{
    Cpu, KernelError, Tensor,
    simd::{
        Kernel, Simd,
        math::Math,
        slices::{self, Map},
    },
};
use lowbit_formats::DType;

/// Whole rows, each as long as the weight.
pub struct RmsNorm<'a> {
    pub x: &'a [f32],
    pub gate: Option<&'a [f32]>,
    pub weight: &'a [f32],
    pub eps: f32,
    pub y: &'a mut [f32],
}

/// A row's factor, `1 / sqrt(mean(x^2) + eps)`.
struct Scale(f32);

impl Map<2> for Scale {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, weight]: [S::V; 2]) -> S::V {
        simd.mul(simd.mul(x, simd.splat(self.0)), weight)
    }
}

impl Map<3> for Scale {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, weight, gate]: [S::V; 3]) -> S::V {
        simd.mul(self.apply(simd, [x, weight]), simd.silu(gate))
    }
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.weight.len();
        for (row, (x, y)) in self.x.chunks_exact(width).zip(self.y.chunks_exact_mut(width)).enumerate() {
            let scale = Scale(slices::reciprocal((slices::dot(simd, x, x) / width as f32 + self.eps).sqrt()));
            match self.gate {
                None => slices::map(simd, &scale, [x, self.weight], y),
                Some(gate) => {
                    let gate = &gate[row * width..(row + 1) * width];
                    slices::map(simd, &scale, [x, self.weight, gate], y);
                }
            }
        }
    }
}

pub(in crate::ops) fn rms_norm(
    cpu: &Cpu,
    x: &Tensor,
    gate: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<Tensor, KernelError> {
    let mut y = Tensor::empty(x.shape(), DType::F32, x.device());
    let (x, weight) = (x.as_slice::<f32>()?, weight.as_slice()?);
    let gate = gate.map(|gate| gate.as_slice::<f32>()).transpose()?;
    cpu.for_each_rows(y.as_mut_slice()?, weight.len(), weight.len(), |first, y| {
        let range = first * weight.len()..first * weight.len() + y.len();
        let gate = gate.map(|gate| &gate[range.clone()]);
        cpu.isa().dispatch(RmsNorm { x: &x[range], gate, weight, eps, y });
    });
    Ok(y)
}
