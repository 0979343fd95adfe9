//! The configuration of both kernels of the chunked form, and the layout of the memory that one
//! leaves to the other.

use super::super::{Dims, GatedDeltaRule, HeadMap, Rule};
use super::pass::shared_memory;
use crate::gpu::caps::Caps;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The compile-time configuration of both kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct ChunkConfig {
    /// The type of q, k, v and y: one of 16 bits.
    pub dtype: FloatType,
    pub rule: Rule,
    pub key_dim: usize,
    pub value_dim: usize,
    pub head_map: HeadMap,
    /// Chunks whose operands are in shared memory: one in use, one on its way, and, with 3, one
    /// loaded.
    pub stages: usize,
}

/// Tokens of a chunk.
pub(in super::super) const CHUNK: usize = 64;
/// Columns of the state per cube of the pass.
pub const COLUMNS: usize = 16 * PLANES;
/// Floats of a chunk's gates: `g` of each token, then `D[last]` of each.
pub const GATES: usize = 2 * CHUNK;

impl ChunkConfig {
    /// For a device of these abilities, if it and the kernels support the type and the sizes.
    pub fn new(caps: &Caps, dims: Dims, params: &GatedDeltaRule, dtype: FloatType) -> Option<Self> {
        let Dims { key_dim, value_dim, .. } = dims;
        let GatedDeltaRule { rule, head_map, .. } = *params;
        let supported = caps.tensor_cores
            && dtype != FloatType::F32
            && matches!(key_dim, 64 | 128)
            && value_dim.is_multiple_of(COLUMNS);
        let of = |stages| Self { dtype, rule, key_dim, value_dim, head_map, stages };
        [3, 2].map(of).into_iter().find(|&config| supported && shared_memory(config) <= caps.shared_memory)
    }

    /// True if there is a `T`.
    pub fn corrects(self) -> bool {
        self.rule == Rule::Delta
    }

    /// Vectors of 16 bytes per key of a token.
    pub fn vectors(self) -> usize {
        self.key_dim / 8
    }
}

/// The offset in bytes of vector `column` of `row` in a tile of `vectors` vectors per row. Columns
/// are swizzled, so that the same column of eight rows lies in different banks.
#[cube]
pub fn swizzled(row: usize, column: usize, #[comptime] vectors: usize) -> u32 {
    let column =
        if comptime!(vectors >= 8) { column ^ (row & 7usize) } else { column ^ ((row >> 1usize) & 3usize) };
    ((row * vectors + column) * 16usize) as u32
}

/// State planes, and output planes.
pub(in super::super) const PLANES: usize = 2;

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::gpu::compile::{CudaDevice, Target};

    /// By capability: the stages of keys of 64 and of 128 elements. Token by token where not even
    /// two fit.
    #[test]
    fn stages_fit_into_shared_memory() {
        for (capability, want) in [
            (75, [None, None]),
            (80, [Some(3), Some(2)]),
            (86, [Some(2), None]),
            (90, [Some(3), Some(3)]),
            (120, [Some(2), None]),
        ] {
            let target = Target::cuda(CudaDevice::example(capability));
            let stages = [64, 128].map(|key_dim| {
                let dims = Dims { key_heads: 2, value_heads: 4, key_dim, value_dim: 128 };
                let config =
                    ChunkConfig::new(target.caps(), dims, &GatedDeltaRule::new(key_dim), FloatType::F16);
                config.map(|config| config.stages)
            });
            assert_eq!(stages, want, "sm_{capability}");
        }
    }
}
