//! Where the tokens of several sequences are, as kernels read it from offsets on the device.
//!
//! Sequences are cut into pieces of some size. Piece `i` of sequence `s` has the slot `offset[s] / size + s + i`: no two
//! pieces share one, and `tokens / size + sequences` slots hold all, whatever the offsets are.

use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Slots for the pieces of `sequences` sequences with `tokens` tokens in all.
pub(crate) fn slots(tokens: usize, sequences: usize, size: usize) -> usize {
    tokens / size + sequences
}

/// A part of a sequence's tokens.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Piece {
    pub sequence: usize,
    /// The sequence's tokens are `start..end`.
    pub start: usize,
    pub end: usize,
    /// The piece's tokens are `first..last`.
    pub first: usize,
    pub last: usize,
}

/// The tokens of a sequence, `start..end`. It has none where its offsets do not rise or go past `tokens`.
#[cube]
pub(crate) fn bounds(offsets: &[u32], sequence: usize, tokens: usize) -> (usize, usize) {
    let start = offsets[sequence] as usize;
    let end = offsets[sequence + 1] as usize;
    let right = start <= end && end <= tokens;
    (select(right, start, 0usize), select(right, end, 0usize))
}

/// The piece in `slot`, with no tokens where there is none.
#[cube]
pub(crate) fn piece(
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
