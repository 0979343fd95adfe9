use super::{
    Plan, Task, bend,
    tile::{Left, Product},
};
use crate::{
    ops::cache_rows::Stored,
    simd::{Kernel, Simd, math::Math},
};
use std::ops::Range;

/// Keys that are scored and summed together: their scores stay in the nearest cache.
const KEYS: usize = 64;

/// A [`Task`] of several tokens.
///
/// Scores are kept transposed, `[keys, rows]`: the queries are transposed once, neither keys nor
/// values are, and the softmax of as many rows as there are lanes goes on at once.
pub(super) struct Pass<'a, T>(pub Task<'a, T>);

impl<T: Stored> Kernel for Pass<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self(mut task) = self;
        let Plan { width, value_width, .. } = *task.plan;
        let rows = task.rows();
        let mut softmax = Softmax::new(rows.next_multiple_of(S::LANES));
        let queries = task.queries(softmax.lanes);
        let columns = value_width.next_multiple_of(S::LANES);
        let mut sums = vec![0.0; rows * columns];
        let (mut wide_k, mut wide_v) = (vec![], vec![]);
        for start in task.keys.clone().step_by(KEYS) {
            let keys = start..task.keys.end.min(start + KEYS);
            let runs = task.runs(&keys);
            if runs.iter().all(|run| run.keys.is_empty()) {
                continue;
            }
            let k = &task.k[keys.start * T::row(width)..keys.end * T::row(width)];
            let k = Left::Rows { values: widened(simd, k, width, width, &mut wide_k), stride: width };
            let scores = &mut softmax.scores[..keys.len() * softmax.lanes];
            scores.fill(0.0);
            let all = 0..keys.len();
            Product { a: k, b: &queries, rows: all, depth: width, columns: softmax.lanes }
                .add_to(simd, scores);
            bend(simd, scores, task.plan.params.softcap);
            softmax.mask(&runs, keys.len());
            if softmax.update(simd, keys.len()) {
                softmax.rescale(&mut sums, columns);
            }
            let v = &task.v[keys.start * T::row(value_width)..keys.end * T::row(value_width)];
            let v = widened(simd, v, value_width, columns, &mut wide_v);
            // Weights of keys that are not seen are 0, which keeps out what is finite.
            let runs = match runs.len() > 1 && are_finite(simd, v) {
                true => vec![Run { rows: 0..rows, keys: 0..keys.len() }],
                false => runs,
            };
            for Run { rows, keys } in runs.into_iter().filter(|run| !run.keys.is_empty()) {
                let weights = &softmax.scores[keys.start * softmax.lanes..];
                let weights = Left::Columns { values: weights, stride: softmax.lanes };
                let v = &v[keys.start * columns..];
                Product { a: weights, b: v, rows, depth: keys.len(), columns }.add_to(simd, &mut sums);
            }
        }
        for (row, sums) in sums.chunks_exact(columns).enumerate() {
            task.output.write(simd, row, &sums[..value_width], [softmax.max[row], softmax.sum[row]]);
        }
    }
}

/// Rows of one or more tokens that see the same of some keys. Where a value is not finite, the sums
/// of a row take no other keys: a weight of 0 would not keep it out.
struct Run {
    rows: Range<usize>,
    keys: Range<usize>,
}

impl<T: Stored> Task<'_, T> {
    /// The scaled queries, transposed: `[D, lanes]`.
    #[inline(always)]
    fn queries(&self, lanes: usize) -> Vec<f32> {
        let Plan { width, params, .. } = *self.plan;
        /// Rows that are transposed together: what is written lies side by side. Lanes are a
        /// multiple of it.
        const ROWS: usize = 4;
        let mut queries = vec![0.0; width * lanes];
        let zeros = vec![0.0; width];
        let rows: Vec<&[f32]> = (0..self.rows()).map(|row| self.query(row)).collect();
        for (index, rows) in rows.chunks(ROWS).enumerate() {
            let row = |i: usize| rows.get(i).map_or(&zeros[..], |row| row).iter();
            let columns = row(0).zip(row(1)).zip(row(2)).zip(row(3));
            for (out, (((a, b), c), d)) in queries.chunks_exact_mut(lanes).zip(columns) {
                let out: &mut [f32; ROWS] =
                    out[index * ROWS..].first_chunk_mut().expect("whole vectors of rows");
                *out = [a * params.scale, b * params.scale, c * params.scale, d * params.scale];
            }
        }
        queries
    }

    /// The keys of `keys` that each row sees, counted from their first, in runs of rows that see
    /// the same.
    #[inline(always)]
    fn runs(&self, keys: &Range<usize>) -> Vec<Run> {
        let within = |key: usize| key.clamp(keys.start, keys.end) - keys.start;
        let mut runs: Vec<Run> = vec![];
        for (i, &position) in self.plan.positions[self.tokens.clone()].iter().enumerate() {
            let visible = self.plan.visible(position);
            let keys = within(visible.start)..within(visible.end);
            let rows = i * self.plan.group..(i + 1) * self.plan.group;
            match runs.last_mut() {
                Some(run) if run.keys == keys => run.rows.end = rows.end,
                _ => runs.push(Run { rows, keys }),
            }
        }
        runs
    }
}

