//! Drawing on a GPU. Every step goes through the logits in slices, a plane per slice:
//!
//! | step | kernel | file |
//! |---|---|---|
//! | 1. penalties, if any | `sample_penalise` | `slices.rs` |
//! | 2. the greatest logit of each slice | `sample_find_greatest` | `slices.rs` |
//! | 3. at temperature 0, the greatest of those is the token: done | `sample_take_greatest` | `draw.rs` |
//! | 4. for top-p and top-k, keys and weights of all logits, and 8 passes that find the threshold of what is kept | `sample_weigh`, `sample_narrow_threshold` | `slices.rs`, `search.rs` |
//! | 5. the sum of the weights that each slice keeps | `sample_sum_slices` | `slices.rs` |
//! | 6. one plane finds the slice that the random number falls into, and the id in it | `sample_pick` | `draw.rs` |
//!
//! A logit is compared by its [key](crate::gpu::key). Its weight is
//! `exp((logit - greatest) / temperature)` in units of 2^-40, an integer: sums of weights do not
//! depend on their order, so that a draw is the same on every device.

mod config;
mod draw;
mod search;
mod slices;

use super::{DecodeState, SampleParams};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use config::{Draw, SampleConfig, Sizes};
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
#[cfg(test)]
use lowbit_formats::FloatType;

/// The most logits: the sum of as many weights has 64 bits.
const MAX_LOGITS: usize = 1 << 24;

/// The most slices: one plane goes through them in the end.
const MAX_SLICES: usize = 512;

#[cfg(test)]
inventory::submit!(crate::gpu::tests::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let lanes = config::lanes(target);
    let filters = [(false, false), (false, true), (true, false), (true, true)];
    let mut kernels = Vec::new();
    for dtype in crate::ops::testing::FLOATS {
        let config = |(top_p, top_k)| SampleConfig { dtype, lanes, top_p, top_k };
        kernels.extend(slices::kernels(target, config((true, true))));
        kernels.push(draw::take_greatest_compiled(target, config((false, false))).code());
    }
    for (top_p, top_k) in filters {
        let config = SampleConfig { dtype: FloatType::F32, lanes, top_p, top_k };
        kernels.push(slices::sum_slices_compiled(target, config).code());
        kernels.push(draw::pick_compiled(target, config).code());
        if config.searches() {
            kernels.push(search::compiled(target, config).code());
        }
    }
    kernels
}

/// See [`super::sample_next`]; everything was checked.
pub(super) fn sample_next(
    check: Check,
    gpu: &Gpu,
    logits: &Tensor,
    state: &DecodeState,
    params: &SampleParams,
) -> Result<(), KernelError> {
    if logits.len() > MAX_LOGITS {
        let want = format!("{MAX_LOGITS} at most are wanted on a GPU");
        return Err(check.value("logits", logits.len(), want));
    }
    let [_, _, _, history] = state.tensors();
    let penalised = slices::penalised(check, gpu, logits, history, params)?;
    let logits = penalised.as_ref().unwrap_or(logits);
    let config = SampleConfig::of(gpu.target(), check.float("logits", logits)?, params, logits.len());
    let slice = logits.len().div_ceil(MAX_SLICES).next_multiple_of(config.lanes);
    let slices = logits.len().div_ceil(slice);
    let greatest = gpu.allocate(8 * slices)?;
    let [len, slice, slices] = [logits.len(), slice, slices].map(|n| check.index(n));
    let sizes = Sizes { len: len?, slice: slice?, slices: slices? };
    let draw = Draw { gpu, logits, config, sizes, params, greatest };
    draw.find_greatest()?;
    if params.temperature == 0.0 {
        return draw.take_greatest(state);
    }
    let counters = draw.search()?;
    let sums = draw.sum_slices(&counters)?;
    draw.pick(&counters, &sums, state)
}
