//! Decays and their products; the gradients of the gates.
//!
//! With the module's sums for `S[t]` and `G[t]`,
//! `dlog_decay[t] = (G[t] - k[t] dv[t]^T) * (decay S[t-1])` is, for the whole chunk's decay `D`,
//! ```text
//! D G * S + sum over i < t of before[i] + sum over j >= t of after[j] + sum over i < t <= j of pairs[i, j]
//!
//! before[i]   = E(i) (G delta[i]) . k[i]
//! after[j]    = B(j) (scale (S dy[j]) . q[j] - (S dv[j]) . k[j])
//! pairs[i, j] = scale reads[i, j] k[i] . q[j] - updates[i, j] k[i] . k[j]
//! ```
//! Only what is part of a token's gradient is added up for it: differences of running sums would
//! lose the digits of tokens whose states have decayed.

#![allow(unsafe_code)] // Launches.

use super::{CHUNK, Decays, DecaysArgs, Heads, Problem, UNITS, known_piece};
use crate::KernelError;
use crate::gpu::compile::Target;
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::exp;
use crate::gpu::rows::{self, Rows, Sum};
use crate::ops::gated_delta_rule::gpu::{Sizes, key_head};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The products of decays, a unit per chunk and head.
#[kernel]
fn gated_delta_rule_backward_decays(
    log_decay: &[f32],
    cu_seqlens: &[u32],
    decays: &mut Decays,
    sizes: Sizes,
) {
    let heads = sizes.value_heads as usize;
    let (slot, head) = (ABSOLUTE_POS / heads, ABSOLUTE_POS % heads);
    let piece = known_piece(cu_seqlens, slot, &sizes);
    let mut product = 1.0f32;
    let mut t = piece.first;
    while t < piece.last {
        let gate = t * heads + head;
        let decay = exp(log_decay[gate]);
        product *= decay;
        decays.of_token[gate] = decay;
        decays.from_start[gate] = product;
        t += 1;
    }
    let mut product = 1.0f32;
    let mut t = piece.last;
    while t > piece.first {
        t -= 1;
        let gate = t * heads + head;
        decays.to_end[gate] = product;
        product *= decays.of_token[gate];
    }
}

pub(super) fn decays(problem: &Problem<'_>) -> Result<(), KernelError> {
    let Problem { gpu, operands, sizes, slots, .. } = *problem;
    let arguments = GatedDeltaRuleBackwardDecays {
        log_decay: operands.log_decay.buffer()?,
        cu_seqlens: operands.cu_seqlens.buffer()?,
        decays: problem.decays()?,
        sizes,
    };
    let cubes = rows::cubes((slots * operands.v.dim(1)).div_ceil(UNITS));
    // SAFETY: the sizes are the tensors', and a piece stays within the tokens.
    unsafe { gpu.launch(GatedDeltaRuleBackwardDecays::kernel(gpu.target(), UNITS), cubes, arguments) }
}

/// The operands that [`gated_delta_rule_backward_sums`] multiplies, token by token: as the module's
/// problem calls them.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct SumInputs {
    q: Box<[f32]>,
    k: Box<[f32]>,
    residual: Box<[f32]>,
    ddelta: Box<[f32]>,
    reads: Box<[f32]>,
    gradients: Box<[f32]>,
    taken: Box<[f32]>,
}

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct SumOutputs {
    dbeta: Box<[f32]>,
    before: Box<[f32]>,
    after: Box<[f32]>,
}

/// `dbeta`, and what tokens before and after add to `dlog_decay`: a row per head of each token that
/// a chunk may have.
#[kernel]
fn gated_delta_rule_backward_sums(
    inputs: &SumInputs,
    cu_seqlens: &[u32],
    outputs: &mut SumOutputs,
    sizes: Sizes,
    #[comptime] heads: Heads,
    #[comptime] config: Rows,
) {
    let (key_dim, value_dim) = comptime!((heads.key_dim, heads.value_dim));
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    let (place, head) = (rows::row(config) / value_heads, rows::row(config) % value_heads);
    let piece = known_piece(cu_seqlens, place / CHUNK, &sizes);
    let t = piece.first + place % CHUNK;
    let gate = t * value_heads + head;
    // Units without a token only take part in the sums.
    let known = t < piece.last;
    let (lane, step) = (rows::lane_in_row(config), comptime!(rows::lanes_per_row(config)));
    let mut dbeta = 0.0f32;
    let mut before = 0.0f32;
    let mut after = 0.0f32;
    if known {
        let mut j = lane;
        while j < value_dim {
            let at = gate * value_dim + j;
            dbeta = fma(inputs.residual[at], inputs.ddelta[at], dbeta);
            j += step;
        }
        let key = t * key_heads + key_head(key_heads, value_heads, head, heads.head_map);
        let mut i = lane;
        while i < key_dim {
            let (at, of_key) = (gate * key_dim + i, key * key_dim + i);
            let k = inputs.k[of_key];
            before = fma(k, inputs.gradients[at], before);
            after = fma(inputs.q[of_key], inputs.reads[at], after);
            after = fma(-k, inputs.taken[at], after);
            i += step;
        }
    }
    let dbeta = rows::reduce::<f32, Sum>(dbeta, config);
    let before = rows::reduce::<f32, Sum>(before, config);
    let after = rows::reduce::<f32, Sum>(after, config);
    if known && lane == 0 {
        outputs.dbeta[gate] = dbeta;
        outputs.before[gate] = before;
        outputs.after[gate] = after;
    }
}

