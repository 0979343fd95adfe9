//! Two passes, each with the scores of a block of query rows and a block of keys at a time: one
//! over blocks of queries, which finds each row's softmax and dq, and one over blocks of keys, for
//! dk and dv. So no two tasks add to one number.

use crate::Cpu;
use crate::gemm::{Extent, Onto, Packed, Transposed, product, transpose};
use crate::ops::attention::AttentionParams;
use crate::ops::attention::cpu::bend;
use crate::simd::{Kernel, MAX_LANES, Simd, math};
use std::ops::Range;

/// Keys of a block.
const KEYS: usize = 64;
/// Query rows of a block: tokens times the query heads that read one key head.
const ROWS: usize = 64;

/// The operands in f32, as the op says, and their sizes.
pub(super) struct Problem<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub dy: &'a [f32],
    pub positions: &'a [u32],
    pub params: &'a AttentionParams,
    /// Query heads that read one key head.
    pub group: usize,
    pub heads: usize,
    pub capacity: usize,
    pub width: usize,
    pub value_width: usize,
}

/// The results over all keys that a query row needs.
#[derive(Clone, Copy, Default)]
struct Row {
    /// The logarithm of the sum of `e^score`.
    log_sum: f32,
    /// `dy . y`.
    along: f32,
}

impl Problem<'_> {
    /// Fills dq, and adds to dk and dv, which are zero.
    pub fn backward(&self, cpu: &Cpu, y: &[f32], [dq, dk, dv]: [&mut [f32]; 3]) {
        if self.value_width == 0 || dq.is_empty() {
            return;
        }
        let mut seen = vec![false; self.capacity];
        for &position in self.positions {
            seen[self.params.visible(position, self.capacity)].fill(true);
        }
        let pass = Pass { problem: self, seen: &seen };
        let per_token = self.group * self.heads;
        let mut rows = vec![Row::default(); self.positions.len() * per_token];
        let block = self.block();
        let dqs = dq.chunks_mut(block * per_token * self.width);
        let tasks = dqs.zip(rows.chunks_mut(block * per_token)).enumerate().collect();
        cpu.for_each(tasks, |(i, (dq, rows))| {
            let tokens = i * block..i * block + rows.len() / per_token;
            cpu.isa().dispatch(Queries { pass: &pass, y, tokens, dq, rows });
        });
        let dks = dk.chunks_exact_mut(self.capacity * self.width);
        let dvs = dv.chunks_exact_mut(self.capacity * self.value_width);
        let mut tasks = vec![];
        for (head, (dk, dv)) in dks.zip(dvs).enumerate() {
            let blocks = dk.chunks_mut(KEYS * self.width).zip(dv.chunks_mut(KEYS * self.value_width));
            tasks.extend(blocks.enumerate().map(|(i, (dk, dv))| (head, i * KEYS, dk, dv)));
        }
        cpu.for_each(tasks, |(head, first, dk, dv)| {
            let keys = first..first + dk.len() / self.width;
            cpu.isa().dispatch(Keys { pass: &pass, rows: &rows, head, keys, dk, dv });
        });
    }

    /// Tokens of a block.
    fn block(&self) -> usize {
        (ROWS / self.group).max(1)
    }

    /// The keys that any of some tokens sees.
    fn visible(&self, tokens: &Range<usize>) -> Range<usize> {
        let visible = |&position| self.params.visible(position, self.capacity);
        let each = self.positions[tokens.clone()].iter().map(visible);
        each.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// The rows of `x`, `[T, Hq, width]`, that read key head `head`, token by token.
    fn rows_of<'x>(&self, x: &'x [f32], width: usize, tokens: &Range<usize>, head: usize) -> Vec<&'x [f32]> {
        let rows = tokens
            .clone()
            .flat_map(|t| (0..self.group).map(move |h| (t * self.heads + head) * self.group + h));
        rows.map(|row| &x[row * width..(row + 1) * width]).collect()
    }
}

#[derive(Clone, Copy)]
struct Pass<'a> {
    problem: &'a Problem<'a>,
    /// The keys that some query sees; the others may hold anything.
    seen: &'a [bool],
}

