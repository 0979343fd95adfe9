//! The places of tokens in a cache that has forgotten the start of its text.

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("cache_places");

/// `y[t] = positions[t] - first[0]`: the rows of tokens in a cache whose first row is of position
/// `first[0]`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | positions | `[T]` | u32 |
/// | first | `[1]` | u32 |
/// | y | `[T]` | u32 |
///
/// Both are on the device, so that a captured pass replays after the cache has moved on. On a GPU a
/// position before `first` wraps around: its place is beyond any capacity.
///
/// # Errors
/// [`KernelError::Shape`] and [`KernelError::DType`] for operands that are not as the table says;
/// [`KernelError::Device`] for operands on two devices; on a CPU [`KernelError::Value`] for a
/// position before `first`.
pub fn cache_places(positions: &Tensor, first: &Tensor) -> Result<Tensor, KernelError> {
    let [tokens] = CHECK.dims("positions", positions, "[T]")?;
    CHECK.dtype("positions", positions, DType::U32)?;
    CHECK.shape("first", first, &[1], || "one position".into())?;
    CHECK.dtype("first", first, DType::U32)?;
    CHECK.same_device("first", first.device(), positions.device())?;
    match positions.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let y = Tensor::allocate(&[tokens], DType::U32, positions.device())?;
            gpu::launch(gpu, positions, first, &y)?;
            Ok(y)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let first = first.as_slice::<u32>()?[0];
            let place = |&position: &u32| {
                let want = || format!("the cache begins with position {first}");
                position.checked_sub(first).ok_or_else(|| CHECK.value("positions", position, want()))
            };
            let places = positions.as_slice::<u32>()?.iter().map(place);
            Tensor::new(&places.collect::<Result<Vec<_>, _>>()?, &[tokens], positions.device())
        }
    }
}
