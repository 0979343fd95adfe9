//! Reading keys or values out of a cache.

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use super::Check;
use super::cache_rows::CacheType;
use crate::{Device, KernelError, Tensor};

const CHECK: Check = Check("kv_gather");

/// `y[t, h, d] = cache[h, positions[t], d]`: the inverse of [`kv_append()`](super::kv_append()),
/// and what takes the gradients of new keys and values out of those of a whole cache.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `cache` | `[Hkv, capacity, D]` | f32, f16, bf16, [8 bits](CacheType::Int8) |
/// | `positions` | `[T]` | u32 |
/// | `y` | `[T, Hkv, D]` | that of `cache` |
///
/// Rows are copied bit for bit, those of 8 bits with their scales: D is then their length.
/// Positions may come more than once.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that are
/// not as the table says; [`KernelError::Device`] for operands on two devices; [`KernelError::Id`]
/// for a position beyond the capacity, which on a GPU is no error: its rows of y are NaN.
pub fn kv_gather(cache: &Tensor, positions: &Tensor) -> Result<Tensor, KernelError> {
    let [heads, capacity, width] = CHECK.dims("cache", cache, "[Hkv, capacity, D]")?;
    let [tokens] = CHECK.dims("positions", positions, "[T]")?;
    CacheType::of(CHECK, "cache", cache)?;
    CHECK.ids("positions", positions, capacity)?;
    CHECK.same_device("positions", positions.device(), cache.device())?;
    let mut y = Tensor::allocate(&[tokens, heads, width], cache.dtype(), cache.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    match cache.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(gpu, (cache, CacheType::of(CHECK, "cache", cache)?), positions, &y)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (row, positions) = (width * cache.dtype().size(), positions.as_slice::<u32>()?);
            let cached = cache.bytes();
            cpu.for_each_rows(y.bytes_mut(), row, row / 8, |first, y| {
                for (i, y) in (first..).zip(y.chunks_exact_mut(row)) {
                    let at = i % heads * capacity + positions[i / heads] as usize;
                    y.copy_from_slice(&cached[at * row..][..row]);
                }
            });
        }
    }
    Ok(y)
}