/// The scratch memory of a task's blocks.
struct Block {
    q: Packed,
    dy: Packed,
    /// `[D, KEYS]` and `[Dv, KEYS]`.
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[rows, KEYS]`: scores, then weights; and their gradients.
    weights: Vec<f32>,
    gradients: Vec<f32>,
    /// The two, as operands.
    packed: Packed,
}

impl Pass<'_> {
    fn scratch(&self) -> Block {
        let Problem { width, value_width, .. } = *self.problem;
        let (k, v) = (vec![0.0; width * KEYS], vec![0.0; value_width * KEYS]);
        let pairs = self.problem.block() * self.problem.group * KEYS;
        let (weights, gradients) = (vec![0.0; pairs], vec![0.0; pairs]);
        Block {
            q: Packed::default(),
            dy: Packed::default(),
            k,
            v,
            weights,
            gradients,
            packed: Packed::default(),
        }
    }

    /// The block's queries and dy.
    fn take_queries(&self, block: &mut Block, tokens: &Range<usize>, head: usize) {
        let Problem { q, dy, width, value_width, .. } = *self.problem;
        block.q.pack(self.problem.rows_of(q, width, tokens, head).into_iter(), width);
        block.dy.pack(self.problem.rows_of(dy, value_width, tokens, head).into_iter(), value_width);
    }

    /// The block's keys and values, transposed.
    fn take_keys(&self, block: &mut Block, keys: &Range<usize>, head: usize) {
        let Problem { k, v, width, value_width, .. } = *self.problem;
        for (x, width, out) in [(k, width, &mut block.k), (v, value_width, &mut block.v)] {
            let rows = self.padded(x, width, width, keys, head);
            out.fill(0.0);
            transpose((&rows, width), (out, KEYS), (keys.len(), width));
        }
    }

    /// Rows of keys or values, `columns` apart; zeros for those that nobody sees.
    fn padded(&self, x: &[f32], width: usize, columns: usize, keys: &Range<usize>, head: usize) -> Vec<f32> {
        let mut rows = vec![0.0; keys.len() * columns];
        for (j, row) in keys.clone().zip(rows.chunks_exact_mut(columns)).filter(|(j, _)| self.seen[*j]) {
            row[..width].copy_from_slice(&x[(head * self.problem.capacity + j) * width..][..width]);
        }
        rows
    }

    /// The block's scores, -inf where a row does not see a key.
    #[inline(always)]
    fn score<S: Simd>(&self, simd: S, block: &mut Block, tokens: &Range<usize>, keys: &Range<usize>) {
        let Problem { positions, params, group, capacity, width, .. } = *self.problem;
        let extent = Extent { rows: tokens.len() * group, depth: width, columns: KEYS };
        product(simd, &block.q, &block.k, &mut block.weights, extent, Onto::Nothing);
        for (i, scores) in block.weights.chunks_exact_mut(KEYS).take(tokens.len() * group).enumerate() {
            let visible = params.visible(positions[tokens.start + i / group], capacity);
            let within = |key: usize| key.clamp(keys.start, keys.end) - keys.start;
            let visible = within(visible.start)..within(visible.end);
            scores[visible.clone()].iter_mut().for_each(|score| *score *= params.scale);
            bend(simd, scores, params.softcap);
            scores[..visible.start].fill(f32::NEG_INFINITY);
            scores[visible.end..].fill(f32::NEG_INFINITY);
        }
    }

    /// Turns scores into weights, and finds the gradient of each scaled score, times the scale.
    /// `rows` are the block's.
    #[inline(always)]
    fn weigh<S: Simd>(&self, simd: S, block: &mut Block, rows: &[Row]) {
        let extent = Extent { rows: rows.len(), depth: self.problem.value_width, columns: KEYS };
        product(simd, &block.dy, &block.v, &mut block.gradients, extent, Onto::Nothing);
        let AttentionParams { scale, softcap, .. } = *self.problem.params;
        let inverse = softcap.map_or(0.0, |cap| 1.0 / cap);
        let pairs = block.weights.chunks_exact_mut(KEYS).zip(block.gradients.chunks_exact_mut(KEYS));
        for ((weights, gradients), row) in pairs.zip(rows) {
            for (weight, gradient) in weights.iter_mut().zip(gradients) {
                // The score of a key that is not seen is -inf, and its weight 0.
                let bent = *weight * inverse;
                let slope = (1.0 - bent * bent).max(0.0);
                *weight = math::exp(*weight - row.log_sum);
                *gradient = scale * *weight * slope * (*gradient - row.along);
            }
        }
    }
}

/// Whole vectors.
fn whole(width: usize) -> usize {
    width.next_multiple_of(MAX_LANES)
}

/// Some tokens, with all their heads.
struct Queries<'a> {
    pass: &'a Pass<'a>,
    y: &'a [f32],
    tokens: Range<usize>,
    /// Their part of dq.
    dq: &'a mut [f32],
    /// The second pass's input from the first, `[tokens, Hq]`.
    rows: &'a mut [Row],
}

impl Kernel for Queries<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { pass, y, tokens, dq, rows } = self;
        let Problem { dy, group, heads, width, value_width, .. } = *pass.problem;
        let (visible, columns) = (pass.problem.visible(&tokens), whole(width));
        let mut block = pass.scratch();
        let blocks = || {
            let starts = visible.clone().step_by(KEYS);
            starts.map(|start| start..visible.end.min(start + KEYS)).collect::<Vec<_>>()
        };
        for head in 0..heads {
            pass.take_queries(&mut block, &tokens, head);
            let mut sums = vec![(f32::NEG_INFINITY, 0.0f32); tokens.len() * group];
            for keys in blocks() {
                pass.take_keys(&mut block, &keys, head);
                pass.score(simd, &mut block, &tokens, &keys);
                for ((max, sum), scores) in sums.iter_mut().zip(block.weights.chunks_exact(KEYS)) {
                    add_exponentials(scores, max, sum);
                }
            }
            let of_y = pass.problem.rows_of(y, value_width, &tokens, head);
            let of_dy = pass.problem.rows_of(dy, value_width, &tokens, head);
            let softmaxes = sums.iter().zip(of_y.iter().zip(&of_dy)).map(|(&(max, sum), (y, dy))| Row {
                log_sum: max + sum.ln(),
                along: crate::simd::slices::dot(simd, y, dy),
            });
            let softmaxes: Vec<Row> = softmaxes.collect();
            let mut gradient = vec![0.0; tokens.len() * group * columns];
            for keys in blocks() {
                pass.take_keys(&mut block, &keys, head);
                pass.score(simd, &mut block, &tokens, &keys);
                pass.weigh(simd, &mut block, &softmaxes);
                let gradients = block.gradients.chunks_exact(KEYS).take(softmaxes.len());
                block.packed.pack(gradients, KEYS);
                let k = pass.padded(pass.problem.k, width, columns, &keys, head);
                let extent = Extent { rows: softmaxes.len(), depth: keys.len(), columns };
                product(simd, &block.packed, &k, &mut gradient, extent, Onto::Scaled(1.0));
            }
            for (i, (row, gradient)) in softmaxes.iter().zip(gradient.chunks_exact(columns)).enumerate() {
                let at = (i / group * heads + head) * group + i % group;
                rows[at] = *row;
                dq[at * width..(at + 1) * width].copy_from_slice(&gradient[..width]);
            }
        }
    }
}

/// Adds the exponentials of a row's scores to their sum so far, which is relative to the greatest
/// so far.
#[inline(always)]
fn add_exponentials(scores: &[f32], max: &mut f32, sum: &mut f32) {
    let greatest = scores.iter().fold(*max, |most, &score| if score > most { score } else { most });
    if greatest == f32::NEG_INFINITY {
        // Nothing is seen yet; a NaN goes into the sum.
        *sum += scores.iter().filter(|score| score.is_nan()).sum::<f32>();
        return;
    }
    let mut lanes = [0.0; MAX_LANES];
    for scores in scores.chunks_exact(MAX_LANES) {
        lanes.iter_mut().zip(scores).for_each(|(lane, score)| *lane += math::exp(score - greatest));
    }
    *sum = *sum * math::exp(*max - greatest) + lanes.iter().sum::<f32>();
    *max = greatest;
}

/// Some keys of one head.
struct Keys<'a> {
    pass: &'a Pass<'a>,
    rows: &'a [Row],
    head: usize,
    keys: Range<usize>,
    /// Their parts of dk and dv.
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

impl Kernel for Keys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { pass, rows, head, keys, dk, dv } = self;
        let Problem { q, dy, positions, group, heads, width, value_width, .. } = *pass.problem;
        let mut block = pass.scratch();
        pass.take_keys(&mut block, &keys, head);
        let [mut of_k, mut of_v] = [width, value_width].map(|width| vec![0.0; keys.len() * whole(width)]);
        let per_block = pass.problem.block();
        for start in (0..positions.len()).step_by(per_block) {
            let tokens = start..positions.len().min(start + per_block);
            let visible = pass.problem.visible(&tokens);
            if visible.end <= keys.start || visible.start >= keys.end {
                continue;
            }
            pass.take_queries(&mut block, &tokens, head);
            pass.score(simd, &mut block, &tokens, &keys);
            let at = |i: usize| (((start + i / group) * heads) + head) * group + i % group;
            let rows: Vec<Row> = (0..tokens.len() * group).map(|i| rows[at(i)]).collect();
            pass.weigh(simd, &mut block, &rows);
            for (left, x, width, sums) in
                [(&block.gradients, q, width, &mut of_k), (&block.weights, dy, value_width, &mut of_v)]
            {
                block.packed.pack(left.chunks_exact(KEYS).take(rows.len()), KEYS);
                let columns = whole(width);
                let mut right = vec![0.0; rows.len() * columns];
                let from = pass.problem.rows_of(x, width, &tokens, head);
                for (right, x) in right.chunks_exact_mut(columns).zip(from) {
                    right[..width].copy_from_slice(x);
                }
                let extent = Extent { rows: keys.len(), depth: rows.len(), columns };
                product(simd, Transposed(&block.packed), &right, sums, extent, Onto::Scaled(1.0));
            }
        }
        for (out, sums, width) in [(dk, of_k, width), (dv, of_v, value_width)] {
            for (out, sums) in out.chunks_exact_mut(width).zip(sums.chunks_exact(whole(width))) {
                out.copy_from_slice(&sums[..width]);
            }
        }
    }
}
