//! One token's attention, as fast as memory gives keys and values.

use super::{Output, Plan, Task, bend};
use crate::{
    ops::cache_rows::Stored,
    simd::{
        Kernel, MAX_LANES, Simd,
        math::{self, Math},
    },
};
use std::ops::Range;

/// Keys that are scored and summed together, at most: the sums shrink once for all of them.
const KEYS: usize = 32;
/// Places that keys are read from in turn: one stream does not saturate memory.
const STREAMS: usize = 4;
/// Bytes of a line of memory.
const LINE: usize = 64;
/// Bytes that each place is fetched ahead of its use: processors' own prefetchers stop at pages,
/// and keys and values take turns.
const AHEAD: usize = 2048;

/// A [`Task`] of one token: each key and each value is read from memory once, for all query heads
/// that read it, and widened in registers.
///
/// Lanes lie along a head, whose sizes are whole vectors: neither queries, keys nor values are
/// transposed. [`Pass`](super::pass::Pass), whose lanes are query rows, would leave most of them
/// empty.
pub(super) struct Stream<'a, T>(pub Task<'a, T>);

impl<T: Stored> Kernel for Stream<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self(mut task) = self;
        let Task { plan, k, v, .. } = task;
        let [k, v] = [Rows { values: k, width: plan.width }, Rows { values: v, width: plan.value_width }];
        // Nobody has asked for the first keys and values; these while those are scored.
        let together = keys_together::<T>(plan.group, plan.width);
        let first = Keys::all(&task.keys, together).next();
        first.iter().for_each(|first| (0..first.count).for_each(|index| k.prefetch(simd, first.key(index))));
        let mut heads = Heads::new(&task);
        let mut unasked = Some(v);
        for keys in Keys::all(&task.keys, together) {
            heads.score(simd, k, keys, unasked.take());
            bend(simd, &mut heads.scores, plan.params.softcap);
            heads.weigh(simd, keys.count);
            heads.sum_values(simd, v, keys);
        }
        heads.finish(simd, plan.value_width, &mut task.output);
    }
}

/// The number of keys that are scored and summed together. With their values, and with the lines
/// asked for ahead, they must stay in the first-level cache; if one head reads them, they are used
/// up so fast that fewer are better still.
fn keys_together<T: Stored>(heads: usize, width: usize) -> usize {
    if heads == 1 || T::row(width) * size_of::<T>() > 256 { KEYS / 2 } else { KEYS }
}

/// Keys that are taken in turn from [`STREAMS`] places in memory.
#[derive(Clone, Copy)]
struct Keys {
    first: usize,
    /// From one place to the next.
    stride: usize,
    count: usize,
}

impl Keys {
    /// `keys` in parts of at most `together`: first a quarter of them at each place, then what that
    /// leaves over.
    #[inline(always)]
    fn all(keys: &Range<usize>, together: usize) -> impl Iterator<Item = Self> {
        let (start, stride) = (keys.start, keys.len() / STREAMS);
        let parts = (0..stride).step_by(together / STREAMS).map(move |at| Self {
            first: start + at,
            stride,
            count: STREAMS * (stride - at).min(together / STREAMS),
        });
        let rest = Self { first: start + STREAMS * stride, stride: 1, count: keys.len() % STREAMS };
        parts.chain((rest.count > 0).then_some(rest))
    }

    #[inline(always)]
    fn key(self, index: usize) -> usize {
        self.first + index % STREAMS * self.stride + index / STREAMS
    }
}

/// The rows of this key head's keys or values.
#[derive(Clone, Copy)]
struct Rows<'a, T> {
    values: &'a [T],
    width: usize,
}

impl<'a, T: Stored> Rows<'a, T> {
    #[inline(always)]
    fn row(self, index: usize) -> &'a [T] {
        &self.values[index * T::row(self.width)..][..T::row(self.width)]
    }

    /// Asks for a row.
    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S, index: usize) {
        let bytes: &[u8] = bytemuck::cast_slice(self.row(index));
        for line in (0..bytes.len()).step_by(LINE) {
            simd.prefetch(bytes, line);
        }
    }
}

/// Asks for the line of memory that is [`AHEAD`] of element `at` of `row`. (Asking twice costs less
/// than a branch.)
#[inline(always)]
fn prefetch<S: Simd, T: Stored>(simd: S, row: &[T], at: usize) {
    simd.prefetch(bytemuck::cast_slice(row), at * size_of::<T>() + AHEAD);
}

/// The query heads that read one key head, and what they have so far.
struct Heads {
    count: usize,
    /// The scaled queries, `[count, D]`.
    queries: Vec<f32>,
    /// `[count, KEYS]`: scores, then weights.
    scores: Vec<f32>,
    softmaxes: Vec<Softmax>,
    /// The sums of values, `[count, Dv]`.
    sums: Vec<f32>,
}

