//! The largest element of each row on a CPU: the maximum of each block first, then the first index
//! that has the largest.

use crate::{
    Cpu, KernelError, Tensor,
    ops::Check,
    simd::{Kernel, Simd},
};
use lowbit_formats::DType;

/// Elements whose maximum is found together.
pub(crate) const BLOCK: usize = 64;

/// The maximum of each [`BLOCK`] of a row; NaN if an element is NaN or positive infinity.
struct Maxima<'a> {
    x: &'a [f32],
    maxima: &'a mut [f32],
}

impl Kernel for Maxima<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (zero, infinity) = (simd.splat(0.0), simd.splat(f32::INFINITY));
        for (x, y) in self.x.chunks(BLOCK).zip(self.maxima) {
            let (mut max, mut bad) = (simd.splat(f32::NEG_INFINITY), zero);
            for x in x.chunks(S::LANES) {
                let x =
                    if x.len() == S::LANES { simd.load(x) } else { simd.load_partial(x, f32::NEG_INFINITY) };
                max = simd.max(x, max);
                bad = simd.select_lt(x, infinity, bad, infinity);
            }
            *y = if simd.max_lane(bad) > 0.0 { f32::NAN } else { simd.max_lane(max) };
        }
    }
}

/// The maximum of each [`BLOCK`] of `x`.
///
/// # Errors
/// [`KernelError::Value`] in the name of `operand` when an element is NaN or infinite, or none is
/// finite.
pub(crate) fn maxima(
    check: Check,
    operand: &'static str,
    cpu: &Cpu,
    x: &[f32],
) -> Result<Vec<f32>, KernelError> {
    let mut maxima = vec![f32::NAN; x.len().div_ceil(BLOCK)];
    cpu.for_each_rows(&mut maxima, 1, BLOCK, |first, maxima| {
        let (start, len) = (first * BLOCK, maxima.len() * BLOCK);
        let x = &x[start..x.len().min(start + len)];
        cpu.isa().dispatch(Maxima { x, maxima });
    });
    if let Some(block) = maxima.iter().position(|max| max.is_nan()) {
        let i = (block * BLOCK..).find(|&i| x[i] == f32::INFINITY || x[i].is_nan()).expect("in that block");
        return Err(check.value(operand, format!("{} at {i}", x[i]), "numbers are wanted"));
    }
    if maxima.iter().all(|&max| max == f32::NEG_INFINITY) {
        return Err(check.value(operand, "-inf everywhere", "one must be finite"));
    }
    Ok(maxima)
}

/// The index of the first maximum, from the blocks' maxima.
pub(crate) fn first_greatest(x: &[f32], maxima: &[f32]) -> usize {
    let mut block = 0;
    for (i, max) in maxima.iter().enumerate() {
        if *max > maxima[block] {
            block = i;
        }
    }
    (block * BLOCK..).find(|&i| x[i] == maxima[block]).expect("a block holds its greatest")
}

pub(super) fn argmax(check: Check, cpu: &Cpu, x: &Tensor) -> Result<Tensor, KernelError> {
    let width = x.dim(-1);
    let mut ids = Tensor::empty(&[x.len() / width], DType::U32, x.device());
    for (x, id) in x.as_slice::<f32>()?.chunks_exact(width).zip(ids.as_mut_slice::<u32>()?) {
        *id = first_greatest(x, &maxima(check, "x", cpu, x)?) as u32;
    }
    Ok(ids)
}
