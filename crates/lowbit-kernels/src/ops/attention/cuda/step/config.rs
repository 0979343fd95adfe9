//! The step kernel's compile-time configuration, and sizes that follow from it.

use super::super::rows::{Cut, Layout, Values};
use crate::ops::attention::gpu::operands::Softcap;
use crate::ops::cache_rows::CacheType;
use lowbit_formats::FloatType;

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super::super) struct StepConfig {
    /// The type of q and y: f16 or bf16.
    pub dtype: FloatType,
    /// True if k and v are of 8 bits, see [`CacheType::Int8`]; else they are of q's type.
    pub int8: bool,
    /// D: 64, 128, 256 or 512.
    pub width: usize,
    /// Dv, one of the same.
    pub value_width: usize,
    /// Blocks of 8 query rows that every plane takes.
    pub blocks: usize,
    /// Planes of a cube: they take turns with the tiles.
    pub planes: usize,
    /// Keys of a tile, a multiple of 16.
    pub keys: usize,
    /// Tiles that a plane has under way.
    pub stages: usize,
    /// True if they do: then y holds parts, which `gpu/combine.rs` combines.
    pub split: bool,
    /// True if keys are in pages: a cube then has the rows of one token, and takes turns with
    /// others in the parts of their keys (`gpu/parts.rs`).
    pub paged: bool,
    /// The cap of scores, if there is one.
    pub softcap: Option<Softcap>,
}

impl StepConfig {
    /// For blocks of 8 query rows of heads of D and Dv, if the kernel takes these: with as many
    /// bytes under way as `shared_memory` has room for.
    pub fn new(
        (dtype, int8): (FloatType, bool),
        [width, value_width]: [usize; 2],
        blocks: usize,
        shared_memory: usize,
    ) -> Option<Self> {
        // As measured, see bench/record/cuda/2026-11-25.md.
        let best = if width.max(value_width) <= 128 { (2, 3) } else { (4, 3) };
        let cuts = [best, (4, 2), (2, 2), (2, 1)];
        let all = cuts.map(|cut| Self::cut_into((dtype, int8), [width, value_width], blocks, cut));
        all.into_iter().flatten().find(|config| config.shared_memory() <= shared_memory)
    }

    /// The same for keys in pages. Two cubes share a multiprocessor where its memory allows it: one
    /// reads while the other ends a part.
    pub fn paged(
        types: (FloatType, bool),
        widths: [usize; 2],
        blocks: usize,
        shared_memory: usize,
    ) -> Option<Self> {
        let all = [(2, 3), (2, 2), (2, 1)].map(|cut| Self::cut_into(types, widths, blocks, cut));
        let all: Vec<_> = all.into_iter().flatten().collect();
        let fit = |memory: usize| all.iter().find(|config| config.shared_memory() <= memory);
        let config = fit(shared_memory / 2).or_else(|| fit(shared_memory))?;
        Some(Self { split: true, paged: true, ..*config })
    }

    /// With planes and stages of a cube.
    fn cut_into(
        (dtype, int8): (FloatType, bool),
        [width, value_width]: [usize; 2],
        blocks: usize,
        (planes, stages): (usize, usize),
    ) -> Option<Self> {
        let widest = width.max(value_width);
        let known = [width, value_width].iter().all(|width| [64, 128, 256, 512].contains(width));
        // Registers hold 4096 sums of a plane.
        let taken = known && blocks * value_width <= 512;
        // Tiles of narrow heads have more keys: a softmax costs as much for few as for many.
        // So have tiles of 8 bits, which must lie within pages.
        let keys = if int8 { (8192 / widest).min(64) } else { 4096 / widest }.max(16);
        let (split, paged, softcap) = (false, false, None);
        let config =
            Self { dtype, int8, width, value_width, blocks, planes, keys, stages, split, paged, softcap };
        taken.then_some(config)
    }

    /// Query rows of a cube.
    pub fn rows(self) -> usize {
        8 * self.blocks
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        32 * self.planes
    }

    /// The cut of the cube's rows and keys.
    pub fn cut(self) -> Cut {
        Cut { rows: self.rows(), planes: self.planes, keys: self.keys, split: self.split }
    }

    /// A tile of values, which a plane has for itself.
    pub fn values(self) -> Values {
        let Self { dtype, keys, .. } = self;
        let layout = Layout::Padded(self.value_stride());
        Values { dtype, keys, vectors: self.value_width / 8, layout, units: 32 }
    }

    /// Vectors of 16 bytes from one row of q to the next in shared memory: one more than a row has,
    /// so that vectors of the same column of 8 rows lie in different banks.
    pub fn query_stride(self) -> usize {
        self.width / 8 + 1
    }

    /// The same of k. Rows of 8 bits lie side by side: with their scales, they have such a length
    /// but in heads of 512.
    pub fn stride(self) -> usize {
        self.stride_of(self.width)
    }

    /// The same of v.
    pub fn value_stride(self) -> usize {
        self.stride_of(self.value_width)
    }

    fn stride_of(self, width: usize) -> usize {
        if self.int8 { CacheType::Int8.row(width) / 16 } else { width / 8 + 1 }
    }

    /// Bytes of the cube's rows of q; the planes' rings come behind.
    pub fn queries(self) -> usize {
        16 * self.rows() * self.query_stride()
    }

    /// Bytes of a ring's stage: a tile of k, then one of v.
    pub fn stage(self) -> usize {
        16 * self.keys * (self.stride() + self.value_stride())
    }

    /// Bytes of a plane's ring, in which it leaves its sums in the end.
    pub fn ring(self) -> usize {
        self.stages * self.stage()
    }

    /// Bytes from a row of sums to the next: two units that write at the same time meet different
    /// banks.
    pub fn sums_stride(self) -> usize {
        4 * (self.value_width + 4)
    }

    /// Bytes of these.
    pub fn bytes(self) -> usize {
        self.queries() + self.planes * self.ring()
    }

    /// Bytes of shared memory: with what planes tell each other of the keys that their rows see,
    /// four words each, a word for each key of a tile, and two words for each row.
    pub fn shared_memory(self) -> usize {
        self.bytes() + 4 * self.planes * (4 + self.keys + 2 * self.rows())
    }
}
