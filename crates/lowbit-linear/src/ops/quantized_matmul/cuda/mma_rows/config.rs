//! The compile-time configuration of the kernel, and what follows from it.

use super::super::super::problem::Problem;
use super::super::numbers::Numbers;
use super::super::staging::{Order, Staging, Sums};
use crate::gpu::caps::Caps;
use crate::gpu::layout::{Layout, RUN};
use lowbit_formats::FloatType;

/// Values of a row that a plane takes in a step.
pub const STEP: usize = 256;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaRows {
    pub layout: Layout,
    /// Of 16 bits.
    pub x_type: FloatType,
    pub y_type: FloatType,
    /// Rows of x per cube: a multiple of 8.
    pub m_tile: usize,
    /// Tiles of 16 rows of the weight per plane.
    pub n_tiles: usize,
    /// Planes per cube that take different rows of the weight.
    pub strips: usize,
    /// Planes that share these rows: each takes the steps of K strided by `splits` (split-K).
    pub splits: usize,
    /// Steps of x that a cube has at a time: a multiple of what all planes take.
    pub chunk: usize,
    /// True if rows are whole steps.
    pub whole: bool,
    /// The most ids that cubes find their rows by, a batch of the weight each; 0 where rows of x
    /// follow each other.
    pub ids: usize,
    /// See [`Target::overlaps`](crate::gpu::compile::Target::overlaps).
    pub overlaps: bool,
}

impl MmaRows {
    /// For rows of x that follow each other.
    pub fn new(caps: &Caps, problem: &Problem) -> Self {
        Self::cut(caps, problem).fitting(caps.shared_memory)
    }

    /// The same where a cube has all the shared memory that it could use.
    fn cut(caps: &Caps, problem: &Problem) -> Self {
        // Planes of a cube, which has a multiprocessor to itself: registers hold no more.
        const PLANES: usize = 16;
        let Problem { m, n, batches, .. } = *problem;
        let steps = steps(problem);
        let m_tile = m.next_multiple_of(8).min(32);
        let tiles = batches * m.div_ceil(m_tile) * n.div_ceil(16);
        // Every cube reads all of x, so it takes as much of the weight as leaves each
        // multiprocessor a part.
        let rounds = tiles.div_ceil(caps.multiprocessors * PLANES / 2);
        let strips = tiles.div_ceil(caps.multiprocessors * rounds.max(1)).min(n.div_ceil(16)).max(1);
        let splits = (PLANES / strips + 1).next_power_of_two() / 2;
        let splits = splits.min(steps.next_power_of_two()).clamp(1, 8);
        let chunk = steps.next_power_of_two().min(16).max(splits);
        Self { m_tile, strips, splits, chunk, ..Self::one_plane(caps, problem) }
    }

    /// For rows of x that choose their batch of the weight, found among `ids` ids at most.
    pub fn of_experts(caps: &Caps, problem: &Problem, ids: usize) -> Self {
        let steps = steps(problem);
        // Short rows leave little to do for what a cube begins with.
        let n_tiles = if steps <= 2 { 2 } else { 1 };
        // Small cubes, several to a multiprocessor: some bring their x while others multiply.
        let strips = problem.n.div_ceil(16 * n_tiles).next_power_of_two().min(4);
        let chunk = steps.next_power_of_two().min(4);
        Self { n_tiles, strips, chunk, ids, ..Self::one_plane(caps, problem) }.fitting(caps.shared_memory)
    }

    /// A cube of one plane, which takes 8 rows of x.
    fn one_plane(caps: &Caps, problem: &Problem) -> Self {
        let Problem { layout, x_type, y_type, .. } = *problem;
        let whole = (problem.runs() * RUN).is_multiple_of(STEP);
        let overlaps = caps.overlaps;
        let (m_tile, n_tiles, strips, splits, chunk, ids) = (8, 1, 1, 1, 1, 0);
        Self { layout, x_type, y_type, m_tile, n_tiles, strips, splits, chunk, whole, ids, overlaps }
    }

    /// The codes as tensor cores take them.
    pub fn numbers(self) -> Numbers {
        Numbers::new(self.layout, self.x_type)
    }

    /// With as few steps of x at a time, and then as few planes that share them, as fit `memory`
    /// bytes that a cube's units share.
    pub fn fitting(mut self, memory: usize) -> Self {
        while self.memory() > memory && self.chunk > 1 {
            if self.chunk < 2 * self.splits {
                self.splits /= 2;
            }
            self.chunk /= 2;
        }
        self
    }

    /// Bytes that a cube's units share.
    fn memory(self) -> usize {
        let x = self.m_tile * (16 * self.x_row() + 4 * self.sum_row());
        let list = if self.listed() { 2 * self.ids + 4 * self.m_tile + 16 } else { 0 };
        x + self.n_tile() * (8 * self.term_row() + 4 * self.splits * self.m_tile) + list
    }