/// True if all of `x`, a multiple of the lanes, is finite.
#[inline(always)]
fn are_finite<S: Simd>(simd: S, x: &[f32]) -> bool {
    let zero = simd.splat(0.0);
    let mut sums = [zero; 4];
    for x in x.chunks(4 * S::LANES) {
        for (x, sum) in x.chunks_exact(S::LANES).zip(&mut sums) {
            // Infinity and NaN times 0 are NaN.
            *sum = simd.mul_add(simd.load(x), zero, *sum);
        }
    }
    simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]))) == 0.0
}

/// Rows of `width` in f32, `columns` apart; `wide` holds them where they are not that already.
#[inline(always)]
fn widened<'a, S: Simd, T: Stored>(
    simd: S,
    x: &'a [T],
    width: usize,
    columns: usize,
    wide: &'a mut Vec<f32>,
) -> &'a [f32] {
    if T::F32 && width == columns {
        return bytemuck::cast_slice(x);
    }
    wide.resize(x.len() / T::row(width) * columns, 0.0);
    for (x, y) in x.chunks_exact(T::row(width)).zip(wide.chunks_exact_mut(columns)) {
        let scales = T::scales(x, width);
        let (whole, rest) = y[..width].split_at_mut(width / S::LANES * S::LANES);
        for (i, y) in whole.chunks_exact_mut(S::LANES).enumerate() {
            simd.store(T::load(simd, x, i * S::LANES, &scales), y);
        }
        for (at, y) in (whole.len()..).zip(rest) {
            *y = T::widen(x, at, &scales);
        }
    }
    wide
}

/// The softmaxes of a block of rows as they grow, key by key; a lane a row.
struct Softmax {
    lanes: usize,
    /// The greatest scores so far.
    max: Vec<f32>,
    /// The sums of weights so far, relative to the greatest.
    sum: Vec<f32>,
    /// The factor by which the sums so far shrink, after a greater score.
    factor: Vec<f32>,
    /// `[KEYS, lanes]`: scores, then weights.
    scores: Vec<f32>,
}

impl Softmax {
    fn new(lanes: usize) -> Self {
        let vector = |x| vec![x; lanes];
        // Not -inf, whose difference with a masked score would be NaN.
        Self {
            lanes,
            max: vector(f32::MIN),
            sum: vector(0.0),
            factor: vector(0.0),
            scores: vec![0.0; KEYS * lanes],
        }
    }

    /// Takes away the scores of those of `keys` keys that a row does not see.
    #[inline(always)]
    fn mask(&mut self, runs: &[Run], keys: usize) {
        for Run { rows, keys: visible } in runs {
            for j in (0..visible.start).chain(visible.end..keys) {
                self.scores[j * self.lanes..][rows.clone()].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Turns the scores of `keys` keys into weights. Returns true if there was a greater score.
    #[inline(always)]
    fn update<S: Simd>(&mut self, simd: S, keys: usize) -> bool {
        let mut grown = simd.splat(0.0);
        for lane in (0..self.lanes).step_by(S::LANES) {
            let scores = || (0..keys).map(|j| j * self.lanes + lane);
            let old = simd.load(&self.max[lane..]);
            let mut max = old;
            for at in scores() {
                max = simd.max(simd.load(&self.scores[at..]), max);
            }
            let factor = simd.exp(simd.sub(old, max));
            let mut sum = simd.mul(simd.load(&self.sum[lane..]), factor);
            for at in scores() {
                let weight = simd.exp(simd.sub(simd.load(&self.scores[at..]), max));
                simd.store(weight, &mut self.scores[at..]);
                sum = simd.add(sum, weight);
            }
            simd.store(max, &mut self.max[lane..]);
            simd.store(factor, &mut self.factor[lane..]);
            simd.store(sum, &mut self.sum[lane..]);
            grown = simd.max(grown, simd.sub(max, old));
        }
        simd.max_lane(grown) > 0.0
    }

    /// Shrinks the sums of values, rows of `columns`, as [`Self::update`] found.
    #[inline(always)]
    fn rescale(&self, sums: &mut [f32], columns: usize) {
        for (sums, &factor) in sums.chunks_exact_mut(columns).zip(&self.factor) {
            if factor != 1.0 {
                sums.iter_mut().for_each(|sum| *sum *= factor);
            }
        }
    }
}
