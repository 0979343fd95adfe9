//! The norm and the rotation of query and key heads, alone and with their storing into a KV cache.

mod bench;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
#[cfg(test)]
mod int8_tests;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use gradient::{RmsNormRopeGradient, rms_norm_rope_backward};

use super::Check;
use super::cache_rows::{CacheType, encoded};
use super::hadamard_transform;
use super::kv_append;
#[cfg(feature = "gpu")]
use super::narrow;
use super::pages::{self, PagesMut};
use super::rope::{self, Direction, Rope};
use crate::{Device, KernelError, Tensor};

/// The norm and the rotation of query or key heads before attention.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormRope<'a> {
    /// D: the elements of a head.
    pub head_dim: usize,
    /// The weight `[D]` and the eps of RMSNorm, if the model norms heads.
    pub norm: Option<(&'a Tensor, f32)>,
    /// The rotation.
    pub rope: &'a Rope,
}

/// `y[t, h] = rope(rms_norm(x[t, h, ..D], weight, eps), positions[t])`, see
/// [`rms_norm()`](super::rms_norm()) and [`rope()`](super::rope()); without a norm
/// `rope(x[t, h, ..D])`. Columns of x from D on are ignored, so that x may be heads of
/// `[query | gate]`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[T, H, S]`, `S >= D` | f32, f16, bf16 |
/// | weight | `[D]`, `D >= rotary_dim` | f32, f16, bf16 |
/// | positions | `[T]` | u32 |
/// | y | `[T, H, D]` | x's |
///
/// All arithmetic is f32, rounded once to x's dtype. As with [`rope()`](super::rope()), a captured
/// pass must not be the first to rotate.
///
/// Source: vLLM 0.11 `fused_qk_norm_rope`; transformers 5.23 `Qwen3Attention`,
/// `Qwen3NextAttention`.
///
/// # Errors
/// [`KernelError::Shape`] for sizes that do not fit, [`KernelError::DType`] and
/// [`KernelError::Value`] for other dtypes and for an eps that is negative or not finite,
/// [`KernelError::Device`] for different devices.
pub fn rms_norm_rope(
    x: &Tensor,
    positions: &Tensor,
    params: &RmsNormRope<'_>,
) -> Result<Tensor, KernelError> {
    let check = Check("rms_norm_rope");
    params.check(check, x, positions)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(_) if params.norm.is_none() => {
            rope::rope(&narrow(x, 0, params.head_dim)?, positions, params.rope)
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, x, positions, params),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let wide = check.widened("x", x)?;
            let norm = match params.norm {
                Some((weight, eps)) => Some((check.widened("weight", weight)?, eps)),
                None => None,
            };
            let (x, to) = ((&wide, params.head_dim), x.dtype());
            rope::cpu::rope(cpu, x, positions.as_slice()?, norm, (params.rope, Direction::Forth))?.cast(to)
        }
    }
}

/// Everything between a projection and attention:
///
/// ```text
/// keys[h, places[t], :]   = rms_norm_rope(k, positions, new_keys)[t, h, :]
/// values[h, places[t], :] = v[t, h, :]
/// y                       = rms_norm_rope(q, positions, queries)
/// ```
/// with [`rms_norm_rope`], and [`kv_append()`](super::kv_append()) into each cache. Returns y.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | keys | `[Hkv, capacity, D]` | f32, f16, bf16, [8 bits](CacheType::Int8) |
/// | q | `[T, H, S]` | k's |
/// | values | `[Hkv, capacity, Dv]` | keys' |
/// | k | `[T, Hkv, D]` | f32, f16, bf16 |
/// | v | `[T, Hkv, Dv]` | k's |
/// | positions | `[T]` | u32 |
/// | places | `[T]` | u32 |
///
/// In caches of 8 bits, y and the new keys are these times
/// [`hadamard_transform()`](super::hadamard_transform()): their products stay as they are, and keys
/// lose less.
///
/// Places are the positions where a cache holds a text from its start, and fewer by as many as it
/// has forgotten ([`cache_places()`](super::cache_places())). New keys are rounded to the cache's
/// dtype, on the CPU to k's dtype first. A GPU needs one launch if q and k have the same head size
/// and rotation, and both or neither have a norm; else more.
///
/// Source: vLLM 0.11 `fused_qk_norm_rope`, `reshape_and_cache`.
///
/// # Errors
/// Those of the two ops. After an error the caches are unchanged.
pub fn rms_norm_rope_append(
    [keys, values]: [&mut Tensor; 2],
    [q, k, v]: [&Tensor; 3],
    [positions, places]: [&Tensor; 2],
    [queries, new_keys]: [&RmsNormRope<'_>; 2],
) -> Result<Tensor, KernelError> {
    let check = Check("rms_norm_rope_append");
    queries.check(check, q, positions)?;
    new_keys.check(check, k, positions)?;
    kv_append::check(check, ("keys", keys), ("k", k), places)?;
    let cache = CacheType::of(check, "keys", keys)?;
    let wanted = [keys.dim(0), keys.dim(1), cache.row(v.dim(-1))];
    check.shape("values", values, &wanted, || format!("keys {:?}", keys.shape()))?;
    kv_append::check(check, ("values", values), ("v", v), places)?;
    check.dtype("values", values, keys.dtype())?;
    for (operand, x) in [("q", q), ("v", v)] {
        check.dtype(operand, x, k.dtype())?;
        check.same_device(operand, x.device(), k.device())?;
    }
    match k.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let (into, at) = (([keys, values], None), [positions, places]);
            gpu::append::launch(check, gpu, into, [q, k, v], at, [queries, new_keys])
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let (q, [k, v]) = made(check, cache, [q, k, v], positions, [queries, new_keys])?;
            kv_append::store(keys, &k, places)?;
            kv_append::store(values, &v, places)?;
            Ok(q)
        }
    }
}

