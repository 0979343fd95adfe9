//! The cut of ops that carry state along sequences into pieces for threads.

use crate::Cpu;
use std::collections::HashSet;
use std::ops::Range;

/// Cuts an op that carries state along sequences into independent pieces: a sequence and a block of
/// columns.
#[derive(Clone, Copy, Debug)]
pub struct Scan<'a> {
    /// The tokens of each sequence, one after another.
    pub sequences: &'a [Range<usize>],
    /// Columns of the output, `[tokens, width]`.
    pub width: usize,
    /// Columns of a piece; the last one of a sequence may have fewer.
    pub block: usize,
    /// State elements a column; the state is `[sequences, width, ..]`, or `[rows, width, ..]`.
    pub state: usize,
    /// The row of the state of each sequence; `None` if sequence `s` has row `s`. Of sequences that
    /// share a row, the first leaves its state there; the others start from the same state.
    pub slots: Option<&'a [u32]>,
}

/// One piece of a [`Scan`].
pub struct Piece<'r, 'y> {
    /// Its sequence's tokens.
    pub tokens: Range<usize>,
    /// Its columns.
    pub columns: Range<usize>,
    /// The columns of the output, token by token.
    pub y: &'r mut [&'y mut [f32]],
    /// The columns' state.
    pub state: &'r mut [f32],
}

impl Scan<'_> {
    /// Calls `f` for each piece that has tokens, on all threads. `y` is `[tokens, width]`; an
    /// element of it takes `cost` simple operations.
    pub fn run(
        &self,
        cpu: &Cpu,
        cost: usize,
        y: &mut [f32],
        state: &mut [f32],
        f: impl Fn(Piece) + Sync + Send,
    ) {
        let work = Cpu::work(y.len().saturating_mul(cost));
        self.cut(y, state, |pieces| cpu.for_each_of(work, pieces, f));
    }

    /// As [`Self::run`], with the pieces of a sequence in one call whose blocks have the same
    /// `key`.
    pub fn run_together(
        &self,
        cpu: &Cpu,
        cost: usize,
        y: &mut [f32],
        state: &mut [f32],
        key: impl Fn(usize) -> usize,
        f: impl Fn(Vec<Piece>) + Sync + Send,
    ) {
        let work = Cpu::work(y.len().saturating_mul(cost));
        let key = |piece: &Piece| (piece.tokens.start, key(piece.columns.start / self.block));
        self.cut(y, state, |mut pieces| {
            pieces.sort_by_key(key);
            let mut groups: Vec<Vec<Piece>> = vec![];
            for piece in pieces {
                match groups.last_mut() {
                    Some(group) if key(&group[0]) == key(&piece) => group.push(piece),
                    _ => groups.push(vec![piece]),
                }
            }
            cpu.for_each_of(work, groups, f);
        });
    }

    /// Calls `f` with all pieces that have tokens.
    fn cut(&self, y: &mut [f32], state: &mut [f32], f: impl FnOnce(Vec<Piece>)) {
        if y.is_empty() {
            return;
        }
        let blocks = self.width.div_ceil(self.block);
        // Token by token to piece by piece: a row's blocks go to `blocks` different pieces.
        let mut rows = Vec::with_capacity(y.len() / self.width * blocks);
        let mut cut: Vec<_> = y.chunks_mut(self.width).map(|row| row.chunks_mut(self.block)).collect();
        for tokens in self.sequences {
            for _ in 0..blocks {
                rows.extend(cut[tokens.clone()].iter_mut().map(|row| row.next().expect("a block a piece")));
            }
        }
        let mut rows = rows.as_mut_slice();
        let mut pieces = Vec::with_capacity(self.sequences.len() * blocks);
        let mut copies = self.copies(state);
        for (tokens, mut states) in
            self.filled().map(|(tokens, _)| tokens).zip(self.states(state, &mut copies))
        {
            for block in 0..blocks {
                let columns = block * self.block..self.width.min((block + 1) * self.block);
                let y = rows.split_off_mut(..tokens.len()).expect("a row a token");
                let state =
                    states.split_off_mut(..columns.len() * self.state).expect("state for each column");
                pieces.push(Piece { tokens: tokens.clone(), columns, y, state });
            }
        }
        f(pieces);
    }

    /// The sequences that have tokens, and their rows of the state.
    fn filled(&self) -> impl Iterator<Item = (&Range<usize>, usize)> {
        let row = |sequence| self.slots.map_or(sequence, |slots| slots[sequence] as usize);
        let all = self.sequences.iter().enumerate().map(move |(sequence, tokens)| (tokens, row(sequence)));
        all.filter(|(tokens, _)| !tokens.is_empty())
    }

    /// Copies of the rows that several sequences start from, one for each of them but the first.
    fn copies(&self, state: &[f32]) -> Vec<f32> {
        let (len, mut taken) = (self.width * self.state, HashSet::new());
        let shared = self.filled().filter(|&(_, row)| !taken.insert(row));
        shared.flat_map(|(_, row)| &state[row * len..][..len]).copied().collect()
    }

    /// The state of each sequence that has tokens: its row, or the next copy if an earlier sequence
    /// has the row.
    fn states<'s>(&self, state: &'s mut [f32], copies: &'s mut [f32]) -> Vec<&'s mut [f32]> {
        // Without state per column every row is empty.
        let len = (self.width * self.state).max(1);
        let mut rows: Vec<_> = state.chunks_mut(len).map(Some).collect();
        let mut copies = copies.chunks_mut(len);
        let mut take = |row: usize| rows.get_mut(row).and_then(Option::take).or_else(|| copies.next());
        self.filled().map(|(_, row)| take(row).unwrap_or_default()).collect()
    }
}
