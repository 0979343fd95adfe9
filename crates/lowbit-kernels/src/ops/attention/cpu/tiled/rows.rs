//! Rows of queries, and what they have so far.

use super::{
    ROWS,
    chunk::{Chunk, Row, round_row},
};
use crate::{
    ops::attention::cpu::{Output, Plan, Task, bend},
    simd::{
        Simd,
        math::Math,
        tiles::{Ahead, Block, Pairs, STEP, Start, TILE, Tiles},
    },
};
use bytemuck::Zeroable;
use std::{
    f32::consts::{LN_2, LOG2_E},
    ops::Range,
};

/// Scores and weights, of one [`Rows`] after the other.
pub(super) struct Scratch<'a> {
    /// `[step]`.
    pub scores: &'a mut [Block],
    /// `[16 rows][step]`.
    pub weights: [&'a mut [Pairs]; 2],
}

/// Up to [`ROWS`] rows of a task.
pub(super) struct Rows<'a> {
    /// The keys that each row sees. Rows after the last see the same as the last.
    visible: [Range<usize>; ROWS],
    /// The number of rows.
    count: usize,
    /// `[16 rows][step of D]`, scaled by log2(e) too.
    queries: [&'a [Pairs]; 2],
    /// The cap of scores, times log2(e) too.
    softcap: Option<f32>,
    /// The greatest scores so far.
    max: [f32; ROWS],
    /// The sums of weights so far, relative to the greatest.
    total: [f32; ROWS],
    /// The sums of values so far, `[32 values]`.
    sums: &'a mut [Block],
    /// True if there are any.
    started: bool,
}

impl<'a> Rows<'a> {
    /// The rows of a task from `first` on. `queries` and `sums` is memory for them.
    #[inline(always)]
    pub fn new<S: Simd, T>(
        simd: S,
        task: &Task<'_, T>,
        first: usize,
        queries: &'a mut [Pairs],
        sums: &'a mut [Block],
    ) -> Self {
        let Plan { group, positions, params, .. } = *task.plan;
        let end = task.rows();
        let count = ROWS.min(end - first);
        let scale = simd.splat(params.scale * LOG2_E);
        let (tile, halves) = (queries.len() / 2, queries.chunks_exact_mut(queries.len() / 2));
        for (half, queries) in halves.enumerate() {
            for row in 0..TILE {
                let index = first + half * TILE + row;
                let x = Row::new((index < end).then(|| task.query(index)), task.plan.width);
                round_row(simd, x, scale, queries, row);
            }
            for tile in queries {
                simd.transpose(bytemuck::cast_mut(tile));
            }
        }
        let visible = |row: usize| {
            let t = task.tokens.start + (first + row).min(end - 1) / group;
            task.plan.visible(positions[t])
        };
        Self {
            visible: std::array::from_fn(visible),
            count,
            queries: [&queries[..tile], &queries[tile..]],
            softcap: params.softcap.map(|cap| cap * LOG2_E),
            // Not -inf, whose difference with a masked score would be NaN.
            max: [f32::MIN; ROWS],
            total: [0.0; ROWS],
            sums,
            started: false,
        }
    }

    /// The number of steps of `keys` up to the last key that any row sees.
    pub fn steps(&self, keys: &Range<usize>) -> usize {
        let within = |visible: &&Range<usize>| visible.start < keys.end && visible.end > keys.start;
        let last = self.visible.iter().filter(within).map(|visible| visible.end.min(keys.end)).max();
        last.map_or(0, |last| (last - keys.start).div_ceil(STEP))
    }

    /// Takes keys and values.
    #[inline(always)]
    pub fn add<S: Simd, U: Tiles>(
        &mut self,
        simd: S,
        tiles: &mut U,
        chunk: &Chunk,
        Scratch { scores, weights }: &mut Scratch<'_>,
    ) {
        let steps = self.steps(&chunk.keys);
        if steps == 0 {
            return;
        }
        for (step, scores) in scores[..steps].iter_mut().enumerate() {
            let k = [chunk.k(2 * step), chunk.k(2 * step + 1)];
            tiles.multiply(k, self.queries, scores, Start::Zero, Ahead::default());
        }
        bend(simd, bytemuck::cast_slice_mut(&mut scores[..steps]), self.softcap);
        let seen = Seen::new(&self.visible, &chunk.keys);
        for (tile, weights) in weights.iter_mut().enumerate() {
            let scores = &mut scores[..steps];
            if seen.all(steps) {
                self.weigh::<S, false>(simd, tile, scores, weights, &seen);
            } else {
                self.weigh::<S, true>(simd, tile, scores, weights, &seen);
            }
        }
        let start = if self.started { Start::Sums } else { Start::Zero };
        self.started = true;
        let weights = weights.each_ref().map(|weights| &weights[..steps]);
        for (pair, sums) in self.sums.iter_mut().enumerate() {
            let v = [chunk.v(2 * pair, steps), chunk.v(2 * pair + 1, steps)];
            tiles.multiply(v, weights, sums, start, Ahead::default());
        }
        self.add_not_finite(chunk, weights);
    }

