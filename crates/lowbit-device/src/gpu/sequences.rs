//! The tokens of each of several sequences, computed in kernels from the offsets `cu_seqlens` on
//! the device: a captured pass may replay with other lengths.
//!
//! Sequence `s` is tokens `offsets[s]..offsets[s + 1]`. It is cut into pieces of `size` tokens, the
//! last one shorter. Piece `i` of sequence `s` has slot `offsets[s] / size + s + i`: no two pieces
//! share a slot, and `tokens / size + sequences` slots are enough whatever the offsets are. So the
//! host can launch work for every slot without knowing the lengths. Offsets may be wrong: all
//! functions here stay within `tokens` even then.

use super::launch::LaunchArgs;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The sequences of a call that carries a state along each: their offsets, and the rows of the
/// state that they read and write.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub struct Sequences {
    pub offsets: Box<[u32]>,
    /// Read only where the states are in a pool.
    pub rows: Box<[u32]>,
}

impl<'a> SequencesArgs<'a> {
    /// `slots` are the rows of a pool; without them sequence `s` has row `s`.
    pub fn new(cu_seqlens: &'a Tensor, slots: Option<&'a Tensor>) -> Result<Self, KernelError> {
        // An unused operand gets a placeholder buffer.
        Ok(Self { offsets: cu_seqlens.buffer()?, rows: slots.unwrap_or(cu_seqlens).buffer()? })
    }
}

/// The row of the state that a sequence has. `counts` are the sequences and the rows; the result is
/// the number of rows, one past the last, if there is no such sequence or the pool lacks its row.
#[cube]
pub fn state_row(of: &Sequences, sequence: usize, counts: (usize, usize), #[comptime] pooled: bool) -> usize {
    let (sequences, rows) = counts;
    let mut row = rows;
    if sequence < sequences {
        if comptime!(pooled) {
            row = min(of.rows[sequence] as usize, rows);
        } else {
            row = sequence;
        }
    }
    row
}

/// The most slots for the pieces of `sequences` sequences with `tokens` tokens in all.
pub fn slots(tokens: usize, sequences: usize, size: usize) -> usize {
    tokens / size + sequences
}

/// A piece of a sequence.
#[derive(CubeType, Clone, Copy)]
pub struct Piece {
    pub sequence: usize,
    /// The sequence's tokens are `start..end`.
    pub start: usize,
    pub end: usize,
    /// The piece's tokens are `first..last`.
    pub first: usize,
    pub last: usize,
}

/// The tokens of a sequence, `start..end`; none if its offsets fall or exceed `tokens`.
#[cube]
pub fn bounds(offsets: &[u32], sequence: usize, tokens: usize) -> (usize, usize) {
    let start = offsets[sequence] as usize;
    let end = offsets[sequence + 1] as usize;
    let right = start <= end && end <= tokens;
    (select(right, start, 0usize), select(right, end, 0usize))
}

/// The piece in `slot`; one without tokens if the slot is empty.
#[cube]
pub fn piece(
    offsets: &[u32],
    slot: usize,
    sequences: usize,
    tokens: usize,
    #[comptime] size: usize,
) -> Piece {
    let mut sequence = 0usize;
    let mut beyond = sequences;
    while beyond - sequence > 1usize {
        let middle = (sequence + beyond) / 2usize;
        if offsets[middle] as usize / size + middle <= slot {
            sequence = middle;
        } else {
            beyond = middle;
        }
    }
    let (start, end) = bounds(offsets, sequence, tokens);
    let slot0 = start / size + sequence;
    let first = start + (max(slot, slot0) - slot0) * size;
    let last = min(first + size, end);
    let some = slot >= slot0 && first < end;
    Piece { sequence, start, end, first, last: select(some, last, first) }
}
