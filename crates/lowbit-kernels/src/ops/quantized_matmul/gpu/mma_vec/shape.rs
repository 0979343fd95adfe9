//! What the kernel is compiled for, and what follows from it.

use crate::gpu::layout::{Codes, Layout, RUN, Scales};
use lowbit_formats::FloatType;

/// Runs of a row that a unit has next to each other: those of the four units that share a row fill a cache line of 128
/// bytes at 4 bits.
pub const RUNS: usize = 2;
/// Values of a unit's runs.
pub const SPAN: usize = RUNS * RUN;

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
    /// See [`Target::overlaps`](crate::gpu::compile::Target::overlaps).
    pub overlaps: bool,
}

impl Shape {
    /// How far apart the two codes are that are taken to the halves of a word together. Both lie in one group.
    pub fn distance(self) -> usize {
        match self.layout.bits {
            2 => 8,
            4 => 4,
            _ if self.layout.group() < RUN => 8,
            _ => 16,
        }
    }

    /// Words that hold as many codes each in their lower and in their upper halves, for twice [`Self::distance`] codes.
    pub fn words(self) -> usize {
        (self.distance() * self.layout.bits).div_ceil(16)
    }

    /// Words that hold a span's codes so.
    pub fn halves(self) -> usize {
        SPAN / (2 * self.distance()) * self.words()
    }

    /// The lowest bit of a code in the mantissa. f16 holds codes as subnormals; bf16's products with those would be
    /// subnormal themselves.
    pub fn place(self) -> usize {
        if self.dtype == FloatType::BF16 { 7 - self.layout.bits } else { 0 }
    }

    /// What products are multiplied with to make up for the codes' place.
    pub fn factor(self) -> f32 {
        match self.dtype {
            FloatType::BF16 => (1u32 << self.layout.bits) as f32,
            _ => (1u32 << 24) as f32,
        }
    }

    /// What is subtracted from each code: its zero, and the one that bf16 adds.
    pub fn zero(self) -> f32 {
        let Codes::Integer { zero } = self.layout.codes else { unreachable!("see `supports`") };
        zero as f32 + if self.dtype == FloatType::BF16 { self.factor() } else { 0.0 }
    }

    /// Whether the sums of x are needed.
    pub fn sums(self) -> bool {
        self.zero() != 0.0 || self.layout.biased()
    }

    /// Values of a span that share a scale.
    pub fn group(self) -> usize {
        match self.layout.scales {
            Scales::Group { size, .. } => size.min(SPAN),
            _ => self.layout.group(),
        }
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

    /// Elements of the planes of scales and of biases for `runs` runs of a row, a whole number of groups.
    pub fn elements(self, runs: usize) -> (usize, usize) {
        match self.layout.scales {
            // Integers have none of these.
            Scales::One | Scales::E8M0 { .. } | Scales::E4M3 => (0, 0),
            Scales::Group { size, biased, .. } => {
                let groups = runs * RUN / size;
                (groups, if biased { groups } else { 0 })
            }
            Scales::Super { .. } | Scales::SuperWithMinima { .. } => (runs, runs / 8),
        }
    }

    /// Elements that a unit brings of a chunk.
    pub fn elements_a_unit(self, biases: bool) -> usize {
        (16 * self.tiles * pick(self.elements(RUNS * self.chunk), biases)).div_ceil(32 * self.planes)
    }

    /// Elements from one row to the next where units share them: 8 bytes more than there are, so that 8 rows lie in
    /// different banks.
    pub fn element_rows(self) -> (usize, usize) {
        let (scales, biases) = self.elements(RUNS * self.chunk);
        let (scale, bias) = self.layout.scale_sizes();
        (scales + 8 / scale, biases + 8 / bias)
    }

    /// Vectors from one row of x to the next: 64 bytes more than there are, for two rows at a time.
    pub fn x_row(self) -> usize {
        SPAN / 8 * self.chunk + 4
    }

    /// The sums of products for pair `f` of rows of x.
    pub fn product_at(self, f: usize, tile: usize, group: usize) -> usize {
        ((f * self.tiles + tile) * self.groups() + group) * 4
    }

    /// The values of the span that pair `q` of codes stands for.
    pub fn pair(self, q: usize) -> (usize, usize) {
        let distance = self.distance();
        let low = q / distance * 2 * distance + q % distance;
        (low, low + distance)
    }
}

/// What is said of scales or of biases.
pub(super) fn pick((scales, added): (usize, usize), biases: bool) -> usize {
    if biases { added } else { scales }
}
