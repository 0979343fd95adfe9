//! The kernel's compile-time configuration, and sizes that follow from it.

use super::super::rows::{Cut, Layout, Values};
use crate::gpu::cuda::ptx::attention::Products;
use crate::ops::attention::gpu::operands::Softcap;
use lowbit_formats::FloatType;

/// The compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super::super) struct WgmmaConfig {
    /// The type of q, k, v and y: f16 or bf16.
    pub dtype: FloatType,
    /// D: 64, 128 or 256.
    pub width: usize,
    /// Dv, one of the same.
    pub value_width: usize,
    /// Keys of a tile.
    pub keys: usize,
    /// True if several cubes share the keys of a row: then y holds parts, which `gpu/combine.rs`
    /// combines.
    pub split: bool,
    /// The cap of scores, if there is one.
    pub softcap: Option<Softcap>,
}

/// Query rows of a cube: 64 for each of two groups of four planes, which multiply. A third group
/// copies.
pub(in super::super::super) const ROWS: usize = 128;
/// Units that multiply, and that copy. The former come first.
pub(super) const MULTIPLYING: usize = 256;
pub(super) const COPYING: usize = 128;

/// Registers per unit of each: more than half of those that multiply hold sums of values.
pub(super) const REGISTERS: (usize, usize) = (232, 40);

/// Tiles of keys in shared memory, and of values: one is copied while the other is used.
pub(super) const STAGES: usize = 2;

/// Bytes of a barrier, and the number of barriers.
pub(super) const BARRIER: usize = 8;
const BARRIERS: usize = 4 * STAGES;

impl WgmmaConfig {
    /// For heads of D and Dv, if the kernel takes these.
    pub fn new(dtype: FloatType, width: usize, value_width: usize) -> Option<Self> {
        let taken = [width, value_width].iter().all(|width| [64, 128, 256].contains(width));
        // All that registers and shared memory have room for.
        let keys = if width.max(value_width) == 256 { 80 } else { 128 };
        taken.then_some(Self { dtype, width, value_width, keys, split: false, softcap: None })
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        MULTIPLYING + COPYING
    }

    pub fn cut(self) -> Cut {
        Cut { rows: ROWS, planes: self.units() / 32, keys: self.keys, split: self.split }
    }

    pub fn products(self) -> Products {
        let Self { dtype, width, value_width, keys, .. } = self;
        Products { dtype, rows: ROWS, keys, width, value_width }
    }

    /// A tile of values.
    pub fn values(self) -> Values {
        let Self { dtype, keys, .. } = self;
        Values { dtype, keys, vectors: self.value_width / 8, layout: self.layout(), units: MULTIPLYING }
    }

    /// The places of keys and values in their tiles.
    pub fn layout(self) -> Layout {
        Layout::Panels(self.keys)
    }

    /// Bytes of a tile of keys.
    pub fn k_tile(self) -> usize {
        2 * self.keys * self.width
    }

    /// Bytes of a tile of values.
    pub fn v_tile(self) -> usize {
        2 * self.keys * self.value_width
    }

    /// Bytes of the cube's rows of q; then come tiles of keys, tiles of values and the barriers.
    pub fn queries(self) -> usize {
        2 * ROWS * self.width
    }

    /// Bytes before the barriers.
    pub fn tiles_end(self) -> usize {
        self.queries() + STAGES * (self.k_tile() + self.v_tile())
    }

    /// Bytes of all these.
    pub fn bytes(self) -> usize {
        self.tiles_end() + BARRIERS * BARRIER
    }

    /// Bytes of shared memory: with what planes tell each other of the keys that their rows see,
    /// four words each, and a word for each key.
    pub fn shared_memory(self) -> usize {
        self.bytes() + 4 * (4 * self.cut().planes + self.keys)
    }
}
