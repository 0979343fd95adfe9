//! What the kernel is compiled for, and what follows from it.

use super::super::integers::Integers;
use super::super::share::{Order, Staging, Sums};
use crate::gpu::layout::{Layout, RUN};
use lowbit_formats::FloatType;

/// Values of a row that a plane takes in a step.
pub const STEP: usize = 256;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub layout: Layout,
    /// The type of x, of 16 bits.
    pub dtype: FloatType,
    /// The type of y.
    pub result: FloatType,
    /// Rows of x that a cube takes: a multiple of 8.
    pub columns: usize,
    /// How many times 16 rows of the weight a plane takes.
    pub tiles: usize,
    /// How many times these rows a cube takes, by as many planes.
    pub strips: usize,
    /// Planes that share them: each takes every so manieth step.
    pub splits: usize,
    /// Steps of x that a cube has at a time: a multiple of what all planes take.
    pub chunk: usize,
    /// Whether rows are whole steps.
    pub whole: bool,
    /// The most ids that cubes find their rows by, a batch of the weight each; 0 where rows of x follow each other.
    pub ids: usize,
    /// See [`Target::overlaps`](crate::gpu::compile::Target::overlaps).
    pub overlaps: bool,
}

impl Shape {
    /// The codes as tensor cores take them.
    pub fn integers(self) -> Integers {
        Integers::new(self.layout, self.dtype)
    }

    /// With as few steps of x at a time as fit `memory` bytes that a cube's units share.
    pub fn fitting(mut self, memory: usize) -> Self {
        while self.memory() > memory && self.chunk >= 2 * self.splits {
            self.chunk /= 2;
        }
        self
    }

    /// Bytes that a cube's units share.
    fn memory(self) -> usize {
        let x = self.columns * (16 * self.x_row() + 4 * self.sum_row());
        let list = if self.listed() { 2 * self.ids + 4 * self.columns + 16 } else { 0 };
        x + self.rows() * (8 * self.term_row() + 4 * self.splits * self.columns) + list
    }

    /// Whether a cube takes the rows of x that chose its batch of the weight.
    pub fn listed(self) -> bool {
        self.ids > 0
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        32 * self.strips * self.splits
    }

    /// Rows of the weight that a cube takes.
    pub fn rows(self) -> usize {
        16 * self.tiles * self.strips
    }

    /// Values that share a scale, as far as units take them together.
    pub fn group(self) -> usize {
        group(self.layout)
    }

    /// Groups of a step, an even number.
    pub fn groups(self) -> usize {
        STEP / self.group()
    }

    /// Values of a group that a unit has of each of its rows.
    pub fn part(self) -> usize {
        self.group() / 4
    }

    /// Words of codes that a unit has of a group, of one row.
    pub fn words(self) -> usize {
        self.part() * self.layout.bits / 32
    }

    /// Words that one load moves: a unit's part is a whole number of loads.
    pub fn vector(self) -> usize {
        1 << self.words().trailing_zeros().min(2)
    }

    /// How many times 8 rows of x there are.
    pub fn columns8(self) -> usize {
        self.columns / 8
    }

    /// Vectors from one row of x to the next: 64 bytes more than there are, for two rows at a time.
    pub fn x_row(self) -> usize {
        self.chunk * STEP / 8 + 4
    }

    /// Sums of x from one row to the next: pairs of rows lie in different banks.
    pub fn sum_row(self) -> usize {
        self.chunk * self.groups() + 4
    }

    /// Terms from one row of the weight to the next: those of two groups of 8 rows lie in different banks.
    pub fn term_row(self) -> usize {
        self.chunk * self.groups() + 2
    }

    /// Terms that a unit brings of a chunk.
    pub fn terms_a_unit(self) -> usize {
        (self.rows() * self.chunk * self.groups()).div_ceil(self.units())
    }

    /// How the units share x.
    pub fn staging(self) -> Staging {
        Staging {
            integers: self.integers(),
            columns: self.columns,
            values: STEP * self.chunk,
            row: self.x_row(),
            part: (2 * self.integers().distance()).max(8),
            // Tensor cores add up more in less time.
            group: 0,
            sums: 0,
            order: Order::Quarters { vectors: self.group() / 8 },
            units: self.units(),
            listed: self.listed(),
        }
    }

    /// What the cube stores.
    pub fn stored(self) -> Sums {
        Sums {
            rows: self.rows(),
            columns: self.columns,
            parts: self.splits,
            units: self.units(),
            result: self.result,
            listed: self.listed(),
        }
    }
}

/// Values that share a scale, as far as units take them together.
pub fn group(layout: Layout) -> usize {
    layout.group_within(4 * RUN)
}
