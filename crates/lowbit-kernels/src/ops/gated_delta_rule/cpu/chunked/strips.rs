//! A head's state while its tokens pass: strips of columns. Where a strip is used often it lies in
//! one piece, so that it fits a near cache, for whose lines rows of the whole state would compete.

use super::CHUNK;
use crate::gemm::{Lines, transpose};
use crate::ops::gated_delta_rule::{Dims, StateLayout};
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
    order: StateLayout,
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
    pub fn new(dims: Dims, order: StateLayout, lanes: usize, length: usize) -> Self {
        let Dims { key_dim, value_dim, .. } = dims;
        let whole = key_dim.is_multiple_of(TILE) && value_dim.is_multiple_of(lanes);
        let in_place = whole && order == StateLayout::KeyValue && length < COPIED;
        Self { in_place, key_dim, value_dim, lanes, order }
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
            match self.order {
                StateLayout::KeyValue => {
                    let rows = state.chunks_exact(self.value_dim);
                    for (strip, row) in strip.chunks_exact_mut(width).zip(rows) {
                        strip[..columns.len()].copy_from_slice(&row[columns.clone()]);
                    }
                }
                StateLayout::ValueKey => transpose(
                    (&state[columns.start * self.key_dim..], self.key_dim),
                    (strip, width),
                    (columns.len(), self.key_dim),
                ),
            }
        }
        Some(strips)
    }

    /// The inverse of [`Self::copy`].
    pub fn restore(self, strips: &[f32], state: &mut [f32]) {
        for Strip { columns, start, width, .. } in self.each() {
            let strip = &strips[start..][..self.key_dim * width];
            match self.order {
                StateLayout::KeyValue => {
                    let rows = state.chunks_exact_mut(self.value_dim);
                    for (strip, row) in strip.chunks_exact(width).zip(rows) {
                        row[columns.clone()].copy_from_slice(&strip[..columns.len()]);
                    }
                }
                StateLayout::ValueKey => transpose(
                    (strip, width),
                    (&mut state[columns.start * self.key_dim..], self.key_dim),
                    (self.key_dim, columns.len()),
                ),
            }
        }
    }
}
