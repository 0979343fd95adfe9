//! The compile-time configuration of the kernel, and what follows from it.

use super::super::super::problem::{Problem, Source, VECTOR};
use super::super::numbers::Numbers;
use super::super::staging::{Order, Staging, Sums};
use super::make_x::XConfig;
use crate::gpu::caps::Caps;
use crate::gpu::layout::{Layout, RUN, Scales};
use crate::ops::glu::Gate;
use lowbit_formats::FloatType;

/// Runs of a row that a unit has next to each other: those of the four units that share a row fill
/// a cache line of 128 bytes at 4 bits.
pub const RUNS: usize = 2;
/// Values of a unit's runs.
pub const SPAN: usize = RUNS * RUN;

/// Vectors from one span of x to the next, where units share it.
pub const X_SPAN: usize = SPAN / 8 + 1;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaVec {
    pub layout: Layout,
    /// Of 16 bits.
    pub x_type: FloatType,
    pub y_type: FloatType,
    /// Rows of x per cube.
    pub m_tile: usize,
    /// Tiles of 16 rows of the weight per cube.
    pub n_tiles: usize,
    /// Planes per cube: they take four spans each in turn.
    pub planes: usize,
    /// Spans of x that units share at a time: a multiple of what all planes take in a step.
    pub chunk: usize,
    /// Spans whose scales units share at a time.
    pub scaled: usize,
    /// The gate and the vectors of the one row of x where a cube makes it; `None` where it is
    /// there.
    pub made: Option<(Gate, usize)>,
    /// See [`Target::overlaps`](crate::gpu::compile::Target::overlaps).
    pub overlaps: bool,
}

impl MmaVec {
    /// For rows of x that are made of so many vectors by a gate, or that are there.
    pub fn new(caps: &Caps, problem: &Problem, made: Option<(Gate, usize)>) -> Self {
        let Problem { m, n, batches, layout, x_type, y_type, .. } = *problem;
        let runs = problem.runs();
        // Fewer planes than these do not fill the multiprocessors of an H200: 12 each.
        let filled = caps.multiprocessors * 12;
        let m_tile = m.next_power_of_two().min(8);
        let others = batches * m.div_ceil(m_tile);
        // Measured at 4 bits: planes of 4 steps, and 32 rows of the weight per cube, which share x,
        // where that leaves enough cubes; 16 for one row of x, which leaves little to share. More
        // planes than fit all at once make the last ones wait for all that the first ones wait for.
        let planes = (runs / 32).next_power_of_two().clamp(if runs < 32 { 2 } else { 4 }, 8);
        let enough = |tiles: usize| others * n.div_ceil(16 * tiles) * planes >= filled;
        let (n_tiles, planes) = match (enough(2), enough(1)) {
            (true, _) if m == 1 && batches == 1 => (1, planes),
            (true, _) => (2, planes),
            // Short rows leave little to do for what a cube begins with.
            (_, true) if runs < 32 => (2, planes),
            (_, true) => (1, planes),
            _ => (1, 8),
        };
        // Up to 32 KiB of x, or 64 of 8 rows.
        let most = if m_tile < 8 { 256 / m_tile } else { 64 };
        let chunk = runs.div_ceil(2).next_power_of_two().min(most).max(4 * planes);
        let overlaps = caps.overlaps;
        Self { layout, x_type, y_type, m_tile, n_tiles, planes, chunk, scaled: chunk, made, overlaps }
    }

    /// The codes as tensor cores take them.
    pub fn numbers(self) -> Numbers {
        match self.m_tile {
            // More would take too many registers.
            ..=2 => Numbers::unshifted(self.layout, self.x_type),
            _ => Numbers::new(self.layout, self.x_type),
        }
    }

    /// Words that hold a span's codes as [`Numbers::halves`] says.
    pub fn halves(self) -> usize {
        self.numbers().halves(SPAN)
    }

    /// True if the sums of x are needed.
    pub fn sums(self) -> bool {
        self.numbers().zero() != 0.0 || self.layout.biased()
    }

    /// Values of a span that share a scale.
    pub fn group(self) -> usize {
        self.layout.group_within(SPAN)
    }

    /// Groups of a span.
    pub fn groups(self) -> usize {
        SPAN / self.group()
    }