/// A head's softmax as it grows.
#[derive(Clone, Copy)]
struct Softmax {
    /// The greatest score so far.
    max: f32,
    /// The sum of weights so far, relative to the greatest.
    sum: f32,
    /// The factor by which the sums so far shrink, after a greater score.
    factor: f32,
}

impl Heads {
    #[inline(always)]
    fn new<T>(task: &Task<'_, T>) -> Self {
        let Plan { group: count, width, value_width, heads, params, .. } = *task.plan;
        let first = (task.tokens.start * heads + task.head) * count * width;
        let queries = task.q[first..][..count * width].iter().map(|x| x * params.scale).collect();
        Self {
            count,
            queries,
            scores: vec![0.0; count * KEYS],
            // Not -inf, whose difference with a masked score would be NaN.
            softmaxes: vec![Softmax { max: f32::MIN, sum: 0.0, factor: 1.0 }; count],
            sums: vec![0.0; count * value_width],
        }
    }

    /// The scores of at most [`KEYS`] keys; their rows of `unasked` are asked for meanwhile.
    #[inline(always)]
    fn score<S: Simd, T: Stored>(
        &mut self,
        simd: S,
        k: Rows<'_, T>,
        keys: Keys,
        mut unasked: Option<Rows<'_, T>>,
    ) {
        let mut head = 0;
        while head < self.count {
            // As many sums as there are lanes hide an addition's latency.
            let v = unasked.take();
            head += match (S::LANES, self.count - head) {
                (16, 4..) => self.score_heads::<S, T, 4, 4>(simd, (k, v), keys, head),
                (16, 2..) => self.score_heads::<S, T, 2, 8>(simd, (k, v), keys, head),
                (16, _) => self.score_heads::<S, T, 1, 16>(simd, (k, v), keys, head),
                (_, 4..) => self.score_heads::<S, T, 4, 2>(simd, (k, v), keys, head),
                (_, 2..) => self.score_heads::<S, T, 2, 4>(simd, (k, v), keys, head),
                _ => self.score_heads::<S, T, 1, 8>(simd, (k, v), keys, head),
            };
        }
    }

    /// The scores of `H` heads from `head` on, `J` keys at a time; `H * J` is `S::LANES`. Returns
    /// `H`.
    #[inline(always)]
    fn score_heads<S: Simd, T: Stored, const H: usize, const J: usize>(
        &mut self,
        simd: S,
        (k, unasked): (Rows<'_, T>, Option<Rows<'_, T>>),
        keys: Keys,
        head: usize,
    ) -> usize {
        let queries: [&[f32]; H] = std::array::from_fn(|h| &self.queries[(head + h) * k.width..][..k.width]);
        for first in (0..keys.count).step_by(J) {
            // Rows beyond the last are the last one again: their scores are not used.
            let rows: [&[T]; J] = std::array::from_fn(|j| k.row(keys.key((first + j).min(keys.count - 1))));
            let scales = rows.map(|row| T::scales(row, k.width));
            if let Some(v) = unasked {
                (first..keys.count.min(first + J)).for_each(|index| v.prefetch(simd, keys.key(index)));
            }
            let mut sums = [[simd.splat(0.0); J]; H];
            let mut at = 0;
            while at + S::LANES <= k.width {
                let mut vectors = [simd.splat(0.0); J];
                for ((vector, row), scales) in vectors.iter_mut().zip(rows).zip(&scales) {
                    prefetch(simd, row, at);
                    *vector = T::load(simd, row, at, scales);
                }
                for (sums, query) in sums.iter_mut().zip(queries) {
                    add_products(simd, simd.load(&query[at..]), &vectors, sums);
                }
                at += S::LANES;
            }
            let mut scores = [0.0; MAX_LANES];
            simd.store(simd.sum_each(sums.as_flattened()), &mut scores);
            for (h, scores) in scores.chunks_exact(J).take(H).enumerate() {
                self.scores[(head + h) * KEYS + first..][..J].copy_from_slice(scores);
            }
        }
        H
    }

