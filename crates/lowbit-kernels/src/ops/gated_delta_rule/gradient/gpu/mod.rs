//! The gradients on a GPU. Two kernels go through all tokens one after the other, as the forward
//! kernel does, and everything else is done for all chunks of [`CHUNK`] tokens at once.
//!
//! Going forward gives each token's residual `r = v - kept^T k` and the state `S` before each
//! chunk; going back gives `ddelta` and the gradient `G` of the state after each chunk. Within a
//! chunk, what a token's state holds is then a sum of what is known: with `delta = beta r`,
//! `P(i, t)` the product of the decays of tokens after `i` to `t`, `B(t)` that from the chunk's
//! start to `t`, and `E(t)` that after `t` to the chunk's end,
//! ```text
//! S[t] = B(t) S + sum over i <= t of P(i, t) k[i] delta[i]^T
//! G[t] = E(t) G + sum over j >= t of P(t, j) scale q[j] dy[j]^T - sum over j > t of P(t, j) k[j] dv[j]^T
//!
//! reads[i, t]   = P(i, t) delta[i] . dy[t]   for i <= t
//! updates[i, t] = P(i, t) delta[i] . dv[t]   for i < t
//! dq[t] = scale B(t) S dy[t] + scale * sum over i of reads[i, t] k[i]
//! dk[t] = E(t) G delta[t] - B(t) S dv[t] + scale * sum over j of reads[t, j] q[j]
//!         - sum over j of (updates[t, j] + updates[j, t]) k[j]
//! ```
//! and `dlog_decay[t]`, the product of both sums, takes no more than dot products of what is above
//! (`gates.rs`). So no state of a token is stored, and no gradient is a sum over blocks of columns.
//! Decays are only multiplied, never divided by: a chunk may decay to nothing. Each sum is made by
//! one unit or plane in one order, so results are the same in every launch.
//!
//! Floor, per token and value head: `8 Dk Dv` multiply-adds (two for the forward pass, three for
//! the way back, three for `S dy`, `S dv` and `G delta`) and `CHUNK (5 Dk + 2 Dv)` for pairs; reads
//! and writes of `9 Dk + 12 Dv` floats, of `4 Dk Dv / CHUNK` of checkpoints and `6 CHUNK` of pairs,
//! and per key head of `9 Dk`. 8192 tokens of 16 and 32 heads of 128 are 50e9 multiply-adds and 4.9
//! GB. The two passes take a token's sums one after the other, which limits them where there are
//! few sequences and heads. Scratch is `3 Dk + 2 Dv + 2 Dk Dv / CHUNK + 3 CHUNK` floats per token
//! and value head: 5.4 KB for heads of 128.

mod chunks;
mod gates;
mod recurrent;

use super::{Gradients, Operands};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::launch::LaunchArgs;
use crate::gpu::sequences::{Piece, piece, slots};
use crate::ops::Check;
use crate::ops::gated_delta_rule::gpu::Sizes;
use crate::ops::gated_delta_rule::{Dims, GatedDeltaRule, HeadMap};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

const CHECK: Check = Check("gated_delta_rule_backward");

/// Tokens of a chunk: longer ones have fewer checkpoints, and more pairs of tokens.
pub(super) const CHUNK: usize = 64;

/// Rows and columns of a tile of results, and the sides of the square of units that share it.
const TILE: usize = 64;
const SIDE: usize = 16;
/// Rows and columns of a unit.
const EACH: usize = TILE / SIDE;
const UNITS: usize = SIDE * SIDE;

/// The compile-time configuration of all kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Heads {
    key_dim: usize,
    value_dim: usize,
    head_map: HeadMap,
}

/// Products of decays, `[T, Hv]`.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Decays {
    /// Of each token alone.
    of_token: Box<[f32]>,
    /// From the chunk's first token to this one.
    from_start: Box<[f32]>,
    /// From the token after this one to the chunk's last.
    to_end: Box<[f32]>,
}

/// The piece of a slot; one without tokens for slots past the last.
#[cube]
fn known_piece(cu_seqlens: &[u32], slot: usize, sizes: &Sizes) -> Piece {
    let (tokens, sequences) = (sizes.tokens as usize, sizes.sequences as usize);
    let last = tokens / CHUNK + sequences - 1;
    let mut found = piece(cu_seqlens, min(slot, last), sequences, tokens, CHUNK);
    found.last = select(slot <= last, found.last, found.first);
    found
}

