//! The steps between queries and latents and the result of their attention.

use super::{Var, shapes};
use crate::cache::KvCache;
use crate::cache::PagedRows;
use crate::layers::PoolRows;
use lowbit_kernels::ops::{self, LatentAttentionParams};
use lowbit_kernels::{KernelError, Tensor};

/// [`ops::kv_append()`] of new latents `[T, 1, D]`, and [`ops::latent_attention()`] of queries
/// `[T, H, D]`. Latents that were cached before are constants.
pub(crate) fn latent_attention(
    cache: &mut KvCache,
    [q, new]: [&Var; 2],
    positions: &Tensor,
    params: &LatentAttentionParams,
) -> Result<Var, KernelError> {
    let latents = cache.append_latents(new.tensor(), positions)?;
    let y = ops::latent_attention(q.tensor(), latents, positions, params)?;
    let Some(tape) = q.tape().or(new.tape()) else { return Ok(y.into()) };
    let slots = [q.slot(), new.slot()];
    let (q, latents, kept) = (q.tensor().clone(), latents.clone(), y.clone());
    let (positions, params) = (positions.clone(), *params);
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::LatentAttentionGradient { dq, dlatents } =
            ops::latent_attention_backward(&q, &latents, &positions, &params, [&kept, dy])?;
        gradients.add(slots[0], dq)?;
        gradients.add(slots[1], ops::kv_gather(&dlatents, &positions)?)
    }))
}

/// The same for sequences in a pool.
pub(crate) fn latent_attention_in_pool(
    cache: &mut KvCache,
    [q, new]: [&Var; 2],
    rows: &PoolRows,
    params: &LatentAttentionParams,
) -> Result<Var, KernelError> {
    if q.tape().or(new.tape()).is_some() {
        let (got, want) = ("in a pool".into(), "a gradient takes caches of its own".into());
        return Err(KernelError::Value { op: "latent_attention", operand: "caches", got, want });
    }
    let (q, new) = (q.tensor(), new.tensor());
    if let [part] = &rows.parts[..] {
        return Ok(of_part(cache, [q, new], part, params)?.into());
    }
    let ys = rows.parts.iter().map(|part| {
        let [q, new] = shapes::each([q, new].map(|x| x.rows(part.rows.start, part.rows.end)))?;
        of_part(cache, [&q, &new], part, params)
    });
    Ok(shapes::rows_joined(&ys.collect::<Result<Vec<_>, _>>()?)?.into())
}

/// The same for sequences with as many tokens each: a token of each, or tokens of one.
fn of_part(
    cache: &mut KvCache,
    [q, new]: [&Tensor; 2],
    part: &PagedRows,
    params: &LatentAttentionParams,
) -> Result<Tensor, KernelError> {
    let pages = cache.append_latents_paged(new, part)?;
    let PagedRows { positions, table, .. } = part;
    if q.dim(0) == table.dim(0) {
        return ops::latent_attention_paged(q, (pages, table), positions, params);
    }
    let latents = ops::gather_pages(pages, &table.reshape(&[table.len()])?)?;
    ops::latent_attention(q, &latents, positions, params)
}
