//! The steps between a layer's projections and its attention's result.

use super::{Named, Tape, Var, shapes};
use crate::cache::KvCache;
use crate::cache::PagedRows;
use crate::layers::{PoolRows, RmsNorm};
use lowbit_formats::DType;
use lowbit_kernels::ops::{self, AttentionParams, RmsNormRope, Rope};
use lowbit_kernels::{KernelError, Tensor};
use std::sync::Arc;

/// The arguments of [`attention`] besides a pass's own values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads<'a> {
    pub head_dim: usize,
    /// Of query and key heads.
    pub norms: Option<&'a [RmsNorm; 2]>,
    pub rope: &'a Arc<Rope>,
    pub sinks: Option<&'a Tensor>,
    pub params: AttentionParams,
}

/// A norm of heads, as a tape computes with it.
struct HeadNorm {
    weight: Tensor,
    name: Option<Arc<str>>,
    eps: f32,
}

/// [`ops::rms_norm_rope_append()`] of new queries, keys and values, `[T, H, ..]` each, and
/// [`ops::attention()`]. Keys and values that were cached before are constants; a pass that is
/// recorded has caches that keep all.
pub(crate) fn attention(
    cache: &mut KvCache,
    qkv: [&Var; 3],
    positions: &Tensor,
    heads: &Heads<'_>,
) -> Result<Var, KernelError> {
    let Heads { head_dim, norms, rope, sinks, params } = *heads;
    let tape = qkv.iter().find_map(|x| x.tape());
    if tape.is_some() && sinks.is_some() {
        let (got, want) = ("there".into(), "attention with them has no gradient".into());
        return Err(KernelError::Value { op: "attention", operand: "sinks", got, want });
    }
    let mut whole;
    let cache = match params.look_ahead {
        0 => cache,
        // Keys end with the text, so that no query sees others.
        _ => {
            whole = cache.emptied(positions.len())?;
            &mut whole
        }
    };
    let norm = |norm: &RmsNorm| HeadNorm::new(norm, tape);
    let norms = norms.map_or([None, None], |[q, k]| [Some(norm(q)), Some(norm(k))]);
    let [q, k, v] = qkv.map(Var::tensor);
    let rotations = norms.each_ref().map(|norm| HeadNorm::rotation(norm.as_ref(), head_dim, rope));
    let places = cache.places(positions);
    let at = [positions, &places];
    let (rotated, [keys, values]) = cache.append([q, k, v], at, rotations.each_ref())?;
    let y = ops::attention(&rotated, keys, values, &places, sinks, &params)?;
    let Some(tape) = tape else { return Ok(y.into()) };
    let cached = [rotated, keys.clone(), values.clone()];
    let (rope, positions, kept) = (rope.clone(), positions.clone(), y.clone());
    let ([q, k], slots) = ([q.clone(), k.clone()], qkv.map(Var::slot));
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::AttentionGradient { dq, dk, dv } =
            ops::attention_backward(cached.each_ref(), &positions, &params, [&kept, dy])?;
        let drotated = [dq, ops::kv_gather(&dk, &positions)?];
        for (((x, slot), norm), dy) in [q, k].iter().zip(slots).zip(&norms).zip(&drotated) {
            let rotation = HeadNorm::rotation(norm.as_ref(), head_dim, &rope);
            let gradient = ops::rms_norm_rope_backward(x, &positions, &rotation, dy)?;
            if let (Some(norm), Some(dweight)) = (norm, gradient.dweight) {
                gradients.add_tensor(norm.name.as_ref(), dweight)?;
            }
            gradients.add(slot, gradient.dx)?;
        }
        gradients.add(slots[2], ops::kv_gather(&dv, &positions)?)
    }))
}

/// [`ops::attention()`] of queries `[T, H, ..]` to keys and values that are cached. Nothing records
/// it.
pub(crate) fn attention_to_cached(
    cache: &KvCache,
    q: &Var,
    positions: &Tensor,
    heads: &Heads<'_>,
) -> Result<Var, KernelError> {
    let [keys, values] = cache.tensors();
    check_unrecorded(q)?;
    let q = rotated(q.tensor(), positions, (heads, keys))?;
    let places = cache.places(positions);
    Ok(ops::attention(&q, keys, values, &places, heads.sinks, &heads.params)?.into())
}

