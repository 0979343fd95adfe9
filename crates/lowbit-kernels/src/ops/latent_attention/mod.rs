//! Attention whose keys and values are one vector per token for all heads: multi-head latent
//! attention in its absorbed form.
//!
//! It is [`attention()`](super::attention()) with one key head, whose values are its keys: those
//! kernels compute a few more columns than are wanted, which are left out.

mod bench;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
#[cfg(test)]
mod tests;

pub use gradient::{LatentAttentionGradient, latent_attention_backward};

use super::{AttentionParams, Check, Pages, attention, attention_paged, narrow};
use crate::{KernelError, Tensor};

const CHECK: Check = Check("latent_attention");

/// Options of [`latent_attention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentAttentionParams {
    /// The first elements of a latent that are its value: `kv_lora_rank`.
    pub rank: usize,
    /// Multiplies the scores; usually the -0.5th power of a decompressed key's size.
    pub scale: f32,
    /// As [`AttentionParams::exact`].
    pub exact: bool,
}

impl LatentAttentionParams {
    fn attention(&self) -> AttentionParams {
        AttentionParams { exact: self.exact, ..AttentionParams::causal(self.scale) }
    }

    /// Checks that latents of `width` elements have a value.
    fn check(&self, check: Check, width: usize) -> Result<(), KernelError> {
        match (1..=width).contains(&self.rank) {
            true => Ok(()),
            false => Err(check.value("rank", self.rank, format!("1 to {width} elements of a latent"))),
        }
    }
}

/// `y[t, h] = sum_j softmax_j(scale * q[t, h] . c[j]) c[j, ..rank]` over the latents that query t
/// sees: `j <= positions[t]`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | q | `[T, H, D]`: a head's query times its part of the keys' projection, then what is rotated | f32, f16, bf16 |
/// | latents (c) | `[1, capacity, D]`: the compressed keys and values, then the keys that are rotated | f32, f16, bf16 |
/// | positions | `[T]`, in any order | u32 |
/// | y | `[T, H, rank]`: the values' projection of each head comes after it | q's |
///
/// Rounding is that of [`attention()`](super::attention()), of which one key head has keys and
/// values that are the latents.
///
/// Source: DeepSeek-V2 (2024), section 2.1; llama.cpp `src/models/deepseek2.cpp`; mlx-lm 0.32
/// `models/deepseek_v3.py` for one token.
///
/// # Errors
/// Those of [`attention()`](super::attention()), whose k is c; [`KernelError::Value`] for a rank
/// that latents do not have.
pub fn latent_attention(
    q: &Tensor,
    latents: &Tensor,
    positions: &Tensor,
    params: &LatentAttentionParams,
) -> Result<Tensor, KernelError> {
    let [heads, _, width] = CHECK.dims("latents", latents, "[1, capacity, D]")?;
    if heads != 1 {
        return Err(CHECK.shape_error("latents", latents, "one head is wanted".into()));
    }
    params.check(CHECK, width)?;
    narrow(&attention(q, latents, latents, positions, None, &params.attention())?, 0, params.rank)
}

/// [`latent_attention`] of some tokens of each of S sequences, whose latents are in pages, as
/// [`attention_paged`] has keys.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | q | `[T, H, D]`, S divides T | f32, f16, bf16 |
/// | pages | `[P, 1, 64, D]` | f32, f16, bf16 |
/// | table | `[S, N]` | u32 |
/// | positions | `[T]` | u32 |
/// | y | `[T, H, rank]` | q's |
///
/// # Errors
/// Those of [`attention_paged`]; [`KernelError::Value`] for a rank that latents do not have.
pub fn latent_attention_paged(
    q: &Tensor,
    (pages, table): (&Tensor, &Tensor),
    positions: &Tensor,
    params: &LatentAttentionParams,
) -> Result<Tensor, KernelError> {
    let check = Check("latent_attention_paged");
    let [_, heads, _, width] = check.dims("pages", pages, "[P, 1, 64, D]")?;
    if heads != 1 {
        return Err(check.shape_error("pages", pages, "one head is wanted".into()));
    }
    params.check(check, width)?;
    let pages = Pages { keys: pages, values: pages, table };
    narrow(&attention_paged(q, pages, positions, None, &params.attention())?, 0, params.rank)
}
