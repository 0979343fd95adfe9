use crate::{
    Cpu, KernelError, Tensor,
    ops::elementwise,
    simd::{
        Kernel, Simd,
        slices::{self, Map},
    },
};
use lowbit_formats::DType;

pub(in crate::ops) struct Add;

impl Map<2> for Add {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, y]: [S::V; 2]) -> S::V {
        simd.add(x, y)
    }
}

pub(in crate::ops) fn add(cpu: &Cpu, x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    elementwise::map(cpu, Add, [x, y])
}

/// `y` `[D]` added to each row of `x` `[.., D]`.
pub(super) fn add_row(cpu: &Cpu, x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    let mut z = Tensor::empty(x.shape(), DType::F32, x.device());
    let (x, y, width) = (x.as_slice::<f32>()?, y.as_slice::<f32>()?, y.len());
    if width > 0 {
        cpu.for_each_rows(z.as_mut_slice()?, width, 2 * width, |first, z| {
            let x = &x[first * width..first * width + z.len()];
            cpu.isa().dispatch(AddRow { x, y, z });
        });
    }
    Ok(z)
}

struct AddRow<'a> {
    x: &'a [f32],
    y: &'a [f32],
    z: &'a mut [f32],
}

impl Kernel for AddRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let rows = self.x.chunks_exact(self.y.len()).zip(self.z.chunks_exact_mut(self.y.len()));
        for (x, z) in rows {
            slices::map(simd, &Add, [x, self.y], z);
        }
    }
}
