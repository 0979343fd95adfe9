//! Attention over pages of a pool: the steps of many sequences in one call.

use super::{AttentionParams, attention, check_params, check_sinks};
use crate::ops::Check;
use crate::ops::concat_rows;
use crate::ops::pages::{PAGE_TOKENS, Pages, PoolShape, gather_pages};
use crate::{Device, KernelError, Tensor};

const CHECK: Check = Check("attention_paged");

/// [`attention()`] of some tokens of each of S sequences, whose keys and values are in pages:
///
/// ```text
/// y[t, h] = sum_j softmax_j(scale * q[t, h] . k(s, g, j)) v(s, g, j)
/// s = t / (T / S),  g = h / (Hq / Hkv),  k(s, g, j) = keys[table[s, j / 64], g, j % 64]
/// ```
///
/// over the keys that token t sees of its own sequence s: those of `attention` for `positions[t]`,
/// with its window, its soft cap and its sinks (`look_ahead` is 0). It is made for a few tokens of
/// each sequence; for many of one, [`gather_pages`] and `attention` are faster.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | q | `[T, Hq, D]`, S divides T | f32, f16, bf16 |
/// | pages | see [`Pages`], Hq a multiple of Hkv | f32, f16, bf16; the table u32 |
/// | positions | `[T]` | u32 |
/// | sinks | `[Hq]`, or none | f32 |
/// | y | `[T, Hq, Dv]` | q's |
///
/// The bits of a token's rows follow from its query, its position and the keys and values that it
/// sees, on a given device: not from other tokens, nor from S, P, N and the numbers of its pages. A
/// row's keys are summed in parts, whose length follows from its position (and the window) alone,
/// and the parts are combined in order. All else is as `attention` says. On a GPU a page beyond the
/// pool is taken for the last one.
///
/// Source: vLLM 0.11 `paged_attention_v2`, flash-attention 2.8 `flash_attn_with_kvcache`
/// (`block_table`).
///
/// # Errors
/// Those of `attention`; [`KernelError::Shape`] for a pool and tokens that do not fit, and
/// [`KernelError::Id`] for a position beyond the table and a page beyond the pool.
pub fn attention_paged(
    q: &Tensor,
    pages: Pages<'_>,
    positions: &Tensor,
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    let shape = check_operands(q, pages, positions, sinks, params)?;
    match q.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            super::gpu::attention_paged(CHECK, gpu, (q, pages, positions), &shape, sinks, params)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => on_cpu(q, pages, positions, &shape, sinks, params),
    }
}

/// Sequence by sequence, over a contiguous copy of its keys and values.
fn on_cpu(
    q: &Tensor,
    pages: Pages<'_>,
    positions: &Tensor,
    shape: &PoolShape,
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    let Pages { keys, values, table } = pages;
    if q.is_empty() {
        return Tensor::allocate(&[q.dim(0), q.dim(1), shape.widths[1]], q.dtype(), q.device());
    }
    let table = table.reshape(&[table.len()])?;
    let of_sequence = |(sequence, last): (usize, &[u32])| {
        let first = sequence * shape.tokens;
        let rows = first..first + shape.tokens;
        let count = last.iter().max().map_or(0, |&position| position as usize / PAGE_TOKENS + 1);
        let table = table.rows(sequence * shape.columns, sequence * shape.columns + count)?;
        let (k, v) = (gather_pages(keys, &table)?, gather_pages(values, &table)?);
        let [q, positions] = [q, positions].map(|x| x.rows(rows.start, rows.end));
        attention(&q?, &k, &v, &positions?, sinks, params)
    };
    let sequences = positions.as_slice::<u32>()?.chunks(shape.tokens).enumerate();
    concat_rows(&sequences.map(of_sequence).collect::<Result<Vec<_>, _>>()?)
}

fn check_operands(
    q: &Tensor,
    pages: Pages<'_>,
    positions: &Tensor,
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Result<PoolShape, KernelError> {
    let [tokens, query_heads, width] = CHECK.dims("q", q, "[T, Hq, D]")?;
    CHECK.float("q", q)?;
    CHECK.shape("positions", positions, &[tokens], || format!("q {:?}", q.shape()))?;
    let shape = pages.check(CHECK, positions)?;
    let keys = pages.keys;
    if width != shape.widths[0] {
        return Err(CHECK.shape_error(
            "q",
            q,
            format!("keys {:?} wants heads of {}", keys.shape(), shape.widths[0]),
        ));
    }
    if !query_heads.is_multiple_of(shape.heads) {
        return Err(CHECK.shape_error("keys", keys, format!("its heads must divide the {query_heads} of q")));
    }
    check_params(CHECK, params)?;
    if params.look_ahead != 0 {
        let why = "keys in pages are those up to a query's own: 0 is wanted";
        return Err(CHECK.value("look_ahead", params.look_ahead, why));
    }
    check_sinks(CHECK, sinks, q)?;
    CHECK.same_device("keys", keys.device(), q.device())?;
    Ok(shape)
}
