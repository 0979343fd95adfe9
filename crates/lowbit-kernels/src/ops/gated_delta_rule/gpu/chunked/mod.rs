//! The recurrence in chunks of tokens on cooperative matrices: `VK_KHR_cooperative_matrix` on
//! Vulkan, `simdgroup_matrix` on Metal. It is what `../../cuda/` is on NVIDIA's tensor cores, with
//! its names, its two kernels and its roundings: operands of products (the state, `T`, `P`, the
//! error, `delta`) have the activations' type, their sums, the gates and the state that is kept are
//! f32.
//!
//! | file | holds |
//! |---|---|
//! | `config.rs` | the compile-time configuration of both kernels, and the cut of chunks |
//! | `prepare.rs` | the first kernel: `T`, `P` and the gates of all chunks at once |
//! | `pass.rs` | the second kernel: each sequence's chunks in their order, with the state on the chip |
//! | `multiply.rs`, `stage.rs` | products of matrices in shared memory, and how their operands come there |
//!
//! Per chunk of `C` tokens and value head, a pass multiplies `C (3 Dk + 2 C) Dv` times and
//! `prepare` `2 C^2 Dk` times, without what is above the diagonal half of the latter. Each of the
//! cubes that share a head loads the chunk's keys, queries, `T` and `P`: `4 C (Dk + C)` bytes.

mod config;
mod multiply;
mod pass;
mod prepare;
mod stage;

pub(super) use config::MatrixChunks;

use super::Problem;
use super::operands::in_chunks;
#[cfg(test)]
use crate::gpu::compile::Target;
#[cfg(test)]
use crate::ops::gated_delta_rule::{Dims, GatedDeltaRule, HeadMap};
use crate::{KernelError, Tensor};
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
#[cfg(test)]
use lowbit_formats::FloatType;

/// Every kernel of every cut for `target`: none where it has no cooperative matrices.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let by = |dtype, key_dim, params: GatedDeltaRule| {
        let dims = Dims { key_heads: 2, value_heads: 4, key_dim, value_dim: 128 };
        MatrixChunks::all(target.caps(), dims, &params, dtype)
    };
    let of = |dtype, key_dim, head_map| {
        by(dtype, key_dim, GatedDeltaRule { head_map, ..GatedDeltaRule::new(key_dim) })
    };
    let mut configs = Vec::new();
    for dtype in [FloatType::F16, FloatType::BF16] {
        configs.extend(of(dtype, 128, HeadMap::Grouped));
        configs.extend(of(dtype, 64, HeadMap::Tiled));
        configs.extend(by(dtype, 128, GatedDeltaRule::additive()));
    }
    let all = |config| {
        let passes = [false, true].map(|pooled| pass::compiled(target, config, pooled).code());
        [prepare::compiled(target, config).code()].into_iter().chain(passes)
    };
    configs.into_iter().flat_map(all).collect()
}

/// Prepares all chunks, then passes over them.
pub(super) fn launch(
    problem: &Problem,
    config: MatrixChunks,
    state: &Tensor,
    y: &Tensor,
) -> Result<(), KernelError> {
    in_chunks(problem, config.cut.tokens, |problem, slots, prepared| {
        prepare::launch(problem, config, slots, state, prepared)?;
        pass::launch(problem, config, prepared, state, y)
    })
}