    /// True if one row of x has the columns of two: the first four columns its spans' first runs,
    /// the others their second ones. Each unit then scales half as many products.
    pub fn runs_apart(self) -> bool {
        self.m_tile == 1 && self.groups() > 1
    }

    /// Groups of a span whose products are in a column.
    pub fn column_groups(self) -> usize {
        if self.runs_apart() { self.groups() / RUNS } else { self.groups() }
    }

    /// Pairs of rows of x.
    pub fn pairs(self) -> usize {
        self.m_tile.div_ceil(2)
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
        if self.sums() { self.m_tile * self.groups() } else { 0 }
    }

    /// Rows of the weight that a unit has parts of.
    pub fn n_unit(self) -> usize {
        2 * self.n_tiles
    }

    /// Words of codes that a unit loads for one step.
    pub fn fetched(self) -> usize {
        self.n_unit() * RUNS * self.layout.bits
    }

    /// Elements that a unit brings of a chunk.
    pub fn elements_per_unit(self, biases: bool) -> usize {
        (16 * self.n_tiles * of_kind(self.layout.elements(RUNS * self.chunk), biases))
            .div_ceil(32 * self.planes)
    }

    /// Elements from one row to the next where units share them: 16 bytes more than there are, so
    /// that 8 rows lie in different banks.
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
        self.m_tile * self.x_row() + SPAN / 8
    }

    /// Floats that scale two spans of a row.
    pub fn span_scales(self) -> usize {
        self.scaled_spans() * self.groups()
    }

    /// The sums of products for pair `f` of rows of x, of a column's group `group`.
    pub fn product_at(self, f: usize, tile: usize, group: usize) -> usize {
        ((f * self.n_tiles + tile) * self.column_groups() + group) * 4
    }

    /// The staging of x, which the units share.
    pub fn staging(self) -> Staging {
        Staging {
            numbers: self.numbers(),
            m_tile: self.m_tile,
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

    /// Vectors of x that a cube makes.
    pub fn made_vectors(self) -> usize {
        self.made.map_or(0, |(_, vectors)| vectors)
    }

    /// The configuration with which a cube makes x.
    pub fn x_config(self) -> XConfig {
        let source = self.made.map(|(by, _)| Source::Glu(by));
        XConfig::new(source, self.x_type, VECTOR * self.made_vectors(), 32 * self.planes)
    }

    /// The sums that the cube stores.
    pub fn stored(self) -> Sums {
        Sums {
            n_tile: 16 * self.n_tiles,
            m_tile: 2 * self.pairs(),
            parts: self.planes,
            units: 32 * self.planes,
            y_type: self.y_type,
            listed: false,
        }
    }
}

/// The value for biases if `biases`, else that for scales.
pub(super) fn of_kind((scales, added): (usize, usize), biases: bool) -> usize {
    if biases { added } else { scales }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::gpu::compile::{CudaDevice, Target};
    use lowbit_formats::Format;

    #[test]
    fn cuts() {
        let target = Target::cuda(CudaDevice::H100);
        // (batches, (m, n, runs)) -> m_tile, n_tiles, planes, chunk
        let table = [
            ((1, (1, 14336, 128)), (1, 1, 4, 64)),
            ((1, (1, 4096, 128)), (1, 1, 8, 64)),
            ((1, (1, 4096, 448)), (1, 1, 8, 256)),
            ((1, (1, 28672, 256)), (1, 1, 8, 128)),
            ((8, (1, 512, 64)), (1, 1, 8, 32)),
            ((64, (1, 512, 64)), (1, 2, 4, 32)),
            ((18, (1, 512, 64)), (1, 1, 4, 32)),
            ((9, (1, 2048, 16)), (1, 2, 2, 8)),
            ((1, (3, 14336, 128)), (4, 2, 4, 64)),
            ((1, (32, 14336, 448)), (8, 2, 8, 64)),
            ((1, (1, 1, 1)), (1, 1, 8, 32)),
        ];
        for ((batches, (m, n, runs)), want) in table {
            let problem = Problem::example(Format::Q4_0, [FloatType::F16; 2], [m, n, runs * RUN]);
            let cut = MmaVec::new(target.caps(), &Problem { batches, ..problem }, None);
            assert_eq!(
                (cut.m_tile, cut.n_tiles, cut.planes, cut.chunk),
                want,
                "{batches} batches, {m} {n} {runs}"
            );
        }
    }
}
