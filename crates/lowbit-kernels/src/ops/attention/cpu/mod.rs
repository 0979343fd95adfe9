//! One pass over a stretch of keys and values serves a block of query rows: the tokens of a block, times the query
//! heads that read one key head. Long contexts are cut into several stretches, whose softmaxes are put together at
//! the end: that is how the one token of a decode step keeps all threads busy.

mod pass;
mod tile;

use super::AttentionParams;
use crate::{
    Cpu, KernelError, Tensor,
    cast::{Float, with_float},
    simd::{Kernel, Simd, math},
};
use lowbit_formats::{DType, FloatType};
use pass::Pass;
use std::ops::Range;

/// Query rows of a block: four vectors of 16 lanes.
const ROWS: usize = 64;
/// A stretch of fewer keys is not worth a task of its own.
const STRETCH: usize = 256;

/// The operands' sizes, and how the work is cut: task by task over the key heads, blocks of tokens and stretches.
struct Plan<'a> {
    positions: &'a [u32],
    params: &'a AttentionParams,
    /// Query heads that read one key head.
    group: usize,
    heads: usize,
    width: usize,
    value_width: usize,
    /// Tokens of a block; the last one may have fewer.
    block: usize,
    /// Stretches that the keys of a block are cut into.
    stretches: usize,
}

impl Plan<'_> {
    fn blocks(&self) -> usize {
        self.positions.len().div_ceil(self.block)
    }

    /// Size of what a stretch gives for a row: the sums of values, the greatest score and the sum of weights.
    fn partial(&self) -> usize {
        self.value_width + 2
    }

    /// Partials of a task.
    fn rows(&self) -> usize {
        self.block * self.group
    }

    /// The keys that any token of `tokens` sees.
    fn keys(&self, tokens: Range<usize>) -> Range<usize> {
        let visible = self.positions[tokens].iter().map(|&position| self.params.visible(position));
        visible.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    fn tokens(&self, block: usize) -> Range<usize> {
        block * self.block..self.positions.len().min((block + 1) * self.block)
    }

    /// The most keys that a block sees.
    fn longest(&self) -> usize {
        (0..self.blocks()).map(|block| self.keys(self.tokens(block)).len()).max().unwrap_or(0)
    }

    /// Where row `row` of `y` has its partial of a stretch.
    fn place(&self, row: usize, stretch: usize) -> usize {
        let (t, h) = (row / (self.heads * self.group), row % (self.heads * self.group));
        let task = (h / self.group * self.blocks() + t / self.block) * self.stretches + stretch;
        (task * self.rows() + t % self.block * self.group + h % self.group) * self.partial()
    }
}

pub(super) fn attention(
    cpu: &Cpu,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    positions: &[u32],
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    let mut y = Tensor::allocate(&[q.dim(0), q.dim(1), v.dim(2)], DType::F32, q.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let group = q.dim(1) / k.dim(0);
    let block = (ROWS / group).clamp(1, positions.len());
    let (heads, width, value_width) = (k.dim(0), q.dim(2), v.dim(2));
    let mut plan = Plan { positions, params, group, heads, width, value_width, block, stretches: 1 };
    if cpu.threads() > 1 {
        // Four tasks a thread even out what some take longer.
        let wanted = (4 * cpu.threads()).div_ceil(heads * plan.blocks());
        plan.stretches = wanted.min(plan.longest().div_ceil(STRETCH));
    }
    let partials = with_float!(FloatType::from_dtype(k.dtype()).expect("checked"), T => {
        plan.partials::<T>(cpu, q.as_slice()?, k.as_slice()?, v.as_slice()?)
    });
    cpu.for_each_rows(y.as_mut_slice()?, value_width, value_width * plan.stretches, |first, y| {
        cpu.isa().dispatch(Merge { plan: &plan, partials: &partials, first, y });
    });
    Ok(y)
}

impl Plan<'_> {
    fn partials<T: Float>(&self, cpu: &Cpu, q: &[f32], k: &[T], v: &[T]) -> Vec<f32> {
        let (blocks, longest) = (self.blocks(), self.longest());
        let size = self.rows() * self.partial();
        let mut partials = vec![0.0; self.heads * blocks * self.stretches * size];
        let cost = self.rows() * longest.div_ceil(self.stretches) * (self.width + self.value_width);
        let capacity = k.len() / self.heads / self.width;
        cpu.for_each_rows(&mut partials, size, cost, |first, partials| {
            for (task, partials) in (first..).zip(partials.chunks_exact_mut(size)) {
                let (block, stretch) = (task / self.stretches, task % self.stretches);
                let (head, tokens) = (block / blocks, self.tokens(block % blocks));
                let keys = self.keys(tokens.clone());
                let len = keys.len().div_ceil(self.stretches);
                let cut = |stretch: usize| keys.end.min(keys.start + stretch * len);
                let keys = cut(stretch)..cut(stretch + 1);
                let head_of = |width: usize| head * capacity * width..(head + 1) * capacity * width;
                let (k, v) = (&k[head_of(self.width)], &v[head_of(self.value_width)]);
                cpu.isa().dispatch(Pass { plan: self, q, k, v, head, tokens, keys, partials });
            }
        });
        partials
    }
}

/// Puts the stretches of some rows of `y` together.
struct Merge<'a> {
    plan: &'a Plan<'a>,
    partials: &'a [f32],
    first: usize,
    y: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { plan, partials, first, y } = self;
        let width = plan.value_width;
        for (row, y) in (first..).zip(y.chunks_exact_mut(width)) {
            let partial = |stretch| &partials[plan.place(row, stretch)..][..plan.partial()];
            let max = (0..plan.stretches).map(|s| partial(s)[width]).fold(f32::MIN, f32::max);
            let mut total = 0.0;
            y.fill(0.0);
            for stretch in 0..plan.stretches {
                let partial = partial(stretch);
                let weight = math::exp(partial[width] - max);
                total += weight * partial[width + 1];
                y.iter_mut().zip(partial).for_each(|(y, x)| *y += weight * x);
            }
            y.iter_mut().for_each(|y| *y /= total);
        }
    }
}
