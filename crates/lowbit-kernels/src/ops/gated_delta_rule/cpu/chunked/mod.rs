//! The recurrence in chunks of [`CHUNK`] tokens, as products of small matrices.
//!
//! Within a chunk that starts with state `S`, for tokens `i` and `j` of it, let
//! `D[i][j] = decay[j + 1] .. decay[i]` and `g[i] = decay[0] .. decay[i]`. Then
//! ```text
//! delta[i] = beta[i] * (v[i] - g[i] S^T k[i] - sum over j < i of D[i][j] (k[i] . k[j]) delta[j])
//! y[i]     = scale * (g[i] S^T q[i] + sum over j <= i of D[i][j] (q[i] . k[j]) delta[j])
//! S        = g[last] S + sum over j of k[j] (D[last][j] delta[j])^T
//! ```
//! `delta` is found by forward substitution. (Inverting the triangle first, as GPUs do, lets chunks
//! be prepared in parallel, but applies the inverse to `Dk` more columns; here the heads are
//! parallel enough.) `D` is a product of decays: it underflows to 0 where it should, and nothing
//! can overflow or cancel, as differences of summed logarithms could. Without a correction,
//! `delta[i] = beta[i] v[i]`: there is no triangle.
//!
//! If each channel of the keys has its own decay, `D[i][j]` and `g[i]` are vectors: they
//! multiply the channels of `k[j]`, and of `k[i]` and `q[i]`, before the sums over these
//! (`channels.rs`).
//!
//! Columns of the state do not depend on each other. So a chunk takes a strip of them from the
//! reads to the update while it is in the nearest cache, and each tile of rows stays in registers
//! from the first to the last term of its formula.

mod channels;
mod pairs;
mod reads;
mod strips;
#[cfg(any(test, target_arch = "x86_64"))]
mod tiled;

use super::{Problem, Token};
use crate::gemm::{Left, Lines, Packed, Rows, Transposed, accumulate};
use crate::ops::gated_delta_rule::Rule;
use crate::scan::Piece;
use crate::simd::{Kernel, Simd};
use bytemuck::Zeroable;
use channels::Channels;
use pairs::Pairs;
use reads::{ByVectors, Reads};
use std::ops::Range;
use strips::{Strip, Strips};

/// Tokens of a chunk. More would make the products with the state little faster, and the triangles'
/// share grows with it (measured: 16 takes 8 % less time than 32, and 18 % less than 64).
pub(crate) const CHUNK: usize = 16;

/// Heads of one sequence that read the same key head, chunk after chunk.
pub(super) struct Chunked<'p, 'r, 'y> {
    pub problem: &'p Problem<'p>,
    pub heads: Vec<Piece<'r, 'y>>,
}

impl Kernel for Chunked<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let key_dim = self.problem.dims.key_dim;
        self.reading(simd, ByVectors { key_dim });
    }
}

