//! The recurrence in chunks of [`CHUNK`] tokens, on NVIDIA's tensor cores (compute capability 8.0).
//!
//! | file | holds |
//! |---|---|
//! | `config.rs` | the configuration of both kernels |
//! | `prepare.rs` | the first kernel: what does not depend on the state, for all chunks at once |
//! | `pass.rs` | the second kernel: each sequence's chunks in their order, with the state in registers |
//! | `pass/layout.rs`, `pass/load.rs` | the layout of its shared memory, and the copies into it |
//!
//! With `D` and `g` as `cpu/chunked.rs` has them, let `L[i][j] = beta[i] D[i][j] (k[i] . k[j])` for
//! `j < i`. Then
//! ```text
//! delta = T (v - g S^T k)     T = (I + L)^-1 diag(beta)
//! y     = scale * (g S^T q + P delta)     P[i][j] = D[i][j] (q[i] . k[j]) for j <= i
//! S     = g[last] S + sum over j of k[j] (D[last][j] delta[j])^T
//! ```
//! The first kernel makes `T`, `P` and the gates. (Published algorithms apply `T` to keys and
//! values beforehand. Applied to the error of the prediction, it needs neither product, nor memory
//! for them, and what rounding it costs is relative to that error.)
//!
//! Without a correction ([`Rule::Additive`](super::Rule)), `delta` stands for `v`, and the
//! betas are factors of `P[.][j]` and of `D[last][j]`.
//!
//! Operands of products are rounded to the activations' type: the state, `T`, `P`, the error and
//! `delta`. Their sums, the gates, `T` until then and the state itself are f32.
//!
//! Products are sums of `[16, 16]` tiles in shared memory times `[16, 8]` ones. Unit `u` of a plane
//! has the places `(u / 4 + 8 i, 2 (u % 4) + j)` of a `[16, 8]` sum, `[i][j]` with `i` and `j`
//! below 2. Two sums side by side, rounded and packed, are a left operand.

mod config;
mod pass;
mod prepare;

pub(super) use config::{CHUNK, ChunkConfig};

use super::gpu::Problem;
use super::gpu::operands::in_chunks;
#[cfg(test)]
use super::{Dims, GatedDeltaRule, HeadMap};
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::{KernelError, Tensor};
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
#[cfg(test)]
use lowbit_formats::FloatType;

/// Every kernel for `target`.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let by = |dtype, key_dim, params| {
        let dims = Dims { key_heads: 2, value_heads: 4, key_dim, value_dim: 128 };
        // Of a device without room, none.
        let config = ChunkConfig::new(target.caps(), dims, &params, dtype);
        config.map(|config| {
            let passes = [false, true].map(|pooled| pass::compiled(target, config, pooled).code());
            [prepare::compiled(target, config).code()].into_iter().chain(passes)
        })
    };
    let of = |dtype, key_dim, head_map| {
        by(dtype, key_dim, GatedDeltaRule { head_map, ..GatedDeltaRule::new(key_dim) })
    };
    let all = [
        of(FloatType::BF16, 128, HeadMap::Grouped),
        of(FloatType::F16, 128, HeadMap::Grouped),
        of(FloatType::BF16, 64, HeadMap::Tiled),
        by(FloatType::BF16, 128, GatedDeltaRule::additive()),
    ];
    all.into_iter().flatten().flatten().collect()
}

/// Prepares all chunks, then passes over them.
pub(super) fn launch(
    problem: &Problem,
    config: ChunkConfig,
    state: &Tensor,
    y: &Tensor,
) -> Result<(), KernelError> {
    in_chunks(problem, CHUNK, |problem, slots, prepared| {
        prepare::launch(problem, config, slots, state, prepared)?;
        pass::launch(problem, config, prepared, state, y)
    })
}
