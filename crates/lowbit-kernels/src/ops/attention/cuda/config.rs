//! The tile kernel's compile-time configuration, and sizes that follow from it.

use super::rows::{Cut, Layout, Values};
use crate::ops::attention::gpu::operands::Softcap;
use lowbit_formats::FloatType;

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct TileConfig {
    /// The type of q, k, v and y: f16 or bf16.
    pub dtype: FloatType,
    /// D, a multiple of 16.
    pub width: usize,
    /// Dv, a multiple of 16.
    pub value_width: usize,
    /// Blocks of 16 query rows that a plane takes.
    pub blocks: usize,
    /// Planes of a cube.
    pub planes: usize,
    /// Keys of a tile, a multiple of 16.
    pub keys: usize,
    /// Tiles in shared memory: with 2, one is copied while the other is used.
    pub stages: usize,
    /// True if several cubes share the keys of a row: then y holds parts, which `gpu/combine.rs`
    /// combines.
    pub split: bool,
    /// The cap of scores, if there is one.
    pub softcap: Option<Softcap>,
}

impl TileConfig {
    /// Query rows of a cube.
    pub fn rows(self) -> usize {
        16 * self.blocks * self.planes
    }

    /// The cut of the cube's rows and keys.
    pub fn cut(self) -> Cut {
        Cut { rows: self.rows(), planes: self.planes, keys: self.keys, split: self.split }
    }

    /// A tile of values.
    pub fn values(self) -> Values {
        let Self { dtype, keys, .. } = self;
        let layout = Layout::Padded(self.value_stride());
        Values { dtype, keys, vectors: self.value_width / 8, layout, units: self.units() }
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        32 * self.planes
    }

    /// Vectors of 16 bytes from one row of q or k to the next in shared memory: one more than a row
    /// has, so that vectors of the same column of 8 rows lie in different banks.
    pub fn stride(self) -> usize {
        self.width / 8 + 1
    }

    /// The same of v.
    pub fn value_stride(self) -> usize {
        self.value_width / 8 + 1
    }

    /// Vectors of shared memory per stage: a tile of k, then one of v.
    pub fn stage(self) -> usize {
        self.keys * (self.stride() + self.value_stride())
    }

    /// Vectors of shared memory: q's rows, then the stages.
    pub fn vectors(self) -> usize {
        self.rows() * self.stride() + self.stages * self.stage()
    }

    /// Bytes of shared memory: with what planes tell each other of the keys that their rows see,
    /// four words each, and a word for each key.
    pub fn shared_memory(self) -> usize {
        16 * self.vectors() + 4 * (4 * self.planes + self.keys)
    }
}

/// The greatest scale that the kernel takes, with the factor log2(e): the lowest score times it
/// must be finite.
pub(in super::super) const MAX_SCALE: f32 = 3.0;
