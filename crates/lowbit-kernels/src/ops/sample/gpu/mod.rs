//! Drawing on a GPU. Every step goes through each row's logits in slices, a plane per slice; all
//! rows go through a step in one launch:
//!
//! | step | kernel | file |
//! |---|---|---|
//! | 1. penalties, if any | `sample_penalise` | `slices.rs` |
//! | 2. the greatest logit of each slice | `sample_find_greatest` | `slices.rs` |
//! | 3. at temperature 0, the greatest of those is the token: done | `sample_take_greatest` | `draw.rs` |
//! | 4. for top-p and top-k, 8 passes that find the threshold of what is kept | `sample_narrow_threshold` | `search.rs` |
//! | 5. the sum of the weights that each slice keeps | `sample_sum_slices` | `slices.rs` |
//! | 6. a plane per row finds the slice that the random number falls into, and the id in it | `sample_pick` | `draw.rs` |
//!
//! The host chooses the launches by the batch's kind; a row's parameters are read from a tensor,
//! and a plane whose row does not need a step ends at once.
//!
//! A logit is compared by its [key](crate::gpu::key). Its weight is
//! `exp((logit - greatest) / temperature)` in units of 2^-40, an integer: sums of weights do not
//! depend on their order, so that a draw is the same on every device.

mod config;
mod draw;
mod search;
mod slices;

use super::{DecodeBatch, SampleKind};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::ops::Check;
use crate::{KernelError, Tensor};
use config::{Draw, SampleConfig, Sizes};
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
use lowbit_formats::FloatType;

/// The most logits: the sum of as many weights has 64 bits.
const MAX_LOGITS: usize = 1 << 24;

/// The most slices: one plane goes through them in the end.
const MAX_SLICES: usize = 512;

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let lanes = config::lanes(target);
    let filters = [(false, false), (false, true), (true, false), (true, true)];
    let mut kernels = Vec::new();
    for dtype in crate::ops::testing::FLOATS {
        let config = |(top_p, top_k)| SampleConfig { dtype, lanes, top_p, top_k };
        kernels.extend(slices::kernels(target, config((false, false))));
        for config in filters.map(config) {
            kernels.push(slices::sum_slices_compiled(target, config).code());
            kernels.push(draw::pick_compiled(target, config).code());
            if config.searches() {
                kernels.push(search::compiled(target, config).code());
            }
        }
    }
    kernels.push(draw::take_greatest_compiled(target, lanes).code());
    kernels
}

/// The most rows: a launch has so many cubes along y.
const MAX_ROWS: usize = 65_535;

/// Draws for the first rows of `batch`; everything but sizes was checked.
pub(super) fn sample(
    check: Check,
    gpu: &Gpu,
    logits: &Tensor,
    batch: &DecodeBatch,
    kind: SampleKind,
) -> Result<(), KernelError> {
    let len = logits.dim(-1);
    let rows = logits.len() / len;
    if len > MAX_LOGITS {
        return Err(check.value("logits", len, format!("{MAX_LOGITS} at most are wanted on a GPU")));
    }
    if rows > MAX_ROWS {
        return Err(check.value("rows", rows, format!("{MAX_ROWS} at most are wanted on a GPU")));
    }
    // All that kernels index with 32 bits.
    check.index(logits.len())?;
    batch.tensors().into_iter().try_for_each(|tensor| check.index(tensor.len()).map(drop))?;
    let config = SampleConfig::of(gpu.target(), FloatType::F32, kind);
    let slice = len.div_ceil(MAX_SLICES).next_multiple_of(config.lanes);
    let slices = len.div_ceil(slice);
    let [len, slice, cut] = [len, slice, slices].map(|n| check.index(n));
    let sizes = Sizes { len: len?, slice: slice?, slices: cut? };
    let greatest = gpu.allocate(8 * slices * rows)?;
    let mut draw = Draw { gpu, logits, rows, batch, config, sizes, greatest };
    draw.config.dtype = check.float("logits", logits)?;
    let penalised = if kind.penalises { draw.penalised()? } else { None };
    if let Some(penalised) = &penalised {
        draw = Draw { logits: penalised, config, ..draw };
    }
    draw.find_greatest()?;
    if !kind.draws {
        return draw.take_greatest();
    }
    let counters = draw.search()?;
    let sums = draw.sum_slices(&counters)?;
    draw.pick(&counters, &sums)
}