pub(super) fn sums(problem: &Problem<'_>) -> Result<(), KernelError> {
    let Problem { gpu, operands, heads, sizes, slots, .. } = *problem;
    let ([reads, gradients, taken], [before, after]) = (&problem.products, &problem.sums);
    let arguments = GatedDeltaRuleBackwardSums {
        inputs: SumInputsArgs {
            q: operands.q.buffer()?,
            k: operands.k.buffer()?,
            residual: problem.residual.buffer()?,
            ddelta: problem.ddelta.buffer()?,
            reads: reads.buffer()?,
            gradients: gradients.buffer()?,
            taken: taken.buffer()?,
        },
        cu_seqlens: operands.cu_seqlens.buffer()?,
        outputs: SumOutputsArgs {
            dbeta: problem.gradients.dbeta.buffer()?,
            before: before.buffer()?,
            after: after.buffer()?,
        },
        sizes,
    };
    let count = slots * CHUNK * operands.v.dim(1);
    let config = Rows::new(gpu.target(), [count, heads.key_dim.max(heads.value_dim)], 1);
    // SAFETY: the sizes are the tensors', and a piece stays within the tokens.
    unsafe { gpu.launch(sums_kernel(gpu.target(), heads, config), config.cubes(count), arguments) }
}

fn sums_kernel(target: &Target, heads: Heads, config: Rows) -> Kernel<GatedDeltaRuleBackwardSums<'static>> {
    GatedDeltaRuleBackwardSums::kernel(target, config.units, heads, config)
}

/// The terms of `dlog_decay`.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct GateInputs {
    from_start: Box<[f32]>,
    overlaps: Box<[f32]>,
    before: Box<[f32]>,
    after: Box<[f32]>,
    pairs: Box<[f32]>,
}

/// `dlog_decay`, a unit per token and head, and a cube per chunk and head.
#[kernel]
fn gated_delta_rule_backward_gates(
    inputs: &GateInputs,
    cu_seqlens: &[u32],
    dlog_decay: &mut [f32],
    sizes: Sizes,
    #[comptime] heads: Heads,
) {
    let value_heads = sizes.value_heads as usize;
    let (matrix, head) = (CUBE_POS, CUBE_POS % value_heads);
    let piece = known_piece(cu_seqlens, matrix / value_heads, &sizes);
    let (count, unit) = (piece.last - piece.first, UNIT_POS_X as usize);
    if unit < count {
        let mut total = 0.0f32;
        let mut row = 0usize;
        while row < comptime!(heads.key_dim) {
            total += inputs.overlaps[matrix * comptime!(heads.key_dim) + row];
            row += 1;
        }
        total *= inputs.from_start[(piece.last - 1) * value_heads + head];
        let mut i = 0usize;
        while i < unit {
            let mut sum = inputs.before[(piece.first + i) * value_heads + head];
            let mut j = unit;
            while j < count {
                sum += inputs.pairs[(matrix * CHUNK + i) * CHUNK + j];
                j += 1;
            }
            total += sum;
            i += 1;
        }
        let mut sum = 0.0f32;
        let mut j = unit;
        while j < count {
            sum += inputs.after[(piece.first + j) * value_heads + head];
            j += 1;
        }
        dlog_decay[(piece.first + unit) * value_heads + head] = total + sum;
    }
}

pub(super) fn gates(problem: &Problem<'_>) -> Result<(), KernelError> {
    let Problem { gpu, operands, heads, sizes, slots, .. } = *problem;
    let ([_, from_start, _], [_, _, pairs], [before, after]) =
        (&problem.decays, &problem.pairs, &problem.sums);
    let arguments = GatedDeltaRuleBackwardGates {
        inputs: GateInputsArgs {
            from_start: from_start.buffer()?,
            overlaps: problem.overlaps.buffer()?,
            before: before.buffer()?,
            after: after.buffer()?,
            pairs: pairs.buffer()?,
        },
        cu_seqlens: operands.cu_seqlens.buffer()?,
        dlog_decay: problem.gradients.dlog_decay.buffer()?,
        sizes,
    };
    let cubes = rows::cubes(slots * operands.v.dim(1));
    // SAFETY: the sizes are the tensors', and a piece stays within the tokens.
    unsafe { gpu.launch(gates_kernel(gpu.target(), heads), cubes, arguments) }
}

fn gates_kernel(target: &Target, heads: Heads) -> Kernel<GatedDeltaRuleBackwardGates<'static>> {
    GatedDeltaRuleBackwardGates::kernel(target, CHUNK, heads)
}

#[cfg(test)]
pub(super) fn kernels(target: &Target, heads: Heads) -> Vec<Box<dyn CubeKernel>> {
    let config = Rows::new(target, [4096, heads.key_dim.max(heads.value_dim)], 1);
    vec![
        GatedDeltaRuleBackwardDecays::kernel(target, UNITS).code(),
        sums_kernel(target, heads, config).code(),
        gates_kernel(target, heads).code(),
    ]
}