    /// Turns the scores of 16 rows into weights, and shrinks what there is so far as the greatest
    /// scores grow.
    #[inline(always)]
    fn weigh<S: Simd, const MASKED: bool>(
        &mut self,
        simd: S,
        tile: usize,
        scores: &mut [Block],
        weights: &mut [Pairs],
        seen: &Seen,
    ) {
        for lane in (0..TILE).step_by(S::LANES) {
            let row = tile * TILE + lane;
            let old = simd.load(&self.max[row..]);
            let max = greatest::<S, MASKED>(simd, scores, (tile, lane), old, seen);
            let mut sums = [simd.splat(0.0); 4];
            for (block, weights) in scores.iter().zip(weights.iter_mut()) {
                for (keys, out) in block.iter().zip(weights.0.chunks_exact_mut(TILE / 2)) {
                    let pairs = keys[tile].0.as_chunks::<2>().0.iter().zip(out);
                    for (i, ([first, second], out)) in pairs.enumerate() {
                        let first = simd.exp2_for_bf16(simd.sub(simd.load(&first[lane..]), max));
                        let second = simd.exp2_for_bf16(simd.sub(simd.load(&second[lane..]), max));
                        simd.store_bf16_pairs(first, second, &mut out[lane..]);
                        sums[i % 4] = simd.add(sums[i % 4], simd.add(first, second));
                    }
                }
            }
            let sum = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
            let grown = simd.sub(max, old);
            let factor = simd.exp(simd.mul(grown, simd.splat(-LN_2)));
            simd.store(simd.mul_add(simd.load(&self.total[row..]), factor, sum), &mut self.total[row..]);
            simd.store(max, &mut self.max[row..]);
            if self.started && simd.max_lane(grown) > 0.0 {
                for tiles in self.sums.iter_mut().flatten() {
                    for values in &mut tiles[tile].0 {
                        let values = &mut values[lane..];
                        simd.store(simd.mul(simd.load(values), factor), values);
                    }
                }
            }
        }
    }

    /// Adds what the tiles of `chunk` have 0 for.
    #[inline(always)]
    fn add_not_finite(&mut self, chunk: &Chunk, weights: [&[Pairs]; 2]) {
        for &(key, column, value) in &chunk.not_finite {
            let sums = &mut self.sums[column / (2 * TILE)][column / TILE % 2];
            for (row, visible) in self.visible.iter().enumerate() {
                if visible.contains(&(chunk.keys.start + key)) {
                    let weight = weights[row / TILE][key / STEP].0[key % STEP / 2][row % TILE][key % 2];
                    sums[row / TILE].0[column % TILE][row % TILE] += weight.to_f32() * value;
                }
            }
        }
    }

    /// Writes the rows, of which the first is `first`.
    #[inline(always)]
    pub fn finish<S: Simd>(self, simd: S, first: usize, value_width: usize, output: &mut Output<'_>) {
        let mut y = vec![0.0; value_width.next_multiple_of(TILE)];
        if !self.started {
            self.sums.fill(Block::zeroed());
        }
        for half in 0..2 {
            for tiles in self.sums.iter_mut().flatten() {
                simd.transpose(bytemuck::cast_mut(&mut tiles[half]));
            }
            for row in 0..TILE.min(self.count.saturating_sub(half * TILE)) {
                let sums = self.sums.iter().flatten().map(|tiles| &tiles[half].0[row]);
                for (y, sums) in y.chunks_exact_mut(TILE).zip(sums) {
                    y.copy_from_slice(sums);
                }
                let row = half * TILE + row;
                let max = self.max[row] * LN_2;
                output.write(simd, first + row, &y[..value_width], [max, self.total[row]]);
            }
        }
    }
}

/// The greatest scores of 16 rows' lanes, and `old`; those of keys that a row does not see become
/// -inf.
#[inline(always)]
fn greatest<S: Simd, const MASKED: bool>(
    simd: S,
    scores: &mut [Block],
    (tile, lane): (usize, usize),
    old: S::V,
    seen: &Seen,
) -> S::V {
    let row = tile * TILE + lane;
    let (first, end) = (simd.load(&seen.first[row..]), simd.load(&seen.end[row..]));
    let unseen = simd.splat(f32::NEG_INFINITY);
    let mut max = [old; 4];
    for (half, tiles) in scores.iter_mut().flatten().enumerate() {
        for (key, scores) in tiles[tile].0.iter_mut().enumerate() {
            let mut score = simd.load(&scores[lane..]);
            if MASKED {
                let index = simd.splat((half * TILE + key) as f32);
                score = simd.select_lt(index, first, unseen, simd.select_lt(index, end, score, unseen));
                simd.store(score, &mut scores[lane..]);
            }
            // A NaN score leaves the greatest as it is, and makes the sum NaN.
            max[key % 4] = simd.max(score, max[key % 4]);
        }
    }
    simd.max(simd.max(max[0], max[1]), simd.max(max[2], max[3]))
}

/// The part of some keys that each row sees, counted from their first.
struct Seen {
    first: [f32; ROWS],
    end: [f32; ROWS],
}

impl Seen {
    fn new(visible: &[Range<usize>; ROWS], keys: &Range<usize>) -> Self {
        let within = |key: usize| (key.clamp(keys.start, keys.end) - keys.start) as f32;
        Self {
            first: std::array::from_fn(|row| within(visible[row].start)),
            end: std::array::from_fn(|row| within(visible[row].end)),
        }
    }

    /// True if every row sees all keys of the first `steps` steps, to the last one's end.
    fn all(&self, steps: usize) -> bool {
        let end = (steps * STEP) as f32;
        self.first.iter().all(|&first| first == 0.0) && self.end.iter().all(|&seen| seen >= end)
    }
}