    /// Turns the scores of `keys` keys into weights.
    #[inline(always)]
    fn weigh<S: Simd>(&mut self, simd: S, keys: usize) {
        for (scores, softmax) in self.scores.chunks_exact_mut(KEYS).zip(&mut self.softmaxes) {
            let scores = &mut scores[..keys.next_multiple_of(S::LANES)];
            scores[keys..].fill(f32::NEG_INFINITY);
            let mut max = simd.splat(softmax.max);
            for scores in scores.chunks_exact(S::LANES) {
                // A NaN score leaves the greatest as it is, and makes the sum NaN.
                max = simd.max(simd.load(scores), max);
            }
            let greatest = simd.max_lane(max);
            let max = simd.splat(greatest);
            let mut sum = simd.splat(0.0);
            for scores in scores.chunks_exact_mut(S::LANES) {
                let weights = simd.exp(simd.sub(simd.load(scores), max));
                simd.store(weights, scores);
                sum = simd.add(sum, weights);
            }
            softmax.factor = math::exp(softmax.max - greatest);
            softmax.sum = softmax.sum * softmax.factor + simd.sum(sum);
            softmax.max = greatest;
        }
    }

    /// Adds the values of `keys` to the sums.
    #[inline(always)]
    fn sum_values<S: Simd, T: Stored>(&mut self, simd: S, v: Rows<'_, T>, keys: Keys) {
        let mut head = 0;
        while head < self.count {
            // The sums, the values that are added to them and a weight must fit the registers.
            head += match (S::REGISTERS, self.count - head) {
                (32.., 4..) => self.sum_heads::<S, T, 4, 4>(simd, v, keys, head),
                (_, 4..) => self.sum_heads::<S, T, 4, 2>(simd, v, keys, head),
                (_, 2..) => self.sum_heads::<S, T, 2, 4>(simd, v, keys, head),
                _ => self.sum_heads::<S, T, 1, 4>(simd, v, keys, head),
            };
        }
    }

    /// Adds the values to the sums of `H` heads from `head` on, `V` vectors of columns at a time.
    /// Returns `H`.
    #[inline(always)]
    fn sum_heads<S: Simd, T: Stored, const H: usize, const V: usize>(
        &mut self,
        simd: S,
        v: Rows<'_, T>,
        keys: Keys,
        head: usize,
    ) -> usize {
        let mut column = 0;
        while column + V * S::LANES <= v.width {
            self.sum_columns::<S, T, H, V>(simd, v, keys, (head, column));
            column += V * S::LANES;
        }
        while column < v.width {
            self.sum_columns::<S, T, H, 1>(simd, v, keys, (head, column));
            column += S::LANES;
        }
        H
    }

    /// Adds `V` vectors of the values' columns to the sums of `H` heads, from `head` and `column`
    /// on.
    #[inline(always)]
    fn sum_columns<S: Simd, T: Stored, const H: usize, const V: usize>(
        &mut self,
        simd: S,
        v: Rows<'_, T>,
        keys: Keys,
        (head, column): (usize, usize),
    ) {
        let place = |h, i| (head + h) * v.width + column + i * S::LANES;
        let mut sums = [[simd.splat(0.0); V]; H];
        for (h, sums) in sums.iter_mut().enumerate() {
            let factor = simd.splat(self.softmaxes[head + h].factor);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = simd.mul(simd.load(&self.sums[place(h, i)..]), factor);
            }
        }
        let weights: [&[f32]; H] = std::array::from_fn(|h| &self.scores[(head + h) * KEYS..][..keys.count]);
        for j in 0..keys.count {
            let row = v.row(keys.key(j));
            for at in (0..V * S::LANES).step_by(LINE / size_of::<T>()) {
                prefetch(simd, row, column + at);
            }
            let scales = T::scales(row, v.width);
            let mut vectors = [simd.splat(0.0); V];
            for (i, vector) in vectors.iter_mut().enumerate() {
                *vector = T::load(simd, row, column + i * S::LANES, &scales);
            }
            for (sums, weights) in sums.iter_mut().zip(weights) {
                add_products(simd, simd.splat(weights[j]), &vectors, sums);
            }
        }
        for (h, sums) in sums.iter().enumerate() {
            for (i, &sum) in sums.iter().enumerate() {
                simd.store(sum, &mut self.sums[place(h, i)..]);
            }
        }
    }

    /// Writes each head's row.
    #[inline(always)]
    fn finish<S: Simd>(&self, simd: S, value_width: usize, output: &mut Output<'_>) {
        let heads = self.sums.chunks_exact(value_width).zip(&self.softmaxes);
        for (row, (sums, softmax)) in heads.enumerate() {
            output.write(simd, row, sums, [softmax.max, softmax.sum]);
        }
    }
}

/// `sums[i] += a * b[i]`.
#[inline(always)]
fn add_products<S: Simd, const N: usize>(simd: S, a: S::V, b: &[S::V; N], sums: &mut [S::V; N]) {
    for (sum, &b) in sums.iter_mut().zip(b) {
        *sum = simd.mul_add(a, b, *sum);
    }
}
