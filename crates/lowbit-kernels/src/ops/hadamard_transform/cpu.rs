use super::block;
use crate::{
    Cpu, KernelError, Tensor,
    simd::{Kernel, Simd},
};

pub(super) fn hadamard_transform(cpu: &Cpu, x: &Tensor) -> Result<Tensor, KernelError> {
    let mut y = Tensor::new(x.as_slice::<f32>()?, x.shape(), x.device())?;
    let width = x.dim(-1);
    let cost = width * (block(width).ilog2() as usize + 1);
    cpu.for_each_rows(y.as_mut_slice()?, width, cost, |_, y| {
        cpu.isa().dispatch(Blocks { y, size: block(width) });
    });
    Ok(y)
}

/// Blocks of `size` elements, transformed in place.
struct Blocks<'a> {
    y: &'a mut [f32],
    size: usize,
}

impl Kernel for Blocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let factor = (self.size as f32).sqrt().recip();
        for block in self.y.chunks_exact_mut(self.size) {
            let mut half = 1;
            while half < self.size {
                for pair in block.chunks_exact_mut(2 * half) {
                    let (left, right) = pair.split_at_mut(half);
                    for (left, right) in left.iter_mut().zip(right) {
                        (*left, *right) = (*left + *right, *left - *right);
                    }
                }
                half *= 2;
            }
            block.iter_mut().for_each(|y| *y *= factor);
        }
    }
}
