//! The compile-time configuration of the kernel, and what follows from it.

use super::super::super::problem::{Problem, Routing};
use super::super::tiles::fragment::Decoding;
use super::super::tiles::{BLOCK, N_TILE, STEP, Stored, experts_tile};
use crate::gpu::caps::Caps;
use crate::gpu::layout::Layout;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaTile {
    pub decoding: Decoding,
    /// Rows of x per tile: 16, 32, 64 or 128.
    pub m_tile: usize,
    /// Pieces of x in shared memory, for each part of K.
    pub stages: usize,
    /// Parts that K is cut into, 1 or 2, each multiplied by its own units.
    pub parts: usize,
    /// True if a list says which batch of the weight a tile takes, and where its rows go.
    pub listed: bool,
    /// True if launches overlap.
    pub overlaps: bool,
}

/// Rows of the weight that a plane multiplies: two operands of the tensor cores, so that what a
/// plane loads of x serves both.
pub const ROWS: usize = 32;
/// Units that multiply a part of K.
pub const UNITS: usize = N_TILE / ROWS * 32;
/// Steps of a piece of x: half a block, so that two cubes of large tiles share a multiprocessor.
pub const STEPS: usize = BLOCK / STEP / PIECES;
/// Pieces of a block.
pub const PIECES: usize = 2;

/// Rows of x per tile, at the most those whose sums leave a unit registers for the weight.
const M_TILES: [usize; 4] = [128, 64, 32, 16];
/// Bits of codes from which on [`M_TILES`]' first leaves too few.
const WIDE: usize = 9;
/// The cost of a tile beside its rows, in rows: the decoding.
const DECODE: usize = 24;

impl MmaTile {
    /// For rows of x that follow each other, in tiles that leave the multiprocessors the least to
    /// do one after the other.
    pub fn new(caps: &Caps, problem: &Problem) -> Self {
        let cubes = |rows: usize| problem.batches * problem.m.div_ceil(rows) * problem.n.div_ceil(N_TILE);
        let time = |rows: usize| cubes(rows).div_ceil(caps.multiprocessors) * (rows + DECODE);
        let m_tile = m_tiles(problem.layout).iter().copied().min_by_key(|&rows| time(rows)).unwrap_or(16);
        // A cube that is alone on its multiprocessor has twice the units.
        let alone = cubes(m_tile) <= caps.multiprocessors && problem.k > BLOCK;
        Self::of_tiles(caps, problem, m_tile, if alone { 2 } else { 1 })
    }

    /// For pairs of a token and an expert, sorted by expert.
    pub fn of_experts(caps: &Caps, problem: &Problem, routing: Routing) -> Self {
        let m_tile = experts_tile(routing, m_tiles(problem.layout), DECODE);
        Self { listed: true, ..Self::of_tiles(caps, problem, m_tile, 1) }
    }

    /// For tiles of `m_tile` rows of x.
    fn of_tiles(caps: &Caps, problem: &Problem, m_tile: usize, parts: usize) -> Self {
        let decoding = Decoding { layout: problem.layout, dtype: problem.x_type };
        let config = Self { decoding, m_tile, stages: 4, parts, listed: false, overlaps: caps.overlaps };
        // Two parts share a multiprocessor, as two cubes do.
        let fits = 2 * config.stages * config.piece() <= caps.shared_memory;
        if fits { config } else { Self { stages: 3, ..config } }
    }

    /// Bytes of a piece of x.
    pub fn piece(self) -> usize {
        self.m_tile * STEPS * STEP * 2
    }

    /// Bytes of shared memory: the rings of all parts. The second part's sums take their place: 4
    /// bytes for each of the `m_tile` sums of a unit.
    pub fn shared(self) -> usize {
        let rings = self.parts * self.stages * self.piece();
        let sums = (self.parts - 1) * self.m_tile * UNITS * size_of::<f32>();
        rings.max(sums)
    }

    /// Products of tensor cores for 8 rows of x each, that a plane has the sums of.
    pub fn octets(self) -> usize {
        self.m_tile / 8
    }

    /// The type and the place of stored pairs of sums.
    pub fn stored(self) -> Stored {
        Stored { dtype: self.decoding.dtype, m_tile: self.m_tile, listed: self.listed }
    }
}

/// The tiles for a layout.
fn m_tiles(layout: Layout) -> &'static [usize] {
    if layout.bits < WIDE { &M_TILES } else { &M_TILES[1..] }
}

#[cfg(test)]
impl MmaTile {
    /// For tiles of `m_tile` rows of x, for tests.
    pub fn example(caps: &Caps, decoding: Decoding, m_tile: usize, parts: usize, listed: bool) -> Self {
        let m_tile = m_tile.min(m_tiles(decoding.layout)[0]);
        Self { decoding, m_tile, stages: 3, parts, listed, overlaps: caps.overlaps }
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::gpu::compile::{CudaDevice, Target};
    use lowbit_formats::{FloatType, Format};

    fn caps(capability: u32) -> Caps {
        *Target::cuda(CudaDevice::example(capability)).caps()
    }

    #[test]
    fn tiles_of_rows() {
        for ([m, n], want) in [
            ([17, 14336], (32, 2)),
            ([64, 14336], (64, 2)),
            ([512, 14336], (128, 1)),
            ([512, 4096], (128, 2)),
            ([512, 1024], (32, 2)),
            ([4096, 14336], (128, 1)),
        ] {
            let problem = Problem::example(Format::Q4_0, [FloatType::F16; 2], [m, n, 4096]);
            let config = MmaTile::new(&caps(80), &problem);
            assert_eq!((config.m_tile, config.parts), want, "M={m}, N={n}");
        }
        let wide = Format::Float(FloatType::F16);
        let problem = Problem::example(wide, [FloatType::F16; 2], [4096, 14336, 4096]);
        assert_eq!(MmaTile::new(&caps(80), &problem).m_tile, 64);
    }

    /// Two cubes of one part, or one of two parts, on each multiprocessor.
    #[test]
    fn tiles_fit_into_every_device() {
        for (capability, stages) in [(80, 4), (86, 3), (89, 3), (100, 4), (120, 3)] {
            let caps = caps(capability);
            for (m, parts) in [(512, 2), (4096, 1)] {
                let problem = Problem::example(Format::Q4_0, [FloatType::F16; 2], [m, 4096, 4096]);
                let config = MmaTile::new(&caps, &problem);
                assert_eq!(
                    (config.m_tile, config.parts, config.stages),
                    (128, parts, stages),
                    "sm_{capability}"
                );
                assert!(config.shared() * 2 / parts <= caps.shared_memory, "sm_{capability}");
            }
        }
    }

    #[test]
    fn tiles_hold_an_experts_pairs() {
        let problem = Problem::example(Format::Q4_0, [FloatType::F16; 2], [1, 512, 2048]);
        for ([pairs, experts], want) in
            [([512, 256], 16), ([4096, 256], 32), ([32768, 256], 64), ([4096, 1], 128)]
        {
            let routing = Routing { experts, pairs, share: 8 };
            let config = MmaTile::of_experts(&caps(80), &problem, routing);
            assert_eq!(config.m_tile, want, "{pairs} pairs, {experts} experts");
        }
    }
}
