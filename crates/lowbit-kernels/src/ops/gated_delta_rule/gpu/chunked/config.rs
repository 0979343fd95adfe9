//! The compile-time configuration of both kernels of the chunked form, and the cut of a chunk.

use super::super::super::{Dims, GatedDeltaRule, HeadMap, Rule};
use crate::gpu::caps::{Caps, Matrices};
use lowbit_formats::FloatType;

/// The compile-time configuration of both kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct MatrixChunks {
    /// The type of q, k, v and y: one of 16 bits.
    pub dtype: FloatType,
    pub rule: Rule,
    pub key_dim: usize,
    pub value_dim: usize,
    pub head_map: HeadMap,
    /// The matrices that the device multiplies at once.
    pub matrices: Matrices,
    /// Units of the largest plane that may run. Where planes are smaller there are more of them.
    pub plane: usize,
    pub cut: Cut,
}

/// The tokens of a chunk, and the columns of the state per cube of the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Cut {
    pub tokens: usize,
    pub columns: usize,
}

/// All cuts: the first that the device has shared memory for is taken. With 16 columns, 32 value
/// heads of 128 are 256 cubes, two for each multiprocessor of a large GPU. None of it was measured
/// yet.
const CUTS: [Cut; 2] = [Cut { tokens: 32, columns: 16 }, Cut { tokens: 16, columns: 16 }];

/// Planes of a cube, of the largest size.
const PLANES: usize = 4;
/// Elements between the rows of shared memory: 16 bytes of an operand, so that the same columns of
/// 8 rows are in different banks.
const PADDING: usize = 8;
/// Tokens that are inverted at a time. All sizes of matrices divide it.
pub(super) const BLOCK: usize = 16;

impl MatrixChunks {
    /// For a device of these abilities, if it and the kernels support the type and the sizes.
    pub fn new(caps: &Caps, dims: Dims, params: &GatedDeltaRule, dtype: FloatType) -> Option<Self> {
        Self::all(caps, dims, params, dtype).into_iter().next()
    }

    /// With every cut that the device has units and shared memory for.
    pub fn all(caps: &Caps, dims: Dims, params: &GatedDeltaRule, dtype: FloatType) -> Vec<Self> {
        let Dims { key_dim, value_dim, .. } = dims;
        let GatedDeltaRule { rule, head_map, .. } = *params;
        let Some(matrices) = caps.matrices(dtype).filter(|_| matches!(key_dim, 64 | 128)) else {
            return Vec::new();
        };
        let plane = caps.largest_plane;
        let config = |cut| Self { dtype, rule, key_dim, value_dim, head_map, matrices, plane, cut };
        let fits = |config: &Self| {
            let Cut { tokens, columns } = config.cut;
            value_dim.is_multiple_of(columns)
                && config.pass_memory().max(config.prepare_memory()) <= caps.shared_memory
                && config.units() <= caps.units
                && config.units() >= 2 * tokens
                && (tokens * columns).is_multiple_of(config.units())
        };
        CUTS.map(config).into_iter().filter(fits).collect()
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        PLANES * self.plane
    }

    /// Cubes that share the columns of a head.
    pub fn strips(self) -> usize {
        self.value_dim / self.cut.columns
    }

    /// Elements of the state per unit, and of a chunk's values.
    pub fn of_state(self) -> usize {
        self.key_dim * self.cut.columns / self.units()
    }

    pub fn of_values(self) -> usize {
        self.cut.tokens * self.cut.columns / self.units()
    }

    /// Vectors of 16 bytes of a token's key, and of a chunk's keys and of its `T`.
    pub fn key_vectors(self) -> usize {
        self.key_dim / 8
    }

    pub fn chunk_vectors(self) -> usize {
        self.cut.tokens * self.key_vectors()
    }

    /// True if there is a `T`.
    pub fn corrects(self) -> bool {
        self.rule == Rule::Delta
    }

    pub fn transform_vectors(self) -> usize {
        self.cut.tokens * self.cut.tokens / 8
    }

    /// The most of `count` items that a unit takes.
    pub fn share(self, count: usize) -> usize {
        count.div_ceil(self.units())
    }

    /// Elements from a row in shared memory to the next, of those that have an element per key
    /// dimension, token, or column.
    pub fn key_pitch(self) -> usize {
        self.key_dim + PADDING
    }

    pub fn token_pitch(self) -> usize {
        self.cut.tokens + PADDING
    }

    pub fn column_pitch(self) -> usize {
        self.cut.columns + PADDING
    }

    /// Floats of a chunk's gates: `g` of each token, then `D[last]` of each.
    pub fn gates(self) -> usize {
        2 * self.cut.tokens
    }

    /// Bytes of shared memory of the first kernel: see `prepare.rs`.
    fn prepare_memory(self) -> usize {
        let tokens = self.cut.tokens;
        2 * tokens * (2 * self.key_pitch() + 4 * self.token_pitch() + 4)
    }

    /// And of the second: see `Tiles` in `pass.rs`.
    fn pass_memory(self) -> usize {
        let Cut { tokens, columns } = self.cut;
        let operands = 2 * tokens * (self.key_pitch() + self.token_pitch())
            + columns * (self.key_pitch() + self.token_pitch())
            + tokens * self.column_pitch();
        let sums = 2 * tokens * self.column_pitch() + columns * self.key_pitch();
        2 * operands + 4 * sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::compile::Target;

    fn cuts(target: &Target, dtype: FloatType) -> [Option<[usize; 2]>; 2] {
        [64, 128].map(|key_dim| {
            let dims = Dims { key_heads: 2, value_heads: 4, key_dim, value_dim: 128 };
            let config = MatrixChunks::new(target.caps(), dims, &GatedDeltaRule::new(key_dim), dtype);
            config.map(|config| [config.cut.tokens, config.cut.columns])
        })
    }

    /// By device: the tokens and columns of keys of 64 and of 128 elements.
    #[test]
    fn cuts_fit_devices() {
        let long = Some([32, 16]);
        for plane in [16, 32, 64] {
            for (m, n, k) in [(8, 8, 8), (16, 16, 16), (8, 16, 16), (16, 8, 8)] {
                let target = Target::offline(plane, 4).with_matrices(Matrices { m, n, k }, &[FloatType::F16]);
                assert_eq!(cuts(&target, FloatType::F16), [long; 2], "{plane} {m} {n} {k}");
                assert_eq!(cuts(&target, FloatType::BF16), [None; 2]);
                assert_eq!(cuts(&target, FloatType::F32), [None; 2]);
            }
        }
        assert_eq!(cuts(&Target::offline(32, 4), FloatType::F16), [None; 2]);
        #[cfg(feature = "metal")]
        assert_eq!(cuts(&Target::apple(), FloatType::F16), [long, Some([16, 16])]);
    }
}
