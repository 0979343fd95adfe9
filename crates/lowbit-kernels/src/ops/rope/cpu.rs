use super::{Direction, Rope, RopeLayout};
use crate::{
    Cpu, KernelError, Tensor,
    simd::{Kernel, Simd},
};
use lowbit_formats::DType;

/// All heads of one token.
struct Token<'a> {
    x: &'a [f32],
    width: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    layout: RopeLayout,
    y: &'a mut [f32],
}

impl Kernel for Token<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let rotary = self.cos.len() * 2;
        for (x, y) in self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width)) {
            let (x, rest) = x.split_at(rotary);
            let (y, copied) = y.split_at_mut(rotary);
            copied.copy_from_slice(rest);
            match self.layout {
                RopeLayout::HalfSplit => half_split(x, self.cos, self.sin, y),
                RopeLayout::Interleaved => interleaved(x, self.cos, self.sin, y),
            }
        }
    }
}

#[inline(always)]
fn half_split(x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
    let (xa, xb) = x.split_at(cos.len());
    let (ya, yb) = y.split_at_mut(cos.len());
    let (xb, sin, yb) = (&xb[..cos.len()], &sin[..cos.len()], &mut yb[..cos.len()]);
    for i in 0..cos.len() {
        ya[i] = xa[i] * cos[i] - xb[i] * sin[i];
        yb[i] = xb[i] * cos[i] + xa[i] * sin[i];
    }
}

#[inline(always)]
fn interleaved(x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
    let pairs = x.as_chunks::<2>().0.iter().zip(y.as_chunks_mut::<2>().0);
    for (([xa, xb], [ya, yb]), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
        *ya = xa * cos - xb * sin;
        *yb = xb * cos + xa * sin;
    }
}

pub(super) fn rope(
    cpu: &Cpu,
    x: &Tensor,
    positions: &[u32],
    (rope, direction): (&Rope, Direction),
) -> Result<Tensor, KernelError> {
    let sign = if direction == Direction::Forth { 1.0 } else { -1.0 };
    let mut y = Tensor::empty(x.shape(), DType::F32, x.device());
    let (width, row) = (x.dim(2), x.dim(1) * x.dim(2));
    let (x, pairs) = (x.as_slice::<f32>()?, rope.inv_freq.len());
    // A cosine and sine cost about as much as sixty multiplications.
    cpu.for_each_rows(y.as_mut_slice()?, row, row + 60 * pairs, |first, y| {
        let (mut cos, mut sin) = (vec![0.0; pairs], vec![0.0; pairs]);
        for (t, y) in (first..).zip(y.chunks_exact_mut(row)) {
            for ((cos, sin), f) in cos.iter_mut().zip(&mut sin).zip(&rope.inv_freq) {
                let (s, c) = (positions[t] as f32 * f).sin_cos();
                (*cos, *sin) = (c * rope.attention_factor, sign * s * rope.attention_factor);
            }
            let (x, layout) = (&x[t * row..(t + 1) * row], rope.layout);
            cpu.isa().dispatch(Token { x, width, cos: &cos, sin: &sin, layout, y });
        }
    });
    Ok(y)
}
