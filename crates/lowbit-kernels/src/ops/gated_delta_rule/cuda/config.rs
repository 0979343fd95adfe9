//! What both kernels of the chunked form share: what they are compiled for, and what one leaves to the other.

use super::super::{CHECK, DecaySign, Dims, GatedDeltaRule, HeadMap, StateLayout};
use crate::KernelError;
use crate::gpu::{CUBES, Memory};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// What the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct ChunkConfig {
    /// The type of q, k, v and y: one of 16 bits.
    pub dtype: FloatType,
    pub key_dim: usize,
    pub value_dim: usize,
    pub head_map: HeadMap,
    pub layout: StateLayout,
    pub sign: DecaySign,
}

/// Tokens of a chunk.
pub(in super::super) const CHUNK: usize = 64;
/// Columns of the state per cube of the pass.
pub const COLUMNS: usize = 16 * PLANES;
/// Floats of a chunk's gates: `g` of each token, then `D[last]` of each.
pub const GATES: usize = 2 * CHUNK;

impl ChunkConfig {
    pub fn new(dims: Dims, params: &GatedDeltaRule, dtype: FloatType) -> Self {
        let GatedDeltaRule { head_map, state_layout: layout, sign, .. } = *params;
        Self { dtype, key_dim: dims.key_dim, value_dim: dims.value_dim, head_map, layout, sign }
    }

    /// Whether the kernels support this type and these sizes.
    pub fn is_supported(self) -> bool {
        let Self { dtype, key_dim, value_dim, .. } = self;
        dtype != FloatType::F32 && matches!(key_dim, 64 | 128) && value_dim.is_multiple_of(COLUMNS)
    }

    /// Vectors of 16 bytes per key of a token.
    pub fn vectors(self) -> usize {
        self.key_dim / 8
    }
}

/// The offset in bytes of vector `column` of `row` in a tile of `vectors` vectors per row. Columns are swizzled, so that the
/// same column of eight rows lies in different banks.
#[cube]
pub fn swizzled(row: usize, column: usize, #[comptime] vectors: usize) -> u32 {
    let column =
        if comptime!(vectors >= 8) { column ^ (row & 7usize) } else { column ^ ((row >> 1usize) & 3usize) };
    ((row * vectors + column) * 16usize) as u32
}

/// State planes, and output planes.
pub(in super::super) const PLANES: usize = 2;
/// Chunks whose operands are in shared memory: one in use, one loaded, and one on its way.
pub const STAGES: usize = 3;

/// What the first kernel leaves to the second, for each slot of a chunk and each value head.
pub struct Prepared {
    /// `T`: 16-bit floats, `[CHUNK, CHUNK]`. Blocks of 16 by 16 above the diagonal are undefined, here and in `pairs`.
    pub transforms: Memory,
    /// `P`, as `T`.
    pub pairs: Memory,
    /// [`GATES`] floats.
    pub gates: Memory,
}

/// Cubes along y and z for `count` sequences or slots.
pub fn cubes(count: usize) -> Result<[u32; 2], KernelError> {
    Ok([CHECK.index(count.min(CUBES))?, CHECK.index(count.div_ceil(CUBES))?])
}