impl Chunked<'_, '_, '_> {
    /// Products with the state are those of `reads`.
    #[inline(always)]
    fn reading<S: Simd>(self, simd: S, reads: impl Reads) {
        // A tile's sums, a row of the right operand and one value of the left one must fit the
        // registers.
        if S::REGISTERS >= 32 {
            self.tiled::<S, 8, _>(simd, reads);
        } else {
            self.tiled::<S, 4, _>(simd, reads);
        }
    }

    /// Tiles have `M` rows.
    #[inline(always)]
    fn tiled<S: Simd, const M: usize, R: Reads>(self, simd: S, mut reads: R) {
        let Self { problem, heads } = self;
        let length = heads[0].tokens.len();
        let strips = Strips::new(problem.dims, S::LANES, length);
        let head = |piece| Head::new(problem, piece, strips, reads.tiles());
        let mut heads: Vec<Head<R::Tile>> = heads.into_iter().map(head).collect();
        for head in &mut heads {
            for (index, strip) in strips.each().enumerate() {
                let mut state = head.strip(index, &strip).2;
                if strip.width == 2 * S::LANES {
                    state.take::<S, M, 2, R>(simd, &reads, problem.dims.key_dim);
                } else {
                    state.take::<S, M, 1, R>(simd, &reads, problem.dims.key_dim);
                }
            }
        }
        let mut keys = Keys::new(problem);
        let mut gates = Gates::new(S::LANES);
        for start in (0..length).step_by(CHUNK) {
            let tokens = start..length.min(start + CHUNK);
            for (index, head) in heads.iter_mut().enumerate() {
                // Keys with decays are a value head's own.
                if index == 0 || keys.channels.is_some() {
                    keys.take(simd, &head.tokens[tokens.clone()]);
                    reads.take(simd, &keys.packed);
                }
                gates.take(&keys.pairs, &head.tokens[tokens.clone()], problem.params.scale);
                for (at, strip) in strips.each().enumerate() {
                    let (all, y, state) = head.strip(at, &strip);
                    let (now, later) = all[start..].split_at(tokens.len());
                    let (y, later_y) = y[start..].split_at_mut(tokens.len());
                    let ahead = Ahead { tokens: later, y: later_y, keys: index == 0 };
                    let (keys, gates, reads) = (&keys, &mut gates, &mut reads);
                    let chunk = Chunk { keys, gates, reads, tokens: now, y, ahead };
                    if strip.width == 2 * S::LANES {
                        chunk.strip::<S, M, 2>(simd, strip.columns, state);
                    } else {
                        chunk.strip::<S, M, 1>(simd, strip.columns, state);
                    }
                }
            }
        }
        for Head { copy, state, .. } in heads {
            if let Some(copy) = copy {
                strips.restore(&copy, state);
            }
        }
    }
}

/// A value head.
struct Head<'p, 'r, 'y, T> {
    tokens: Vec<Token<'p>>,
    y: &'r mut [&'y mut [f32]],
    /// The state in strips, where it is not so already.
    copy: Option<Lines>,
    state: &'r mut [f32],
    /// Of each strip, as [`Reads`] has them.
    tiles: Vec<Vec<T>>,
}

impl<'p, 'r, 'y, T: Clone + Zeroable> Head<'p, 'r, 'y, T> {
    /// A strip has so many `tiles`.
    fn new(problem: &'p Problem<'p>, piece: Piece<'r, 'y>, strips: Strips, tiles: usize) -> Self {
        let Piece { tokens, columns, y, state } = piece;
        let head = columns.start / problem.dims.value_dim;
        let tokens = tokens.map(|t| problem.token(t, head)).collect();
        let tiles = vec![vec![T::zeroed(); tiles]; strips.each().count()];
        Self { tokens, y, copy: strips.copy(state), state, tiles }
    }

    /// The tokens, their rows of y, and strip `index`.
    fn strip(
        &mut self,
        index: usize,
        &Strip { start, stride, .. }: &Strip,
    ) -> (&[Token<'p>], &mut [&'y mut [f32]], State<'_, T>) {
        let rows = &mut self.copy.as_deref_mut().unwrap_or(self.state)[start..];
        (&self.tokens, self.y, State { rows, stride, tiles: &mut self.tiles[index] })
    }
}

/// A chunk's keys and queries of a key head, and their products. Rows of tokens that it lacks are
/// zero.
struct Keys {
    key_dim: usize,
    /// `[2 CHUNK, Dk]`: the keys, then the queries, times `g` where it is a vector.
    packed: Packed,
    pairs: Pairs,
    /// Their products with decays per channel, if there are some.
    channels: Option<Channels>,
    rule: Rule,
    /// A row of zeros.
    zeros: Vec<f32>,
}

impl Keys {
    fn new(problem: &Problem) -> Self {
        let key_dim = problem.dims.key_dim;
        let channels = problem.per_channel().then(|| Channels::new(key_dim));
        let (packed, pairs, rule) = (Packed::default(), Pairs::default(), problem.params.rule);
        Self { key_dim, packed, pairs, channels, rule, zeros: vec![0.0; key_dim] }
    }