    /// True if a cube takes the rows of x that chose its batch of the weight.
    pub fn listed(self) -> bool {
        self.ids > 0
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        32 * self.strips * self.splits
    }

    /// Rows of the weight per cube.
    pub fn n_tile(self) -> usize {
        16 * self.n_tiles * self.strips
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

    /// The number of groups of 8 rows of x.
    pub fn m_octets(self) -> usize {
        self.m_tile / 8
    }

    /// Vectors from one row of x to the next: 64 bytes more than there are, for two rows at a time.
    pub fn x_row(self) -> usize {
        self.chunk * STEP / 8 + 4
    }

    /// Sums of x from one row to the next: pairs of rows lie in different banks.
    pub fn sum_row(self) -> usize {
        self.chunk * self.groups() + 4
    }

    /// Terms from one row of the weight to the next: those of two groups of 8 rows lie in different
    /// banks.
    pub fn term_row(self) -> usize {
        self.chunk * self.groups() + 2
    }

    /// Terms that a unit brings of a chunk.
    pub fn terms_per_unit(self) -> usize {
        (self.n_tile() * self.chunk * self.groups()).div_ceil(self.units())
    }

    /// The staging of x, which the units share.
    pub fn staging(self) -> Staging {
        Staging {
            numbers: self.numbers(),
            m_tile: self.m_tile,
            values: STEP * self.chunk,
            row: self.x_row(),
            part: (2 * self.numbers().distance()).max(8),
            // Tensor cores add up more in less time.
            group: 0,
            sums: 0,
            order: Order::Quarters { vectors: self.group() / 8 },
            units: self.units(),
            listed: self.listed(),
        }
    }

    /// The sums that the cube stores.
    pub fn stored(self) -> Sums {
        Sums {
            n_tile: self.n_tile(),
            m_tile: self.m_tile,
            parts: self.splits,
            units: self.units(),
            y_type: self.y_type,
            listed: self.listed(),
        }
    }
}

/// Steps of a row.
fn steps(problem: &Problem) -> usize {
    (problem.runs() * RUN).div_ceil(STEP)
}

/// Values that share a scale, as far as units take them together.
pub fn group(layout: Layout) -> usize {
    layout.group_within(4 * RUN)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::gpu::compile::{CudaDevice, Target};
    use lowbit_formats::Format;

    fn problem([m, n, steps]: [usize; 3]) -> Problem {
        Problem::example(Format::Q4_0, [FloatType::F16; 2], [m, n, steps * STEP])
    }

    #[test]
    fn cuts() {
        let target = Target::cuda(CudaDevice::H100);
        // [m, n, steps] -> m_tile, strips, splits, chunk
        let table = [
            ([8, 14336, 16], (8, 7, 2, 16)),
            ([16, 14336, 16], (16, 7, 2, 16)),
            ([7, 4096, 56], (8, 2, 8, 16)),
            ([17, 4096, 3], (24, 2, 4, 4)),
            ([40, 28672, 32], (32, 7, 2, 16)),
            ([6, 2, 1], (8, 1, 1, 1)),
            ([6, 0, 0], (8, 1, 1, 1)),
        ];
        for (sizes, want) in table {
            let cut = MmaRows::cut(target.caps(), &problem(sizes));
            assert_eq!((cut.m_tile, cut.strips, cut.splits, cut.chunk), want, "{sizes:?}");
        }
    }

    /// Of 99 KB, too: then fewer planes share the steps.
    #[test]
    fn cubes_fit_into_every_device() {
        for capability in [80, 86, 90, 120] {
            let target = Target::cuda(CudaDevice::example(capability));
            for sizes in [[16, 4096, 56], [16, 14336, 16], [32, 512, 64], [32, 28672, 32]] {
                let config = MmaRows::new(target.caps(), &problem(sizes));
                assert!(
                    config.memory() <= target.caps().shared_memory,
                    "sm_{capability} {sizes:?}: {config:?}"
                );
                assert!(config.chunk.is_multiple_of(config.splits), "sm_{capability} {sizes:?}: {config:?}");
            }
        }
    }

    #[test]
    fn cuts_of_experts() {
        let target = Target::cuda(CudaDevice::H100);
        // [n, steps] -> n_tiles, strips, chunk
        let table =
            [([512, 8], (1, 4, 4)), ([2048, 2], (2, 4, 2)), ([23, 1], (2, 1, 1)), ([23, 0], (2, 1, 1))];
        for ([n, steps], want) in table {
            let cut = MmaRows::of_experts(target.caps(), &problem([1, n, steps]), 512);
            assert_eq!((cut.n_tiles, cut.strips, cut.chunk), want, "{n}, {steps} steps");
        }
    }
}
