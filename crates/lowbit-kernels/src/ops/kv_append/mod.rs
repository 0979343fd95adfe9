//! Writing keys or values into a cache.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
#[cfg(test)]
mod tests;

use super::Check;
use super::cache_rows::{CacheType, encoded};
use super::pages::{self, Pages};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("kv_append");

/// `cache[h, positions[t], d] = x[t, h, d]`; if several tokens have the same position, the last one
/// is stored.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | cache | `[Hkv, capacity, D]` | f32, f16, bf16, [8 bits](CacheType::Int8) |
/// | x | `[T, Hkv, D]` | f32, f16, bf16, or rows of 8 bits for a cache of such |
/// | positions | `[T]` | u32 |
///
/// x is rounded to the cache's type, as [`CacheType::Int8`] says to 8 bits; rows of 8 bits, which
/// [`kv_gather()`](super::kv_gather()) takes out of a cache, are copied. On the CPU a finite number
/// that would round to infinity is an error: one key that is infinite makes all later tokens'
/// attention NaN, and one that is cut to the greatest finite number makes it wrong. (A GPU rounds
/// it to infinity, since the host does not wait for its launches; sampling reports what comes of
/// that.) A cache whose storage is shared is copied first. On a GPU, tokens at positions beyond the
/// capacity are not stored, and which of several tokens with the same position is stored is
/// undefined.
///
/// # Errors
/// [`KernelError::Shape`] for sizes that do not fit, [`KernelError::DType`] and
/// [`KernelError::Value`] for other dtypes, [`KernelError::Id`] for a position beyond the capacity,
/// [`KernelError::Value`] for a number beyond the cache's dtype. After an error the cache is
/// unchanged.
pub fn kv_append(cache: &mut Tensor, x: &Tensor, positions: &Tensor) -> Result<(), KernelError> {
    match x.dtype() {
        DType::I8 => check_rows(CHECK, ("cache", cache), ("x", x), positions)?,
        _ => check(CHECK, ("cache", cache), ("x", x), positions)?,
    }
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(gpu, cache, x, positions, None),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let encoded = match x.dtype() {
                DType::I8 => x.clone(),
                _ => encoded(CHECK, ("x", x), CacheType::of(CHECK, "cache", cache)?)?,
            };
            cpu::kv_append(cpu, cache, &encoded, positions.as_slice()?);
            Ok(())
        }
    }
}

/// Writes rows `x`, `[T, Hkv, row]` of the cache's own type on the CPU, to `positions`; everything
/// was checked.
pub(super) fn store(cache: &mut Tensor, x: &Tensor, positions: &Tensor) -> Result<(), KernelError> {
    let cpu = x.device().as_cpu(CHECK.0)?.clone();
    cpu::kv_append(&cpu, cache, x, positions.as_slice()?);
    Ok(())
}

/// As [`kv_append`], into pages of a pool: with `place(t) = positions[t] % 64` and
/// `page(t) = table[t / (T / S), positions[t] / 64]`,
/// `pages[page(t), h, place(t), d] = x[t, h, d]`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | pages | `[P, Hkv, 64, D]` | f32, f16, bf16, [8 bits](CacheType::Int8) |
/// | table | `[S, N]`, S divides T | u32 |
/// | x | `[T, Hkv, D]` | f32, f16, bf16 |
/// | positions | `[T]` | u32 |
///
/// On a GPU tokens at positions beyond the table, or in pages beyond the pool, are not stored.
///
/// # Errors
/// Those of [`kv_append`], and [`KernelError::Id`] for a position beyond the table and for a page
/// beyond the pool. After an error the pages are unchanged.
pub fn kv_append_paged(
    pages: &mut Tensor,
    table: &Tensor,
    x: &Tensor,
    positions: &Tensor,
) -> Result<(), KernelError> {
    let check = Check("kv_append_paged");
    let shape = Pages { keys: pages, values: pages, table }.check(check, positions)?;
    let wanted = [positions.len(), shape.heads, shape.widths[0]];
    check.shape("x", x, &wanted, || format!("the pool {:?}", pages.shape()))?;
    check.float("x", x)?;
    check.same_device("x", x.device(), pages.device())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(gpu, pages, x, positions, Some((table, shape.sizes(check)?))),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let x = encoded(check, ("x", x), CacheType::of(check, "pages", pages)?)?;
            let places = shape.places(table.as_slice()?, positions.as_slice()?);
            pages::append(pages, &x, &places);
            Ok(())
        }
    }
}

/// Checks that rows of `x` can be stored at `positions` of `cache`; the names are those of the
/// operands in errors.
pub(super) fn check(
    check: Check,
    (cache_name, cache): (&'static str, &Tensor),
    (name, x): (&'static str, &Tensor),
    positions: &Tensor,
) -> Result<(), KernelError> {
    let [_, _, row] = check.dims(cache_name, cache, "[Hkv, capacity, D]")?;
    let width = CacheType::of(check, cache_name, cache)?.width(row);
    check_places(check, (cache_name, cache), (name, x), (width, positions))?;
    check.float(name, x).map(drop)
}

/// The same for `x` of the cache's own rows of integers.
fn check_rows(
    check: Check,
    (cache_name, cache): (&'static str, &Tensor),
    (name, x): (&'static str, &Tensor),
    positions: &Tensor,
) -> Result<(), KernelError> {
    let [_, _, row] = check.dims(cache_name, cache, "[Hkv, capacity, D]")?;
    check.dtype(name, x, cache.dtype())?;
    CacheType::of(check, cache_name, cache)?;
    check_places(check, (cache_name, cache), (name, x), (row, positions))
}

/// Checks all but the type of `x`, whose rows are to have `width` elements.
fn check_places(
    check: Check,
    (cache_name, cache): (&'static str, &Tensor),
    (name, x): (&'static str, &Tensor),
    (width, positions): (usize, &Tensor),
) -> Result<(), KernelError> {
    let (heads, capacity) = (cache.dim(0), cache.dim(1));
    let [tokens, ..] = check.dims::<3>(name, x, "[T, Hkv, D]")?;
    check.shape(name, x, &[tokens, heads, width], || format!("{cache_name} {:?}", cache.shape()))?;
    check.shape("positions", positions, &[tokens], || format!("{name} {:?}", x.shape()))?;
    check.ids("positions", positions, capacity)?;
    check.same_device(cache_name, cache.device(), x.device())?;
    check.same_device("positions", positions.device(), x.device())
}
