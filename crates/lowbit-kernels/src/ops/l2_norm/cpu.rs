use super::{L2Norm, L2NormConvention};
use crate::{
    Cpu, KernelError, Tensor,
    simd::{
        Kernel, Simd,
        slices::{self, Scale},
    },
};
use lowbit_formats::DType;

impl L2Norm {
    /// The divisor of a row of `width` elements whose squares add up to `sum`.
    #[inline(always)]
    pub(super) fn length(&self, sum: f32, width: usize) -> f32 {
        match self.convention {
            L2NormConvention::Sum => (sum + self.eps).sqrt(),
            L2NormConvention::Mean => (sum + width as f32 * self.eps).sqrt(),
            // Not `f32::max`, which would hide a NaN.
            L2NormConvention::Max if sum.sqrt() < self.eps => self.eps,
            L2NormConvention::Max => sum.sqrt(),
        }
    }
}

struct Rows<'a> {
    x: &'a [f32],
    width: usize,
    params: &'a L2Norm,
    y: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (x, y) in self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width)) {
            let length = self.params.length(slices::dot(simd, x, x), self.width);
            slices::map(simd, &Scale(slices::reciprocal(length)), [x], y);
        }
    }
}

pub(super) fn l2_norm(cpu: &Cpu, x: &Tensor, params: &L2Norm) -> Result<Tensor, KernelError> {
    let mut y = Tensor::empty(x.shape(), DType::F32, x.device());
    let (width, x) = (x.dim(-1), x.as_slice::<f32>()?);
    cpu.for_each_rows(y.as_mut_slice()?, width, width, |first, y| {
        let x = &x[first * width..first * width + y.len()];
        cpu.isa().dispatch(Rows { x, width, params, y });
    });
    Ok(y)
}
