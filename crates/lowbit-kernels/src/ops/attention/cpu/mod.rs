//! One pass over a stretch of keys and values serves a block of query rows: the tokens of a block,
//! times the query heads that read one key head. Long contexts are cut into several stretches,
//! whose softmaxes are put together at the end: that is how the one token of a decode step keeps
//! all threads busy.

mod pass;
mod stream;
mod tile;
#[cfg(any(test, target_arch = "x86_64"))]
mod tiled;

use super::AttentionParams;
#[cfg(target_arch = "x86_64")]
use crate::simd::Amx;
#[cfg(any(test, target_arch = "x86_64"))]
use crate::simd::tiles::TileUnit;
use crate::{
    Cpu, KernelError, Tensor,
    cast::with_float,
    ops::cache_rows::{CacheType, Int8, Stored},
    simd::{
        Kernel, Simd,
        math::{self, Math},
        slices::{self, Scale},
    },
};
use lowbit_formats::{DType, FloatType};
use pass::Pass;
use std::{ops::Range, sync::Arc};
use stream::Stream;
#[cfg(any(test, target_arch = "x86_64"))]
use tiled::Tiled;

/// Query rows of a block: four vectors of 16 lanes.
const ROWS: usize = 64;
/// The most query rows of a block in tiles: their queries and sums stay in the second-level cache.
#[cfg(any(test, target_arch = "x86_64"))]
const TILED_ROWS: usize = 512;
/// Fewer query rows than this gain nothing by tiles.
#[cfg(target_arch = "x86_64")]
const LEAST_TILED_ROWS: usize = 16;
/// A stretch of fewer keys is not worth a task of its own.
const STRETCH: usize = 256;
/// Tasks per thread, where there are enough keys.
const TASKS: usize = 4;
/// Products that a thread does in a nanosecond, about.
const RATE: usize = 60;

/// The operands' sizes, and how the work is cut: task by task over the key heads, blocks of tokens
/// and stretches.
struct Plan<'a> {
    positions: &'a [u32],
    /// Of each query head, if there are any.
    sinks: Option<&'a [f32]>,
    params: &'a AttentionParams,
    /// Query heads that read one key head.
    group: usize,
    heads: usize,
    /// Keys of a head.
    capacity: usize,
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

    /// Size of what a stretch gives for a row: the sums of values, the greatest score and the sum
    /// of weights.
    fn partial(&self) -> usize {
        self.value_width + 2
    }

    /// Partials of a task.
    fn rows(&self) -> usize {
        self.block * self.group
    }

    /// The keys that any token of `tokens` sees.
    fn keys(&self, tokens: Range<usize>) -> Range<usize> {
        let visible = self.positions[tokens].iter().map(|&position| self.visible(position));
        visible.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// The keys that a query at `position` sees.
    fn visible(&self, position: u32) -> Range<usize> {
        self.params.visible(position, self.capacity)
    }

    fn tokens(&self, block: usize) -> Range<usize> {
        block * self.block..self.positions.len().min((block + 1) * self.block)
    }

    /// The most keys that a block sees.
    fn longest(&self) -> usize {
        (0..self.blocks()).map(|block| self.keys(self.tokens(block)).len()).max().unwrap_or(0)
    }

    /// The term that the sink of query head `head` adds to a sum of weights relative to `max`.
    #[inline(always)]
    fn sink(&self, head: usize, max: f32) -> f32 {
        self.sinks.map_or(0.0, |sinks| math::exp(sinks[head] - max))
    }

    /// The place of the partial of row `row` of `y` in a stretch.
    fn place(&self, row: usize, stretch: usize) -> usize {
        let (t, h) = (row / (self.heads * self.group), row % (self.heads * self.group));
        let task = (h / self.group * self.blocks() + t / self.block) * self.stretches + stretch;
        (task * self.rows() + t % self.block * self.group + h % self.group) * self.partial()
    }
}

/// One key head's part of a stretch of keys, for the query rows of some tokens.
struct Task<'a, T> {
    plan: &'a Plan<'a>,
    /// `[T, Hq, D]`.
    q: &'a [f32],
    /// This head's rows of D values.
    k: &'a [T],
    /// This head's rows of Dv values.
    v: &'a [T],
    head: usize,
    tokens: Range<usize>,
    keys: Range<usize>,
    output: Output<'a>,
}

