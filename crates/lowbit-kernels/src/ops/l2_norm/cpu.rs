use crate::{
    Cpu, KernelError, Tensor,
    simd::{
        Kernel, Simd,
        slices::{self, Scale},
    },
};
use lowbit_formats::DType;

struct Rows<'a> {
    x: &'a [f32],
    width: usize,
    eps: f32,
    y: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (x, y) in self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width)) {
            let length = (slices::dot(simd, x, x) + self.eps).sqrt();
            slices::map(simd, &Scale(slices::reciprocal(length)), [x], y);
        }
    }
}

pub(super) fn l2_norm(cpu: &Cpu, x: &Tensor, eps: f32) -> Result<Tensor, KernelError> {
    let mut y = Tensor::empty(x.shape(), DType::F32, x.device());
    let (width, x) = (x.dim(-1), x.as_slice::<f32>()?);
    cpu.for_each_rows(y.as_mut_slice()?, width, width, |first, y| {
        let x = &x[first * width..first * width + y.len()];
        cpu.isa().dispatch(Rows { x, width, eps, y });
    });
    Ok(y)
}
