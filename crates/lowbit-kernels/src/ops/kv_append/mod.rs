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

/// `cache[h, positions[t], d] = x[t, h, d]`; of several tokens with one position the last counts.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | cache | `[Hkv, capacity, D]` | f32, f16, bf16 |
/// | x | `[T, Hkv, D]` | f32, f16, bf16 |
/// | positions | `[T]` | u32 |
///
/// x is rounded to the cache's dtype. A cache whose storage is shared is copied first. On a GPU a position that the
/// cache has no place for is written nowhere, and which of several tokens with one position counts is not fixed.
///
/// # Errors
/// [`KernelError::Shape`] for sizes that do not fit, [`KernelError::DType`] and [`KernelError::Value`] for other
/// dtypes, [`KernelError::Id`] for a position that the cache has no place for. The cache is then as it was.
pub fn kv_append(cache: &mut Tensor, x: &Tensor, positions: &Tensor) -> Result<(), KernelError> {
    let [heads, capacity, width] = CHECK.dims("cache", cache, "[Hkv, capacity, D]")?;
    let [tokens, ..] = CHECK.dims::<3>("x", x, "[T, Hkv, D]")?;
    CHECK.shape("x", x, &[tokens, heads, width], || format!("cache {:?}", cache.shape()))?;
    CHECK.shape("positions", positions, &[tokens], || format!("x {:?}", x.shape()))?;
    CHECK.ids("positions", positions, capacity)?;
    CHECK.float("cache", cache)?;
    CHECK.float("x", x)?;
    CHECK.same_device("cache", cache.device(), x.device())?;
    CHECK.same_device("positions", positions.device(), x.device())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::kv_append(gpu, cache, x, positions),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            cpu::kv_append(cpu, cache, &x.cast(cache.dtype())?, positions.as_slice()?);
            Ok(())
        }
    }
}
