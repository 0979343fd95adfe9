//! What the kernel is compiled for, and what follows from it.

use super::super::super::problem::{Problem, Routing};
use crate::gpu::Memory;
use crate::gpu::caps::Caps;
use crate::gpu::layout::{Codes, Layout, RUN};
use lowbit_formats::FloatType;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wgmma {
    pub layout: Layout,
    /// The type of x and y, which weights are rounded to.
    pub dtype: FloatType,
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
    /// Whether a list says which batch of the weight a tile takes, and where its rows go.
    pub listed: bool,
}

/// Values of a row of x that are copied at once: a run for each of the four units that share a row of the weight.
pub const BLOCK: usize = 4 * RUN;
/// Values that the tensor cores take at once.
pub const STEP: usize = 16;
/// Rows of the weight per cube.
pub const N_TILE: usize = 128;
/// Units that multiply a part of K: four planes for 64 rows of the weight.
pub const UNITS: usize = 2 * N_TILE;

/// Instead of a tile's batch: there is no such batch, and its rows are NaN.
pub const WRONG: u32 = u32::MAX - 1;
/// Instead of a tile's batch: it has no rows.
pub const EMPTY: u32 = u32::MAX;

/// What a tile costs beside its rows, in rows: the decoding.
const DECODE: usize = 80;

/// Rows of x in tiles.
#[derive(Clone, Copy)]
pub struct Tiles<'a> {
    /// All tiles.
    pub count: usize,
    /// Rows of x per batch of the weight; with a list, of y.
    pub m: usize,
    /// The batch of the weight of each tile (or [`WRONG`], or [`EMPTY`]), then the row of y of each row of each
    /// tile (or `u32::MAX`), `share` of which have the same row of x.
    pub list: Option<(&'a Memory, usize)>,
}

impl Wgmma {
    /// For rows of x that follow each other, in tiles that leave the multiprocessors the least to do one after the other.
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
        let mean = routing.pairs.div_ceil(routing.experts.max(1));
        // Twice the tiles of an expert: the last of several is half full.
        let tiles = |rows: usize| (2 * mean / rows + 1).max(2);
        let m_tile = [8, 16, 32, 64, 128, 256]
            .into_iter()
            .min_by_key(|&rows| tiles(rows) * (rows + DECODE))
            .unwrap_or(64);
        Self::of_tiles(problem.layout, problem.x_type, m_tile, true)
    }

    /// For tiles of `m_tile` rows of x.
    pub fn of_tiles(layout: Layout, dtype: FloatType, m_tile: usize, listed: bool) -> Self {
        // The fastest of those tried on an H200; shared memory holds no more than three blocks of 256 rows.
        let (ahead, stages, parts, steps) = match m_tile {
            256 => (1, 3, 1, 1),
            // Alone on its multiprocessor.
            64 if !listed && layout.bits <= 8 => (1, 4, 2, 2),
            _ if listed => (2, 4, 1, 2),
            _ => (1, 4, 1, 2),
        };
        Self { layout, dtype, m_tile, ahead, stages, parts, steps, listed }
    }

    /// Bytes of the sums of the second part of K.
    pub fn others(self) -> usize {
        if self.parts == 2 { self.m_tile / 2 * UNITS * size_of::<f32>() } else { 0 }
    }

    /// Bytes of a block of x.
    pub fn block(self) -> usize {
        self.m_tile * BLOCK * 2
    }

    /// Bytes of the rings of all parts.
    pub fn rings(self) -> usize {
        self.parts * self.stages * (self.block() + 16)
    }
}

/// Layouts whose values the tensor cores can have: floats of another type would not be rounded but misread.
pub fn takes(layout: Layout, dtype: FloatType) -> bool {
    dtype != FloatType::F32 && !matches!(layout.codes, Codes::Float(float) if float != dtype)
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
