//! A head's state while its tokens pass: strips of columns. Where a strip is used often it lies in
//! one piece, so that it fits a near cache, for whose lines rows of the whole state would compete.

use super::CHUNK;
use crate::gemm::Lines;
use crate::ops::gated_delta_rule::Dims;
use std::ops::Range;

/// The most rows of a tile.
const TILE: usize = 8;

/// A copy pays for itself from this many tokens (measured at `Dk = Dv = 128`).
const COPIED: usize = 8 * CHUNK;

/// The strips of a state: of two vectors of columns, and of one where no more are left.
#[derive(Clone, Copy)]
pub(super) struct Strips {
    /// True if the strips are those of the caller's state.
    in_place: bool,
    key_dim: usize,
    value_dim: usize,
    lanes: usize,
}

/// The place of a strip's columns.
pub(super) struct Strip {
    /// Of the whole state.
    pub columns: Range<usize>,
    /// Their number, with what fills the last vector.
    pub width: usize,
    /// The first element of the first row, and how far rows are apart. There are rows that fill the
    /// last tile.
    pub start: usize,
    pub stride: usize,
}

impl Strips {
    /// For a sequence of `length` tokens.
    pub fn new(dims: Dims, lanes: usize, length: usize) -> Self {
        let Dims { key_dim, value_dim, .. } = dims;
        let whole = key_dim.is_multiple_of(TILE) && value_dim.is_multiple_of(lanes);
        Self { in_place: whole && length < COPIED, key_dim, value_dim, lanes }
    }

    pub fn each(self) -> impl Iterator<Item = Strip> {
        let rows = self.key_dim.next_multiple_of(TILE);
        (0..self.value_dim).step_by(2 * self.lanes).map(move |start| {
            let columns = start..self.value_dim.min(start + 2 * self.lanes);
            let width = columns.len().next_multiple_of(self.lanes);
            if self.in_place {
                Strip { start, stride: self.value_dim, width, columns }
            } else {
                Strip { start: start * rows, stride: width, width, columns }
            }
        })
    }

    /// A copy of the state in strips, unless they are the state's own.
    pub fn copy(self, state: &[f32]) -> Option<Lines> {
        if self.in_place {
            return None;
        }
        let rows = self.key_dim.next_multiple_of(TILE);
        let mut strips = Lines::zeros(rows * self.value_dim.next_multiple_of(self.lanes));
        for Strip { columns, start, width, .. } in self.each() {
            let strip = &mut strips[start..][..rows * width];
            for (strip, row) in strip.chunks_exact_mut(width).zip(state.chunks_exact(self.value_dim)) {
                strip[..columns.len()].copy_from_slice(&row[columns.clone()]);
            }
        }
        Some(strips)
    }

    /// The inverse of [`Self::copy`].
    pub fn restore(self, strips: &[f32], state: &mut [f32]) {
        for Strip { columns, start, width, .. } in self.each() {
            let strip = &strips[start..][..self.key_dim * width];
            for (strip, row) in strip.chunks_exact(width).zip(state.chunks_exact_mut(self.value_dim)) {
                row[columns.clone()].copy_from_slice(&strip[..columns.len()]);
            }
        }
    }
}
