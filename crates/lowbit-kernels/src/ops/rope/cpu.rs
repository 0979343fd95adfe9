use super::{Direction, Rope, RopeLayout};
use crate::{
    Cpu, KernelError, Tensor,
    ops::rms_norm::cpu::RmsNorm,
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

/// All heads of some tokens, normed before they are rotated if there is a norm.
struct Tokens<'a> {
    /// `[T, H, S]`, of whose columns the first D are read.
    x: &'a [f32],
    /// H and S.
    heads: [usize; 2],
    /// D.
    width: usize,
    norm: Option<(&'a [f32], f32)>,
    /// `[T, rotary_dim / 2]`
    cos: &'a [f32],
    sin: &'a [f32],
    layout: RopeLayout,
    /// `[T, H, D]`
    y: &'a mut [f32],
}

impl Kernel for Tokens<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, heads: [heads, columns], width, norm, cos, sin, layout, y } = self;
        let pairs = cos.len() * heads * width / y.len();
        let rows = x.chunks_exact(columns).zip(y.chunks_exact_mut(width));
        for (row, (x, y)) in rows.enumerate() {
            let x = &x[..width];
            match norm {
                None => y.copy_from_slice(x),
                Some((weight, eps)) => RmsNorm { x, gate: None, weight, eps, y }.run(simd),
            }
            let [cos, sin] = [cos, sin].map(|all| &all[row / heads * pairs..][..pairs]);
            match layout {
                RopeLayout::HalfSplit => half_split(&mut y[..2 * pairs], cos, sin),
                RopeLayout::Interleaved => interleaved(&mut y[..2 * pairs], cos, sin),
            }
        }
    }
}

#[inline(always)]
fn half_split(y: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = y.split_at_mut(cos.len());
    for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[inline(always)]
fn interleaved(y: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ([a, b], (cos, sin)) in y.as_chunks_mut::<2>().0.iter_mut().zip(cos.iter().zip(sin)) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// The rotation of the first `width` columns of f32 heads `[T, H, S]`, after the norm with a weight
/// and an eps if there is one.
pub(in crate::ops) fn rope(
    cpu: &Cpu,
    (x, width): (&Tensor, usize),
    positions: &[u32],
    norm: Option<(Tensor, f32)>,
    (rope, direction): (&Rope, Direction),
) -> Result<Tensor, KernelError> {
    let rotations = Rotations::of(rope, positions, direction);
    let heads = [x.dim(1), x.dim(2)];
    let mut y = Tensor::empty(&[x.dim(0), heads[0], width], DType::F32, x.device());
    let (x_row, row, pairs) = (heads[0] * heads[1], heads[0] * width, rope.inv_freq.len());
    let norm = match &norm {
        Some((weight, eps)) => Some((weight.as_slice::<f32>()?, *eps)),
        None => None,
    };
    let x = x.as_slice::<f32>()?;
    cpu.for_each_rows(y.as_mut_slice()?, row, row, |first, y| {
        let tokens = first..first + y.len() / row;
        let [cos, sin] =
            [&rotations.cos, &rotations.sin].map(|all| &all[tokens.start * pairs..tokens.end * pairs]);
        let x = &x[tokens.start * x_row..tokens.end * x_row];
        cpu.isa().dispatch(Tokens { x, heads, width, norm, cos, sin, layout: rope.layout, y });
    });
    Ok(y)
}
