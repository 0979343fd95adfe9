//! Writing keys or values into a cache.

mod bench;
mod cpu;
#[cfg(test)]
mod tests;

use super::check::Check;
use crate::{Device, KernelError, Tensor};

/// `cache[h, positions[t], d] = x[t, h, d]`; of several tokens with one position the last counts.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | cache | `[Hkv, capacity, D]` | f32, f16, bf16 |
/// | x | `[T, Hkv, D]` | f32, f16, bf16 |
/// | positions | `[T]` | u32 |
///
/// x is rounded to the cache's dtype. A cache whose storage is shared is copied first.
///
/// # Errors
/// [`KernelError::Shape`] for sizes that do not fit, [`KernelError::DType`] and [`KernelError::Value`] for other
/// dtypes, [`KernelError::Id`] for a position that the cache has no place for. The cache is then as it was.
pub fn kv_append(cache: &mut Tensor, x: &Tensor, positions: &Tensor) -> Result<(), KernelError> {
    let check = Check("kv_append");
    let [heads, capacity, width] = check.dims("cache", cache, "[Hkv, capacity, D]")?;
    let [tokens, ..] = check.dims::<3>("x", x, "[T, Hkv, D]")?;
    check.shape("x", x, &[tokens, heads, width], || format!("cache {:?}", cache.shape()))?;
    check.shape("positions", positions, &[tokens], || format!("x {:?}", x.shape()))?;
    check.ids("positions", positions, capacity)?;
    check.float("cache", cache)?;
    check.float("x", x)?;
    let x = x.cast(cache.dtype())?;
    match x.device() {
        Device::Gpu(gpu) => return Err(check.unsupported(gpu)),
        Device::Cpu(cpu) => cpu::kv_append(cpu, cache, &x, positions.as_slice()?),
    }
    Ok(())
}
