//! What the kernel is compiled for, and what follows from it.

use super::super::integers::Integers;
use super::super::share::{Order, Staging, Sums};
use super::source::{Making, Source};
use crate::gpu::layout::{Layout, RUN, Scales};
use lowbit_formats::FloatType;

/// Runs of a row that a unit has next to each other: those of the four units that share a row fill a cache line of 128
/// bytes at 4 bits.
pub const RUNS: usize = 2;
/// Values of a unit's runs.
pub const SPAN: usize = RUNS * RUN;

/// Vectors from one span of x to the next, where units share it.
pub const X_SPAN: usize = SPAN / 8 + 1;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub layout: Layout,
    /// The type of x, of 16 bits.
    pub dtype: FloatType,
    /// The type of y.
    pub result: FloatType,
    /// Rows of x that a cube takes.
    pub columns: usize,
    /// How many times 16 rows of the weight a cube takes.
    pub tiles: usize,
    /// Planes of a cube: each takes every so manieth four spans.
    pub planes: usize,
    /// Spans of x that units share at a time: a multiple of what all planes take in a step.
    pub chunk: usize,
    /// Spans whose scales units share at a time.
    pub scaled: usize,
    /// Vectors of the one row of x where a cube makes it, as `silu(x) * up`; 0 where it is there.
    pub made: usize,
    /// See [`Target::overlaps`](crate::gpu::compile::Target::overlaps).
    pub overlaps: bool,
}

impl Shape {
    /// The codes as tensor cores take them.
    pub fn integers(self) -> Integers {
        match self.columns {
            // More would take too many registers.
            ..=2 => Integers::unshifted(self.layout, self.dtype),
            _ => Integers::new(self.layout, self.dtype),
        }
    }

    /// Words that hold a span's codes as [`Integers::halves`] says.
    pub fn halves(self) -> usize {
        self.integers().halves(SPAN)
    }

    /// Whether the sums of x are needed.
    pub fn sums(self) -> bool {
        self.integers().zero() != 0.0 || self.layout.biased()
    }

    /// Values of a span that share a scale.
    pub fn group(self) -> usize {
        self.layout.group_within(SPAN)
    }

    /// Groups of a span.
    pub fn groups(self) -> usize {
        SPAN / self.group()
    }

    /// Pairs of rows of x.
    pub fn pairs(self) -> usize {
        self.columns.div_ceil(2)
    }

    /// Spans that a unit needs scales of: two neighbours may share them.
    pub fn scaled_spans(self) -> usize {
        match self.layout.scales {
            Scales::Group { size: 128.., .. } => 1,
            _ => 2,
        }
    }

    /// Sums of x for a span of all rows; 0 where none are needed.
    pub fn x_sums(self) -> usize {
        if self.sums() { self.columns * self.groups() } else { 0 }
    }

    /// Rows of the weight that a unit has parts of.
    pub fn rows(self) -> usize {
        2 * self.tiles
    }

    /// Words of codes that a unit loads for one step.
    pub fn fetched(self) -> usize {
        self.rows() * RUNS * self.layout.bits
    }

    /// Elements that a unit brings of a chunk.
    pub fn elements_a_unit(self, biases: bool) -> usize {
        (16 * self.tiles * pick(self.layout.elements(RUNS * self.chunk), biases)).div_ceil(32 * self.planes)
    }

    /// Elements from one row to the next where units share them: 16 bytes more than there are, so that 8 rows lie
    /// in different banks.
    pub fn element_rows(self) -> (usize, usize) {
        let (scales, biases) = self.layout.elements(RUNS * self.scaled);
        let (scale, bias) = self.layout.scale_sizes();
        (scales + 16 / scale, biases + 16 / bias)
    }

    /// Vectors from one row of x to the next: 64 bytes more than there are, for two rows at a time.
    pub fn x_row(self) -> usize {
        X_SPAN * self.chunk + 4
    }

    /// Vectors of x that units share, and as many zeros as a span has.
    pub fn x_vectors(self) -> usize {
        self.columns * self.x_row() + SPAN / 8
    }

    /// Floats that scale two spans of a row.
    pub fn span_scales(self) -> usize {
        self.scaled_spans() * self.groups()
    }

    /// The sums of products for pair `f` of rows of x.
    pub fn product_at(self, f: usize, tile: usize, group: usize) -> usize {
        ((f * self.tiles + tile) * self.groups() + group) * 4
    }

    /// How the units share x.
    pub fn staging(self) -> Staging {
        Staging {
            integers: self.integers(),
            columns: self.columns,
            values: SPAN * self.chunk,
            row: self.x_row(),
            part: RUN,
            group: if self.sums() { self.group() } else { 0 },
            sums: self.chunk * self.groups(),
            order: Order::Spans { vectors: SPAN / 8 },
            units: 32 * self.planes,
            listed: false,
        }
    }

    /// How a cube makes x.
    pub fn making(self) -> Making {
        let source = if self.made == 0 { Source::Tensor } else { Source::SiluMul };
        Making::new(source, self.dtype, 8 * self.made, 32 * self.planes)
    }

    /// What the cube stores.
    pub fn stored(self) -> Sums {
        Sums {
            rows: 16 * self.tiles,
            columns: 2 * self.pairs(),
            parts: self.planes,
            units: 32 * self.planes,
            result: self.result,
            listed: false,
        }
    }
}

/// What is said of scales or of biases.
pub(super) fn pick((scales, added): (usize, usize), biases: bool) -> usize {
    if biases { added } else { scales }
}
