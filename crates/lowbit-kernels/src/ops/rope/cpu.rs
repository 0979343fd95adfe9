use super::{Direction, Rope, RopeLayout};
use crate::{
    Cpu, KernelError, Tensor,
    simd::{Kernel, Simd},
};
use lowbit_formats::DType;
use std::sync::{Arc, Mutex, PoisonError};

/// The rotations that were computed last: all layers of a pass have the same positions.
#[derive(Debug, Default)]
pub(super) struct Last(Mutex<Option<Arc<Rotations>>>);

impl Clone for Last {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for Last {
    /// It says nothing about the embedding.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

#[derive(Debug)]
struct Rotations {
    positions: Vec<u32>,
    direction: Direction,
    /// `[T, rotary_dim / 2]`, with the attention factor.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rotations {
    fn of(rope: &Rope, positions: &[u32], direction: Direction) -> Arc<Self> {
        let mut last = rope.last.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) =
            last.as_ref().filter(|last| last.positions == positions && last.direction == direction)
        {
            return last.clone();
        }
        let sign = if direction == Direction::Forth { 1.0 } else { -1.0 };
        let angles = positions.iter().flat_map(|&t| rope.inv_freq.iter().map(move |f| t as f32 * f));
        let rotation = |angle: f32| {
            let (sin, cos) = angle.sin_cos();
            (cos * rope.attention_factor, sign * sin * rope.attention_factor)
        };
        let (cos, sin) = angles.map(rotation).unzip();
        let new = Arc::new(Self { positions: positions.to_vec(), direction, cos, sin });
        *last = Some(new.clone());
        new
    }
}

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
    let rotations = Rotations::of(rope, positions, direction);
    let mut y = Tensor::empty(x.shape(), DType::F32, x.device());
    let (width, row, pairs) = (x.dim(2), x.dim(1) * x.dim(2), rope.inv_freq.len());
    let x = x.as_slice::<f32>()?;
    cpu.for_each_rows(y.as_mut_slice()?, row, row, |first, y| {
        for (t, y) in (first..).zip(y.chunks_exact_mut(row)) {
            let [cos, sin] = [&rotations.cos, &rotations.sin].map(|all| &all[t * pairs..][..pairs]);
            let (x, layout) = (&x[t * row..(t + 1) * row], rope.layout);
            cpu.isa().dispatch(Token { x, width, cos, sin, layout, y });
        }
    });
    Ok(y)
}