impl<'a, T> Task<'a, T> {
    /// Its query rows: those of its tokens' query heads that read this key head, token by token.
    fn rows(&self) -> usize {
        self.tokens.len() * self.plan.group
    }

    /// Row `index` of them.
    #[inline(always)]
    fn query(&self, index: usize) -> &'a [f32] {
        let Plan { group, heads, width, .. } = *self.plan;
        let row = ((self.tokens.start + index / group) * heads + self.head) * group + index % group;
        &self.q[row * width..][..width]
    }
}

/// Bends scores, whole vectors of them, towards `cap`, if there is one.
#[inline(always)]
pub(super) fn bend<S: Simd>(simd: S, scores: &mut [f32], cap: Option<f32>) {
    let Some(cap) = cap else { return };
    let (cap, inverse) = (simd.splat(cap), simd.splat(1.0 / cap));
    for scores in scores.chunks_exact_mut(S::LANES) {
        let bent = simd.tanh(simd.mul(simd.load(scores), inverse));
        simd.store(simd.mul(cap, bent), scores);
    }
}

/// The destination of a task's rows.
enum Output<'a> {
    /// The rows of the result, and their sinks if there are any: the task sees all of their keys.
    Whole(Vec<(&'a mut [f32], Option<f32>)>),
    /// Partials, as long as [`Plan::partial`] says.
    Stretch(&'a mut [f32]),
}

impl Output<'_> {
    /// Writes a row: `sums` of weighted values, the greatest score, and the sum of weights.
    #[inline(always)]
    fn write<S: Simd>(&mut self, simd: S, row: usize, sums: &[f32], [max, total]: [f32; 2]) {
        match self {
            Self::Whole(rows) => {
                let (row, sink) = &mut rows[row];
                let total = sink.map_or(total, |sink| total + math::exp(sink - max));
                slices::map(simd, &Scale(1.0 / total), [sums], row);
            }
            Self::Stretch(partials) => {
                let partial = &mut partials[row * (sums.len() + 2)..][..sums.len() + 2];
                partial[..sums.len()].copy_from_slice(sums);
                partial[sums.len()..].copy_from_slice(&[max, total]);
            }
        }
    }
}

/// The type that the operands of scores and sums are rounded to, for this many query rows per key
/// head.
pub(super) fn rounded(
    cpu: &Cpu,
    cache: CacheType,
    rows: usize,
    params: &AttentionParams,
) -> Option<FloatType> {
    #[cfg(target_arch = "x86_64")]
    let on_tiles = tiles(cpu, cache.dtype(), rows, params).is_some();
    #[cfg(not(target_arch = "x86_64"))]
    let (on_tiles, _) = (false, (cpu, cache, rows, params));
    on_tiles.then_some(FloatType::BF16)
}

/// The unit that multiplies tiles for as many query rows per key head, if the processor has one,
/// the cache is of no more than 16 bits and results need not be exact.
#[cfg(target_arch = "x86_64")]
fn tiles(cpu: &Cpu, cache: DType, rows: usize, params: &AttentionParams) -> Option<Amx> {
    let pays = cache != DType::F32 && rows >= LEAST_TILED_ROWS && !params.exact;
    cpu.isa().tiles().filter(|_| pays)
}

/// Evaluates `$body` with the type `$stored` standing for the elements of a cache of this type.
macro_rules! with_stored {
    ($dtype:expr, $stored:ident => $body:expr) => {
        match FloatType::from_dtype($dtype) {
            Some(float) => with_float!(float, $stored => $body),
            None => {
                type $stored = Int8;
                $body
            }
        }
    };
}

/// Dv of the values `v`, which are checked.
fn value_width(v: &Tensor) -> usize {
    let cache = FloatType::from_dtype(v.dtype()).map_or(CacheType::Int8, CacheType::Float);
    cache.width(v.dim(2))
}

pub(super) fn attention(
    cpu: &Arc<Cpu>,
    [q, k, v]: [&Tensor; 3],
    positions: &[u32],
    sinks: Option<&[f32]>,
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    if q.is_empty() || v.is_empty() {
        return Tensor::allocate(&[q.dim(0), q.dim(1), value_width(v)], DType::F32, q.device());
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(unit) = tiles(cpu, k.dtype(), positions.len() * q.dim(1) / k.dim(0), params) {
        return with_stored!(k.dtype(), T => {
            on_tiles::<T>(cpu, unit, [q, k, v], (positions, sinks), params)
        });
    }
    let plan = Plan::new([q, k, v], (positions, sinks), params, |_| ROWS);
    let whole = |width: usize| width.is_multiple_of(cpu.isa().lanes());
    let streams = positions.len() == 1 && whole(plan.width) && whole(plan.value_width);
    with_stored!(k.dtype(), T => {
        plan.compute(cpu, [q, k, v], |task: Task<'_, T>| match streams {
            true => cpu.isa().dispatch(Stream(task)),
            false => cpu.isa().dispatch(Pass(task)),
        })
    })
}

/// The same on tiles of a unit, for caches of `T`.
#[cfg(any(test, target_arch = "x86_64"))]
fn on_tiles<T: Stored>(
    cpu: &Arc<Cpu>,
    unit: impl TileUnit,
    [q, k, v]: [&Tensor; 3],
    (positions, sinks): (&[u32], Option<&[f32]>),
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    let tasks = TASKS * cpu.threads();
    let rows = |rows: usize| rows.div_ceil(tasks).clamp(ROWS, TILED_ROWS);
    let plan = Plan::new([q, k, v], (positions, sinks), params, rows);
    plan.compute(cpu, [q, k, v], |task: Task<'_, T>| unit.dispatch(cpu.isa(), Tiled { cpu, task }))
}

impl<'a> Plan<'a> {
    /// Blocks have as many query rows as `rows` makes of all that there are.
    fn new(
        [q, k, v]: [&Tensor; 3],
        (positions, sinks): (&'a [u32], Option<&'a [f32]>),
        params: &'a AttentionParams,
        rows: impl Fn(usize) -> usize,
    ) -> Self {
        let (heads, width, value_width) = (k.dim(0), q.dim(2), value_width(v));
        let group = q.dim(1) / heads;
        let block = (rows(positions.len() * q.dim(1)) / group).clamp(1, positions.len());
        let capacity = k.dim(1);
        Self { positions, sinks, params, group, heads, capacity, width, value_width, block, stretches: 1 }
    }

    /// Computes the result, task by task.
    fn compute<T: Stored>(
        mut self,
        cpu: &Cpu,
        [q, k, v]: [&Tensor; 3],
        run: impl Fn(Task<'_, T>) + Sync + Send,
    ) -> Result<Tensor, KernelError> {
        let mut y = Tensor::allocate(&[q.dim(0), q.dim(1), self.value_width], DType::F32, q.device())?;
        self.stretches = stretches(cpu.threads(), self.heads * self.blocks(), self.longest());
        let (q, k, v) = (q.as_slice()?, T::rows(k)?, T::rows(v)?);
        let values = y.as_mut_slice()?;
        if self.stretches == 1 {
            let outputs = self.rows_of_tasks(values).into_iter().map(Output::Whole);
            self.run(cpu, q, [k, v], outputs.collect(), run);
        } else {
            let (size, width) = (self.rows() * self.partial(), self.value_width);
            let mut partials = vec![0.0; self.heads * self.blocks() * self.stretches * size];
            let outputs = partials.chunks_exact_mut(size).map(Output::Stretch);
            self.run(cpu, q, [k, v], outputs.collect(), run);
            cpu.for_each_rows(values, width, width * self.stretches, |first, y| {
                cpu.isa().dispatch(Merge { plan: &self, partials: &partials, first, y });
            });
        }
        Ok(y)
    }
}

/// The number of stretches that `keys` keys are cut into, for `blocks` blocks: several tasks per
/// thread even out the longer ones, and each thread gets as many. One thread needs no cuts.
fn stretches(threads: usize, blocks: usize, keys: usize) -> usize {
    if threads == 1 || blocks >= TASKS * threads {
        return 1;
    }
    let most = keys.div_ceil(STRETCH).max(1);
    let wanted = (TASKS * threads).div_ceil(blocks);
    // Up to `threads` more, so that the tasks are a multiple of the threads.
    let even = (wanted..wanted + threads).find(|stretches| (stretches * blocks).is_multiple_of(threads));
    even.unwrap_or(wanted).min(most)
}

impl Plan<'_> {
    /// The rows of `y`, `[T, Hq, Dv]`, that each task computes where there is one stretch, with
    /// their sinks.
    fn rows_of_tasks<'a>(&self, y: &'a mut [f32]) -> Vec<Vec<(&'a mut [f32], Option<f32>)>> {
        let mut tasks: Vec<_> =
            (0..self.heads * self.blocks()).map(|_| Vec::with_capacity(self.rows())).collect();
        let heads = y.chunks_exact_mut(self.group * self.value_width);
        for (at, head) in heads.enumerate() {
            let (t, h) = (at / self.heads, at % self.heads);
            let sink = |i: usize| self.sinks.map(|sinks| sinks[h * self.group + i]);
            let rows = head.chunks_exact_mut(self.value_width).enumerate();
            tasks[h * self.blocks() + t / self.block].extend(rows.map(|(i, row)| (row, sink(i))));
        }
        tasks
    }

    /// Runs all tasks, of which each has an output.
    fn run<T: Stored>(
        &self,
        cpu: &Cpu,
        q: &[f32],
        [k, v]: [&[T]; 2],
        outputs: Vec<Output<'_>>,
        run: impl Fn(Task<'_, T>) + Sync + Send,
    ) {
        let (blocks, longest) = (self.blocks(), self.longest());
        let capacity = self.capacity;
        let run = |(task, output): (usize, Output<'_>)| {
            let (block, stretch) = (task / self.stretches, task % self.stretches);
            let (head, tokens) = (block / blocks, self.tokens(block % blocks));
            let keys = cut(self.keys(tokens.clone()), self.stretches, stretch);
            let head_of = |width: usize| head * capacity * width..(head + 1) * capacity * width;
            let (k, v) = (&k[head_of(T::row(self.width))], &v[head_of(T::row(self.value_width))]);
            run(Task { plan: self, q, k, v, head, tokens, keys, output });
        };
        let tasks = outputs.into_iter().enumerate();
        let work = self.heads * blocks * self.rows() * longest * (self.width + self.value_width);
        cpu.for_each_of(work / RATE, tasks.collect(), run);
    }
}

/// Part `index` of `keys` in `parts` of equal length, the last one rounded down.
fn cut(keys: Range<usize>, parts: usize, index: usize) -> Range<usize> {
    let len = keys.len().div_ceil(parts);
    let end = |part: usize| keys.end.min(keys.start + part * len);
    end(index)..end(index + 1)
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
            total += plan.sink(row % (plan.heads * plan.group), max);
            y.iter_mut().for_each(|y| *y /= total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_has_as_many_tasks() {
        for (threads, blocks, keys, want) in [
            (1, 3, 9000, 1),
            (2, 8, 9000, 1),
            (2, 1, 9000, 8),
            (2, 3, 9000, 4),
            (2, 5, 9000, 2),
            (4, 3, 9000, 8),
            (3, 4, 9000, 3),
            (16, 8, 9000, 8),
            // Too few keys for as many stretches.
            (2, 1, 257, 2),
            (2, 3, 0, 1),
        ] {
            assert_eq!(
                stretches(threads, blocks, keys),
                want,
                "{threads} threads, {blocks} blocks, {keys} keys"
            );
        }
    }

    #[test]
    fn cuts_cover_all_keys_once() {
        for (keys, parts) in [(0..0, 3), (5..6, 4), (7..107, 3), (0..512, 2)] {
            let cuts: Vec<_> = (0..parts).flat_map(|index| cut(keys.clone(), parts, index)).collect();
            assert_eq!(cuts, keys.collect::<Vec<_>>());
        }
    }
}