/// The same for sequences in a pool.
pub(crate) fn attention_in_pool(
    cache: &mut KvCache,
    qkv: [&Var; 3],
    rows: &PoolRows,
    heads: &Heads<'_>,
) -> Result<Var, KernelError> {
    if qkv.iter().any(|x| x.tape().is_some()) {
        let (got, want) = ("in a pool".into(), "a gradient takes caches of its own".into());
        return Err(KernelError::Value { op: "attention", operand: "caches", got, want });
    }
    let qkv = qkv.map(Var::tensor);
    if let [part] = &rows.parts[..] {
        return Ok(attention_of_part(cache, qkv, part, heads)?.into());
    }
    let ys = rows.parts.iter().map(|part| {
        let [q, k, v] = shapes::each(qkv.map(|x| x.rows(part.rows.start, part.rows.end)))?;
        attention_of_part(cache, [&q, &k, &v], part, heads)
    });
    Ok(shapes::rows_joined(&ys.collect::<Result<Vec<_>, _>>()?)?.into())
}

/// As [`attention_to_cached`] for sequences in a pool.
pub(crate) fn attention_to_pool(
    cache: &KvCache,
    q: &Var,
    rows: &PoolRows,
    heads: &Heads<'_>,
) -> Result<Var, KernelError> {
    check_unrecorded(q)?;
    let [keys, _] = cache.tensors();
    let q = rotated(q.tensor(), &rows.positions, (heads, keys))?;
    if let [part] = &rows.parts[..] {
        return Ok(attention_to_pages(cache, &q, part, heads)?.into());
    }
    let ys = rows
        .parts
        .iter()
        .map(|part| attention_to_pages(cache, &q.rows(part.rows.start, part.rows.end)?, part, heads));
    Ok(shapes::rows_joined(&ys.collect::<Result<Vec<_>, _>>()?)?.into())
}

/// Refuses queries to another layer's keys that a tape records.
fn check_unrecorded(q: &Var) -> Result<(), KernelError> {
    let (got, want) = ("recorded".into(), "attention to another layer's keys has no gradient".into());
    match q.tape() {
        None => Ok(()),
        Some(_) => Err(KernelError::Value { op: "attention", operand: "q", got, want }),
    }
}

/// Queries, normed and rotated as these keys of another layer are.
fn rotated(
    q: &Tensor,
    positions: &Tensor,
    (heads, keys): (&Heads<'_>, &Tensor),
) -> Result<Tensor, KernelError> {
    let norm = heads.norms.map(|[of_queries, _]| HeadNorm::new(of_queries, None));
    let rotation = HeadNorm::rotation(norm.as_ref(), heads.head_dim, heads.rope);
    let q = ops::rms_norm_rope(q, positions, &rotation)?;
    match keys.dtype() {
        DType::I8 => ops::hadamard_transform(&q),
        _ => Ok(q),
    }
}

/// The same for sequences with as many tokens each: a token of each, or tokens of one.
fn attention_of_part(
    cache: &mut KvCache,
    qkv: [&Tensor; 3],
    part: &PagedRows,
    heads: &Heads<'_>,
) -> Result<Tensor, KernelError> {
    let Heads { head_dim, norms, rope, .. } = *heads;
    let norms =
        norms.map_or([None, None], |norms| norms.each_ref().map(|norm| Some(HeadNorm::new(norm, None))));
    let rotations = norms.each_ref().map(|norm| HeadNorm::rotation(norm.as_ref(), head_dim, rope));
    let q = cache.append_paged(qkv, part, rotations.each_ref())?;
    attention_to_pages(cache, &q, part, heads)
}

/// The attention of queries that are normed and rotated.
fn attention_to_pages(
    cache: &KvCache,
    q: &Tensor,
    part: &PagedRows,
    heads: &Heads<'_>,
) -> Result<Tensor, KernelError> {
    let Heads { sinks, params, .. } = *heads;
    let pages = cache.pages(part);
    if q.dim(0) == pages.table.dim(0) {
        return ops::attention_paged(q, pages, &part.positions, sinks, &params);
    }
    let [table, places] = cache.pages_seen(part)?;
    let [keys, values] = [pages.keys, pages.values].map(|pages| ops::gather_pages(pages, &table));
    ops::attention(q, &keys?, &values?, &places, sinks, &params)
}

impl HeadNorm {
    fn new(norm: &RmsNorm, tape: Option<&Tape>) -> Self {
        let Named { value, .. } = norm.weight();
        let (weight, name) = tape.map_or_else(|| (value.clone(), None), |tape| tape.tensor(norm.weight()));
        Self { weight, name, eps: norm.parts().1 }
    }

    fn rotation<'a>(norm: Option<&'a Self>, head_dim: usize, rope: &'a Rope) -> RmsNormRope<'a> {
        RmsNormRope { head_dim, norm: norm.map(|norm| (&norm.weight, norm.eps)), rope }
    }
}
