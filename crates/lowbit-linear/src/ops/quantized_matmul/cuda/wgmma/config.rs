//! The compile-time configuration of the kernel, and what follows from it.

use super::super::super::problem::{Problem, Routing};
use super::super::tiles::fragment::Decoding;
use super::super::tiles::{BLOCK, N_TILE, Stored, experts_tile};
use crate::gpu::caps::Caps;
use crate::gpu::layout::Layout;
use lowbit_formats::FloatType;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wgmma {
    pub decoding: Decoding,
    /// Rows of x per tile: 256, or another multiple of 8 up to 128.
    pub m_tile: usize,
    /// Blocks of a weight's row that are loaded before they are needed.
    pub ahead: usize,
    /// Blocks of x in shared memory, for each part of K.
    pub stages: usize,
    /// Parts that K is cut into, each multiplied by its own units.
    pub parts: usize,
    /// Steps whose values are decoded before they are multiplied.
    pub steps: usize,
    /// True if a list says which batch of the weight a tile takes, and where its rows go.
    pub listed: bool,
}

/// Units that multiply a part of K: four planes for 64 rows of the weight.
pub const UNITS: usize = 2 * N_TILE;

/// The cost of a tile beside its rows, in rows: the decoding.
const DECODE: usize = 80;

impl Wgmma {
    /// For rows of x that follow each other, in tiles that leave the multiprocessors the least to
    /// do one after the other.
    pub fn new(caps: &Caps, problem: &Problem) -> Self {
        let time = |rows: usize| {
            let tiles = problem.batches * problem.m.div_ceil(rows) * problem.n.div_ceil(N_TILE);
            tiles.div_ceil(caps.multiprocessors) * (rows + DECODE)
        };
        let m_tile = [256, 128, 64].into_iter().min_by_key(|&rows| time(rows)).unwrap_or(64);
        Self::of_tiles(problem.layout, problem.x_type, m_tile, false)
    }

    /// For pairs of a token and an expert, sorted by expert.
    pub fn of_experts(problem: &Problem, routing: Routing) -> Self {
        let m_tile = experts_tile(routing, &[8, 16, 32, 64, 128, 256], DECODE);
        Self::of_tiles(problem.layout, problem.x_type, m_tile, true)
    }

    /// For tiles of `m_tile` rows of x.
    pub fn of_tiles(layout: Layout, dtype: FloatType, m_tile: usize, listed: bool) -> Self {
        // The fastest of those tried on an H200; shared memory holds no more than three blocks of
        // 256 rows.
        let (ahead, stages, parts, steps) = match m_tile {
            256 => (1, 3, 1, 1),
            // Alone on its multiprocessor.
            64 if !listed && layout.bits <= 8 => (1, 4, 2, 2),
            _ if listed => (2, 4, 1, 2),
            _ => (1, 4, 1, 2),
        };
        Self { decoding: Decoding { layout, dtype }, m_tile, ahead, stages, parts, steps, listed }
    }

    /// Bytes of the sums of the second part of K.
    pub fn others(self) -> usize {
        if self.parts == 2 { self.m_tile / 2 * UNITS * size_of::<f32>() } else { 0 }
    }

    /// Bytes of a block of x.
    pub fn block(self) -> usize {
        self.m_tile * BLOCK * 2
    }

    /// The type and the place of stored pairs of sums.
    pub fn stored(self) -> Stored {
        Stored { dtype: self.decoding.dtype, m_tile: self.m_tile, listed: self.listed }
    }

    /// Bytes of the rings of all parts.
    pub fn rings(self) -> usize {
        self.parts * self.stages * (self.block() + 16)
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::gpu::compile::{CudaDevice, Target};
    use lowbit_formats::Format;

    #[test]
    fn tiles_of_rows() {
        let target = Target::cuda(CudaDevice::H100);
        for ([m, n], want) in [
            ([64, 14336], 64),
            ([512, 14336], 256),
            ([512, 4096], 128),
            ([512, 1024], 64),
            ([4096, 14336], 256),
        ] {
            let problem = Problem::example(Format::Q4_0, [FloatType::F16; 2], [m, n, 4096]);
            assert_eq!(Wgmma::new(target.caps(), &problem).m_tile, want, "M={m}, N={n}");
        }
    }

    #[test]
    fn tiles_hold_an_experts_pairs() {
        let problem = Problem::example(Format::Q4_0, [FloatType::F16; 2], [1, 512, 2048]);
        for ([pairs, experts], want) in
            [([512, 256], 8), ([4096, 256], 32), ([32768, 256], 128), ([4096, 1], 256)]
        {
            let routing = Routing { experts, pairs, share: 8 };
            assert_eq!(Wgmma::of_experts(&problem, routing).m_tile, want, "{pairs} pairs, {experts} experts");
        }
    }
}
