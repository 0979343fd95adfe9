//! The code that the elementwise ops of two operands share: `add`, `mul` and `glu`.

#[cfg(feature = "gpu")]
pub(super) mod gpu;

use crate::{
    Cpu, KernelError, Tensor,
    simd::{
        Kernel, Simd,
        slices::{self, Map},
    },
};
use lowbit_formats::DType;

/// The element of y that is combined with an element of x.
#[cfg(feature = "gpu")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Broadcast {
    /// That of the same index: y has x's shape.
    None,
    /// That of the same row, in the last columns: rows of y are longer.
    Last,
    /// That of the same column: y is one row.
    Row,
    /// That of the same row: y has one column.
    Column,
}

struct Elementwise<'a, const N: usize, F> {
    f: &'a F,
    x: [&'a [f32]; N],
    y: &'a mut [f32],
}

impl<const N: usize, F: Map<N>> Kernel for Elementwise<'_, N, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        slices::map(simd, self.f, self.x, self.y);
    }
}

/// `y = f(x[0], .., x[N - 1])` on all threads. All are f32 tensors of one shape.
pub(super) fn map<const N: usize, F: Map<N> + Sync>(
    cpu: &Cpu,
    f: F,
    x: [&Tensor; N],
) -> Result<Tensor, KernelError> {
    let mut y = Tensor::empty(x[0].shape(), DType::F32, x[0].device());
    let mut slices: [&[f32]; N] = [&[]; N];
    for (slice, x) in slices.iter_mut().zip(x) {
        *slice = x.as_slice()?;
    }
    cpu.for_each_rows(y.as_mut_slice()?, 1, N, |first, y| {
        let x = slices.map(|x| &x[first..first + y.len()]);
        cpu.isa().dispatch(Elementwise { f: &f, x, y });
    });
    Ok(y)
}

/// `z = f(x, y)` where `y` is of x's shape, or `[D]` for each row of `x` `[.., D]`, on all threads.
/// All are f32.
pub(super) fn map_rows<F: Map<2> + Sync>(
    cpu: &Cpu,
    f: F,
    x: &Tensor,
    y: &Tensor,
) -> Result<Tensor, KernelError> {
    if x.shape() == y.shape() {
        return map(cpu, f, [x, y]);
    }
    let mut z = Tensor::empty(x.shape(), DType::F32, x.device());
    let (x, y, width) = (x.as_slice::<f32>()?, y.as_slice::<f32>()?, y.len());
    if width > 0 {
        cpu.for_each_rows(z.as_mut_slice()?, width, 2 * width, |first, z| {
            let x = &x[first * width..first * width + z.len()];
            cpu.isa().dispatch(EachRow { f: &f, x, y, z });
        });
    }
    Ok(z)
}

struct EachRow<'a, F> {
    f: &'a F,
    x: &'a [f32],
    y: &'a [f32],
    z: &'a mut [f32],
}

impl<F: Map<2>> Kernel for EachRow<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let rows = self.x.chunks_exact(self.y.len()).zip(self.z.chunks_exact_mut(self.y.len()));
        for (x, z) in rows {
            slices::map(simd, self.f, [x, self.y], z);
        }
    }
}