/// As [`rms_norm_rope_append`], into pages of a pool. With `place(t) = positions[t] % 64` and
/// `page(t) = table[t / (T / S), positions[t] / 64]`:
///
/// ```text
/// keys[page(t), h, place(t), :]   = rms_norm_rope(k, positions, new_keys)[t, h, :]
/// values[page(t), h, place(t), :] = v[t, h, :]
/// y                               = rms_norm_rope(q, positions, queries)
/// ```
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | pages | see [`Pages`](super::Pages); S divides T | the table u32 |
/// | q | `[T, H, S]` | k's |
/// | k | `[T, Hkv, D]` | f32, f16, bf16 |
/// | v | `[T, Hkv, Dv]` | k's |
/// | positions | `[T]` | u32 |
///
/// Of several tokens with the same place, one is stored, and any may be. On a GPU tokens at
/// positions beyond the table, or in pages beyond the pool, are not stored.
///
/// # Errors
/// Those of [`rms_norm_rope_append`], and [`KernelError::Id`] for a position beyond the table and
/// for a page beyond the pool. After an error the pages are unchanged.
pub fn rms_norm_rope_append_paged(
    pages: PagesMut<'_>,
    [q, k, v]: [&Tensor; 3],
    positions: &Tensor,
    [queries, new_keys]: [&RmsNormRope<'_>; 2],
) -> Result<Tensor, KernelError> {
    let check = Check("rms_norm_rope_append_paged");
    queries.check(check, q, positions)?;
    new_keys.check(check, k, positions)?;
    let shape = pages.as_pages().check(check, positions)?;
    let PagesMut { keys, values, table } = pages;
    for ((operand, x), (width, pool)) in
        [("k", k), ("v", v)].into_iter().zip(shape.widths.into_iter().zip([&*keys, &*values]))
    {
        check.shape(operand, x, &[positions.len(), shape.heads, width], || {
            format!("the pool {:?}", pool.shape())
        })?;
        check.float(operand, x)?;
    }
    check.same_device("keys", keys.device(), k.device())?;
    for (operand, x) in [("q", q), ("v", v)] {
        check.dtype(operand, x, k.dtype())?;
        check.same_device(operand, x.device(), k.device())?;
    }
    match k.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let into = ([keys, values], Some((table, shape.sizes(check)?)));
            gpu::append::launch(check, gpu, into, [q, k, v], [positions; 2], [queries, new_keys])
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let cache = CacheType::of(check, "keys", keys)?;
            let (q, [k, v]) = made(check, cache, [q, k, v], positions, [queries, new_keys])?;
            let places = shape.places(table.as_slice()?, positions.as_slice()?);
            pages::append(keys, &k, &places);
            pages::append(values, &v, &places);
            Ok(q)
        }
    }
}

/// On the CPU the normed and rotated q, and the new keys and values as `cached` holds them. All is
/// rounded before anything is stored: a number that does not fit is an error that leaves the caches
/// as they are.
fn made(
    check: Check,
    cached: CacheType,
    [q, k, v]: [&Tensor; 3],
    positions: &Tensor,
    [queries, new_keys]: [&RmsNormRope<'_>; 2],
) -> Result<(Tensor, [Tensor; 2]), KernelError> {
    let rotated = |x, params| {
        let y = rms_norm_rope(x, positions, params)?;
        if cached == CacheType::Int8 { hadamard_transform(&y) } else { Ok(y) }
    };
    let (q, k) = (rotated(q, queries)?, rotated(k, new_keys)?);
    let k = encoded(check, ("k", &k), cached)?;
    let v = encoded(check, ("v", v), cached)?;
    Ok((q, [k, v]))
}

impl RmsNormRope<'_> {
    /// True if one kernel can do both: the same head size and rotation, and a norm for both or
    /// neither.
    #[cfg(feature = "gpu")]
    fn is_like(&self, other: &Self) -> bool {
        self.head_dim == other.head_dim
            && std::ptr::eq(self.rope, other.rope)
            && self.norm.is_some() == other.norm.is_some()
    }

    /// Checks that heads `x` at `positions` can be normed and rotated.
    pub(super) fn check(&self, check: Check, x: &Tensor, positions: &Tensor) -> Result<(), KernelError> {
        let [_, _, columns] = check.dims("x", x, "[T, H, S]")?;
        if columns < self.head_dim {
            return Err(check.shape_error("x", x, format!("heads of {} are wanted", self.head_dim)));
        }
        self.rope.check(check, x, positions, self.head_dim)?;
        check.float("x", x)?;
        if let Some((weight, eps)) = self.norm {
            check.eps(eps)?;
            check.shape("weight", weight, &[self.head_dim], || format!("head_dim {}", self.head_dim))?;
            check.float("weight", weight)?;
            check.same_device("weight", weight.device(), x.device())?;
        }
        Ok(())
    }
}