    #[inline(always)]
    fn take<S: Simd>(&mut self, simd: S, tokens: &[Token]) {
        if let Some(channels) = &mut self.channels {
            channels.take(simd, tokens, (&mut self.packed, &mut self.pairs));
            return;
        }
        let rows = (0..2 * CHUNK).map(|row| match tokens.get(row % CHUNK) {
            Some(token) if row < CHUNK => token.k,
            Some(token) => token.q,
            None => &self.zeros,
        });
        self.packed.pack(rows, self.key_dim);
        let sides: &[usize] = if self.rule == Rule::Delta { &[0, CHUNK] } else { &[CHUNK] };
        self.pairs.compute(simd, &self.packed, self.key_dim, (sides, tokens.len()));
    }
}

/// A chunk's gates of a value head, and the memory in which its strips are computed.
struct Gates {
    /// `-beta[i] D[i][j] (k[i] . k[j])`, then `scale D[i][j] (q[i] . k[j])`; of use where `j < i`,
    /// and where `j <= i`.
    pairs: [[f32; CHUNK]; 2 * CHUNK],
    /// The factor of `S^T k[i]` in `delta[i]`, then of `S^T q[i]` in `y[i]`.
    kept: [f32; 2 * CHUNK],
    /// `D[last]`
    last: [f32; CHUNK],
    /// `g[last]`
    decay: f32,
    /// `[CHUNK, strip]`: `delta`.
    delta: Lines,
}

impl Gates {
    fn new(lanes: usize) -> Self {
        Self {
            pairs: [[0.0; CHUNK]; 2 * CHUNK],
            kept: [0.0; 2 * CHUNK],
            last: [0.0; CHUNK],
            decay: 1.0,
            delta: Lines::zeros(CHUNK * 2 * lanes),
        }
    }

    #[inline(always)]
    fn take(&mut self, Pairs(pairs): &Pairs, tokens: &[Token], scale: f32) {
        self.kept = [0.0; 2 * CHUNK];
        self.last = [0.0; CHUNK];
        self.decay = 1.0;
        for (i, token) in tokens.iter().enumerate() {
            self.decay *= token.decay;
            self.last[..i].iter_mut().for_each(|d| *d *= token.decay);
            self.last[i] = 1.0;
            for (row, factor) in [(i, -token.beta), (CHUNK + i, scale)] {
                let of_pairs = self.last.iter().zip(&pairs[row]);
                self.pairs[row].iter_mut().zip(of_pairs).for_each(|(x, (d, pair))| *x = pair * d * factor);
                self.kept[row] = self.decay * factor;
            }
        }
    }
}

/// A strip of the state, from its first element on.
struct State<'a, T> {
    rows: &'a mut [f32],
    stride: usize,
    /// As [`Reads`] has it.
    tiles: &'a mut [T],
}

impl<T> State<'_, T> {
    /// Lays what it is before the first token in tiles.
    #[inline(always)]
    fn take<S: Simd, const M: usize, const V: usize, R: Reads<Tile = T>>(
        &mut self,
        simd: S,
        reads: &R,
        key_dim: usize,
    ) {
        if self.tiles.is_empty() {
            return;
        }
        for first in (0..key_dim).step_by(M) {
            let mut rows = [[simd.splat(0.0); V]; M];
            for (i, row) in rows.iter_mut().enumerate() {
                for (n, v) in row.iter_mut().enumerate() {
                    *v = simd.load(&self.rows[(first + i) * self.stride + n * S::LANES..]);
                }
            }
            reads.take_state(simd, &rows, first, self.tiles);
        }
    }
}

/// A chunk of a value head.
struct Chunk<'a, 'p, 'y, R> {
    keys: &'a Keys,
    gates: &'a mut Gates,
    reads: &'a mut R,
    tokens: &'a [Token<'p>],
    y: &'a mut [&'y mut [f32]],
    ahead: Ahead<'a, 'p, 'y>,
}

