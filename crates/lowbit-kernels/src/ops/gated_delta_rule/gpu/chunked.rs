//! The recurrence in chunks of [`CHUNK`] tokens, on tensor cores.
//!
//! With `D` and `g` as `cpu/chunked.rs` has them, let `L[i][j] = beta[i] D[i][j] (k[i] . k[j])` for `j < i`. Then
//! ```text
//! delta = T (v - g S^T k)     T = (I + L)^-1 diag(beta)
//! y     = scale * (g S^T q + P delta)     P[i][j] = D[i][j] (q[i] . k[j]) for j <= i
//! S     = g[last] S + sum over j of k[j] (D[last][j] delta[j])^T
//! ```
//! `T`, `P` and the gates of all chunks are made at once by [`prepare`]; [`pass`](mod@pass) then goes through each sequence's
//! chunks with the state in registers. (Published algorithms apply `T` to keys and values beforehand. Applied to the
//! error of the prediction, it needs neither product, nor memory for them, and what rounding it costs is relative to
//! that error.)
//!
//! Operands of products are rounded to the activations' type: the state, `T`, `P`, the error and `delta`. Their sums, the
//! gates, `T` until then and the state itself are f32.

mod pass;
mod prepare;

use super::Problem;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::{CUBES, Dispatch, sequences};
use crate::ops::gated_delta_rule::{
    CHECK, DecaySign, Dims, GatedDeltaInputs, GatedDeltaRule, HeadMap, StateLayout,
};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
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
/// Units that prepare a chunk.
const PREPARERS: usize = 128;
/// Columns of the state that a cube has.
const SLICE: usize = 16 * pass::WARPS;
/// Floats between the rows of a matrix of a chunk's pairs: warps then store their sums into all banks.
const PITCH: usize = 72;
/// Floats of a chunk's gates: `g`, then `D[last]`.
const GATES: usize = 2 * CHUNK;

impl Shape {
    pub fn new(dims: Dims, params: &GatedDeltaRule, dtype: FloatType) -> Self {
        let GatedDeltaRule { head_map, state_layout: layout, sign, .. } = *params;
        Self { dtype, key_dim: dims.key_dim, value_dim: dims.value_dim, head_map, layout, sign }
    }

    /// Whether the kernels are made for these sizes.
    pub fn fits(self) -> bool {
        let Self { dtype, key_dim, value_dim, .. } = self;
        dtype != FloatType::F32 && matches!(key_dim, 64 | 128) && value_dim.is_multiple_of(SLICE)
    }

    /// Vectors of 16 bytes in a token's key.
    fn vectors(self) -> usize {
        self.key_dim / 8
    }

    /// Cubes that the columns of a head take.
    pub fn cubes(self) -> usize {
        self.value_dim / SLICE
    }

    /// Words of shared memory that preparing a chunk takes.
    fn prepare_words(self) -> usize {
        (CHUNK * (PITCH + CHUNK)).max(CHUNK * self.key_dim)
    }
}

/// Where vector `column` of `row` is in a tile with `vectors` vectors a row, so that eight rows' are in all banks.
#[cube]
fn place(row: usize, column: usize, #[comptime] vectors: usize) -> u32 {
    let turned =
        if comptime!(vectors >= 8) { column ^ (row & 7usize) } else { column ^ ((row >> 1usize) & 3usize) };
    ((row * vectors + turned) * 16usize) as u32
}

/// Every kernel for `target`.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let of = |dtype, key_dim, layout, head_map, sign| {
        let shape = Shape { dtype, key_dim, value_dim: 128, head_map, layout, sign };
        [prepare::kernel(target, shape), pass::kernel(target, shape)]
    };
    let all = [
        of(FloatType::BF16, 128, StateLayout::KeyValue, HeadMap::Grouped, DecaySign::LogDecay),
        of(FloatType::F16, 128, StateLayout::KeyValue, HeadMap::Grouped, DecaySign::LogDecay),
        of(FloatType::BF16, 64, StateLayout::ValueKey, HeadMap::Tiled, DecaySign::Rate),
    ];
    all.into_iter().flatten().collect()
}

/// Launches the preparation of all chunks, and the pass over them.
pub(super) fn launch(problem: &Problem, state: &Tensor, y: &Tensor) -> Result<(), KernelError> {
    let Problem { gpu, inputs, dims, params, dtype } = *problem;
    let GatedDeltaInputs { q, k, v, cu_seqlens, .. } = *inputs;
    let (q, k) = (params.normalised(q)?, params.normalised(k)?);
    let (log_decay, beta) = inputs.gates.computed()?;
    let shape = Shape::new(dims, params, dtype);
    let index = |value: usize| CHECK.index(value);
    let (tokens, sequences) = (q.dim(0), state.dim(0));
    let slots = sequences::slots(tokens, sequences, CHUNK);
    let matrices = slots * dims.value_heads * CHUNK * CHUNK;
    index(matrices)?;
    let transforms = gpu.allocate(2 * matrices)?;
    let pairs = gpu.allocate(2 * matrices)?;
    let gates = gpu.allocate(4 * slots * dims.value_heads * GATES)?;
    let sizes = [index(tokens)?, index(sequences)?, index(dims.key_heads)?, index(dims.value_heads)?];
    gpu.launch(Dispatch {
        kernel: prepare::kernel(gpu.target(), shape),
        cubes: [index(dims.value_heads)?, index(slots.min(CUBES))?, index(slots.div_ceil(CUBES))?],
        buffers: vec![
            q.memory()?,
            k.memory()?,
            log_decay.memory()?,
            beta.memory()?,
            cu_seqlens.memory()?,
            (&transforms, 0),
            (&pairs, 0),
            (&gates, 0),
        ],
        scalars: sizes.to_vec(),
    })?;
    gpu.launch(Dispatch {
        kernel: pass::kernel(gpu.target(), shape),
        cubes: [
            index(dims.value_heads * shape.cubes())?,
            index(sequences.min(CUBES))?,
            index(sequences.div_ceil(CUBES))?,
        ],
        buffers: vec![
            q.memory()?,
            k.memory()?,
            v.memory()?,
            (&transforms, 0),
            (&pairs, 0),
            (&gates, 0),
            cu_seqlens.memory()?,
            state.memory()?,
            y.memory()?,
        ],
        scalars: sizes.into_iter().chain([params.scale.to_bits()]).collect(),
    })
}