/// One call, and what its kernels leave for each other.
struct Problem<'a> {
    gpu: &'a Gpu,
    operands: &'a Operands<'a>,
    gradients: &'a Gradients,
    params: &'a GatedDeltaRule,
    heads: Heads,
    sizes: Sizes,
    /// Places for chunks.
    slots: usize,
    /// As [`Decays`].
    decays: [Tensor; 3],
    /// `v - kept^T k` and `ddelta`, `[T, Hv, Dv]`.
    residual: Tensor,
    ddelta: Tensor,
    /// The state before each chunk, and its gradient after it: `[slots, Hv, Dv, Dk]`.
    states: Tensor,
    state_gradients: Tensor,
    /// The part of `dq` by the chunk's state, and those of `dk` by its gradient and by the state:
    /// `[T, Hv, Dk]`.
    products: [Tensor; 3],
    /// Of the chunk's state and its gradient, by row: `[slots, Hv, Dk]`.
    overlaps: Tensor,
    /// `reads`, `updates`, and what pairs add to `dlog_decay`: `[slots, Hv, CHUNK, CHUNK]`.
    pairs: [Tensor; 3],
    /// The terms of tokens before and after in `dlog_decay`: `[T, Hv]`.
    sums: [Tensor; 2],
}

impl<'a> Problem<'a> {
    fn new(
        gpu: &'a Gpu,
        operands: &'a Operands<'a>,
        gradients: &'a Gradients,
        dims: Dims,
        params: &'a GatedDeltaRule,
    ) -> Result<Self, KernelError> {
        let Dims { key_heads, key_dim, value_heads, value_dim } = dims;
        let (tokens, sequences) = (operands.q.dim(0), operands.state.dim(0));
        let slots = slots(tokens, sequences, CHUNK);
        let new = |shape: &[usize]| {
            let tensor = Tensor::allocate(shape, DType::F32, operands.q.device())?;
            // Kernels count elements with 32 bits.
            CHECK.index(tensor.len()).map(|_| tensor)
        };
        let of_gates = || new(&[tokens, value_heads]);
        let of_values = || new(&[tokens, value_heads, value_dim]);
        let of_keys = || new(&[tokens, value_heads, key_dim]);
        let of_states = || new(&[slots, value_heads, value_dim, key_dim]);
        let of_pairs = || new(&[slots, value_heads, CHUNK, CHUNK]);
        CHECK.index(operands.q.len().max(operands.state.len()))?;
        Ok(Self {
            gpu,
            operands,
            gradients,
            params,
            heads: Heads { key_dim, value_dim, head_map: params.head_map },
            sizes: Sizes {
                tokens: CHECK.index(tokens)?,
                sequences: CHECK.index(sequences)?,
                states: CHECK.index(sequences)?,
                key_heads: CHECK.index(key_heads)?,
                value_heads: CHECK.index(value_heads)?,
            },
            slots,
            decays: [of_gates()?, of_gates()?, of_gates()?],
            residual: of_values()?,
            ddelta: of_values()?,
            states: of_states()?,
            state_gradients: of_states()?,
            products: [of_keys()?, of_keys()?, of_keys()?],
            overlaps: new(&[slots, value_heads, key_dim])?,
            pairs: [of_pairs()?, of_pairs()?, of_pairs()?],
            sums: [of_gates()?, of_gates()?],
        })
    }

    fn decays(&self) -> Result<DecaysArgs<'_>, KernelError> {
        let [of_token, from_start, to_end] = &self.decays;
        Ok(DecaysArgs {
            of_token: of_token.buffer()?,
            from_start: from_start.buffer()?,
            to_end: to_end.buffer()?,
        })
    }
}

/// The gradients of all sequences; everything was checked.
pub(super) fn backward(
    gpu: &Gpu,
    operands: &Operands<'_>,
    dims: Dims,
    params: &GatedDeltaRule,
) -> Result<Gradients, KernelError> {
    // Tokens of no sequence keep their zeros.
    let gradients = Gradients::zeros(operands)?;
    if operands.v.is_empty() || operands.state.is_empty() {
        return Ok(gradients);
    }
    let problem = Problem::new(gpu, operands, &gradients, dims, params)?;
    gates::decays(&problem)?;
    recurrent::launch(&problem)?;
    chunks::pairs(&problem)?;
    chunks::states(&problem)?;
    chunks::inputs(&problem)?;
    gates::sums(&problem)?;
    gates::gates(&problem)?;
    Ok(gradients)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the gradient for `target`, at the sizes of models and at one that fits no
/// vector.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let grouped = [(128, 128), (256, 64), (37, 19)];
    let all = grouped.map(|dims| (dims, HeadMap::Grouped)).into_iter().chain([((32, 32), HeadMap::Tiled)]);
    all.flat_map(|((key_dim, value_dim), head_map)| {
        let heads = Heads { key_dim, value_dim, head_map };
        [gates::kernels(target, heads), recurrent::kernels(target, heads), chunks::kernels(target, heads)]
            .into_iter()
            .flatten()
    })
    .collect()
}