/// The rows that the next chunk reads and writes. Those of a head are far apart in memory, so that
/// no processor foresees them; they are asked for a tile at a time, since it takes only so many
/// requests at once.
struct Ahead<'a, 'p, 'y> {
    tokens: &'a [Token<'p>],
    y: &'a [&'y mut [f32]],
    /// True if keys and queries are among them.
    keys: bool,
}

#[inline(always)]
fn ask_for<S: Simd>(simd: S, row: &[f32], columns: &Range<usize>) {
    const LINE: usize = 64 / size_of::<f32>();
    for column in columns.clone().step_by(LINE) {
        simd.prefetch(bytemuck::cast_slice(row), column * size_of::<f32>());
    }
}

impl<R: Reads> Chunk<'_, '_, '_, R> {
    /// Some columns, `V` vectors, of `delta`, `y` and the state.
    #[inline(always)]
    fn strip<S: Simd, const M: usize, const V: usize>(
        mut self,
        simd: S,
        columns: Range<usize>,
        mut state: State<'_, R::Tile>,
    ) {
        self.reads.begin(V * S::LANES, state.tiles);
        for first in (0..self.tokens.len()).step_by(M) {
            self.delta::<S, M, V>(simd, first, columns.clone(), &state);
        }
        for first in (0..self.tokens.len()).step_by(M) {
            self.y::<S, M, V>(simd, first, columns.clone(), &state);
        }
        self.update::<S, M, V>(simd, &mut state);
    }

    /// Rows `first..first + M` of `delta`.
    #[inline(always)]
    fn delta<S: Simd, const M: usize, const V: usize>(
        &mut self,
        simd: S,
        first: usize,
        columns: Range<usize>,
        state: &State<'_, R::Tile>,
    ) {
        for token in self.ahead.tokens.iter().skip(first).take(M) {
            ask_for(simd, token.v, &columns);
            if self.ahead.keys {
                ask_for(simd, token.k, &columns);
            }
        }
        let width = V * S::LANES;
        let corrects = self.keys.rule == Rule::Delta;
        let mut sums = match corrects {
            true => self.read::<S, M, V>(simd, first, state),
            false => [[simd.splat(0.0); V]; M],
        };
        for (sums, token) in sums.iter_mut().zip(&self.tokens[first..]) {
            let v = &token.v[columns.clone()];
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = simd.mul_add(simd.splat(token.beta), vector(simd, v, n), *sum);
            }
        }
        let pairs: &[_; M] = self.gates.pairs[first..].first_chunk().expect("rows of a tile");
        let (before, delta) = self.gates.delta.split_at_mut(first * width);
        if !corrects {
            return store(simd, &sums, delta, width);
        }
        accumulate::<S, M, V, CHUNK>(
            simd,
            &mut sums,
            &pairs,
            Rows { rows: before, stride: width, count: first },
        );
        for j in 0..M {
            let delta = sums[j];
            for i in j + 1..M {
                let pair = simd.splat(pairs[i][(first + j) % CHUNK]);
                for (sum, &delta) in sums[i].iter_mut().zip(&delta) {
                    *sum = simd.mul_add(pair, delta, *sum);
                }
            }
        }
        store(simd, &sums, delta, width);
    }

    /// Rows `first..first + M` of `y`.
    #[inline(always)]
    fn y<S: Simd, const M: usize, const V: usize>(
        &mut self,
        simd: S,
        first: usize,
        columns: Range<usize>,
        state: &State<'_, R::Tile>,
    ) {
        for (token, y) in self.ahead.tokens.iter().zip(self.ahead.y).skip(first).take(M) {
            ask_for(simd, y, &columns);
            if self.ahead.keys {
                ask_for(simd, token.q, &columns);
            }
        }
        let width = V * S::LANES;
        let mut sums = self.read::<S, M, V>(simd, CHUNK + first, state);
        let pairs: &[_; M] = self.gates.pairs[CHUNK + first..].first_chunk().expect("rows of a tile");
        let (before, delta) = self.gates.delta.split_at(first * width);
        accumulate::<S, M, V, CHUNK>(
            simd,
            &mut sums,
            &pairs,
            Rows { rows: before, stride: width, count: first },
        );
        let delta = &delta[..M * width];
        // Not by `accumulate`: a token must not read what comes after it, were it NaN.
        for j in 0..M {
            for n in 0..V {
                let delta = simd.load(&delta[j * width + n * S::LANES..]);
                for i in j..M {
                    let pair = simd.splat(pairs[i][(first + j) % CHUNK]);
                    sums[i][n] = simd.mul_add(pair, delta, sums[i][n]);
                }
            }
        }
        for (sums, y) in sums.iter().zip(&mut self.y[first..]) {
            let y = &mut y[columns.clone()];
            for (n, &sum) in sums.iter().enumerate() {
                let y = &mut y[n * S::LANES..];
                let lanes = y.len().min(S::LANES);
                simd.store_partial(sum, &mut y[..lanes]);
            }
        }
    }

    /// `S^T x` of `M` of the packed rows, times what is kept of it.
    #[inline(always)]
    fn read<S: Simd, const M: usize, const V: usize>(
        &self,
        simd: S,
        first: usize,
        state: &State<'_, R::Tile>,
    ) -> [[S::V; V]; M] {
        let mut sums = self.reads.read::<S, M, V>(simd, &self.keys.packed, first, state);
        let kept: &[f32; M] = self.gates.kept[first..].first_chunk().expect("rows of a tile");
        for (sums, &kept) in sums.iter_mut().zip(kept) {
            for sum in sums {
                *sum = simd.mul(*sum, simd.splat(kept));
            }
        }
        sums
    }

    #[inline(always)]
    fn update<S: Simd, const M: usize, const V: usize>(&mut self, simd: S, state: &mut State<'_, R::Tile>) {
        let (c, width) = (self.tokens.len(), V * S::LANES);
        let Gates { delta, last, decay, .. } = &mut *self.gates;
        for j in 0..c {
            for n in 0..V {
                let delta = &mut delta[j * width + n * S::LANES..];
                simd.store(simd.mul(simd.load(delta), simd.splat(last[j])), delta);
            }
        }
        let decay = simd.splat(*decay);
        let channels = self.keys.channels.as_ref();
        let keys = channels.map_or(&self.keys.packed, |channels| &channels.added);
        for first in (0..self.keys.key_dim).step_by(M) {
            let (rows, stride) = (&mut state.rows[first * state.stride..], state.stride);
            let mut sums = [[simd.splat(0.0); V]; M];
            for i in 0..M {
                let decay = channels.map_or(decay, |channels| simd.splat(channels.kept[first + i]));
                for n in 0..V {
                    sums[i][n] = simd.mul(decay, simd.load(&rows[i * stride + n * S::LANES..]));
                }
            }
            let keys = Transposed(keys).rows::<M>(first, 0);
            accumulate::<S, M, V, CHUNK>(
                simd,
                &mut sums,
                &keys,
                Rows { rows: delta, stride: width, count: c },
            );
            store(simd, &sums, rows, stride);
            self.reads.take_state(simd, &sums, first, state.tiles);
        }
    }
}

/// Vector `n` of a row, with zeros past its end.
#[inline(always)]
fn vector<S: Simd>(simd: S, row: &[f32], n: usize) -> S::V {
    let row = &row[n * S::LANES..];
    if row.len() >= S::LANES { simd.load(row) } else { simd.load_partial(row, 0.0) }
}

/// Writes a tile to rows that are `stride` apart.
#[inline(always)]
fn store<S: Simd, const M: usize, const V: usize>(
    simd: S,
    sums: &[[S::V; V]; M],
    rows: &mut [f32],
    stride: usize,
) {
    for i in 0..M {
        for n in 0..V {
            simd.store(sums[i][n], &mut rows[i * stride + n * S::LANES..]);
        }
    }
}
