//! Writing keys or values into a cache.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
#[cfg(test)]
mod tests;

use super::check::Check;
use crate::{Device, KernelError, Tensor};

const CHECK: Check = Check("kv_append");

/// `cache[h, positions[t], d] = x[t, h, d]`; if several tokens have the same position, the last one is stored.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | cache | `[Hkv, capacity, D]` | f32, f16, bf16 |
/// | x | `[T, Hkv, D]` | f32, f16, bf16 |
/// | positions | `[T]` | u32 |
///
/// x is rounded to the cache's dtype. A cache whose storage is shared is copied first. On a GPU, tokens at positions
/// beyond the capacity are not stored, and which of several tokens with the same position is stored is undefined.
///
/// # Errors
/// [`KernelError::Shape`] for sizes that do not fit, [`KernelError::DType`] and [`KernelError::Value`] for other
/// dtypes, [`KernelError::Id`] for a position beyond the capacity. After an error the cache is unchanged.
pub fn kv_append(cache: &mut Tensor, x: &Tensor, positions: &Tensor) -> Result<(), KernelError> {
    check(CHECK, ("cache", cache), ("x", x), positions)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(gpu, cache, x, positions),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            cpu::kv_append(cpu, cache, &x.cast(cache.dtype())?, positions.as_slice()?);
            Ok(())
        }
    }
}

/// Checks that rows of `x` can be stored at `positions` of `cache`; the names are those of the operands in errors.
pub(super) fn check(
    check: Check,
    (cache_name, cache): (&'static str, &Tensor),
    (name, x): (&'static str, &Tensor),
    positions: &Tensor,
) -> Result<(), KernelError> {
    let [heads, capacity, width] = check.dims(cache_name, cache, "[Hkv, capacity, D]")?;
    let [tokens, ..] = check.dims::<3>(name, x, "[T, Hkv, D]")?;
    check.shape(name, x, &[tokens, heads, width], || format!("{cache_name} {:?}", cache.shape()))?;
    check.shape("positions", positions, &[tokens], || format!("{name} {:?}", x.shape()))?;
    check.ids("positions", positions, capacity)?;
    check.float(cache_name, cache)?;
    check.float(name, x)?;
    check.same_device(cache_name, cache.device(), x.device())?;
    check.same_device("positions", positions.device(), x.device())
}
