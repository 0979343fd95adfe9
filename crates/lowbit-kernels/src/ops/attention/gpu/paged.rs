//! Attention over pages of a pool: rows of each token alone, whose keys are summed in parts
//! (`parts.rs`) and combined.

use super::operands::Softcap;
use super::parts::PARTS;
use super::{Call, stream};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::ops::Check;
use crate::ops::attention::policy::{self, Choice};
use crate::ops::attention::{AttentionParams, cuda};
use crate::ops::cache_rows::CacheType;
use crate::ops::pages::{PAGE_TOKENS, Pages, PoolShape};
use crate::{Device, KernelError, Tensor};
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
use lowbit_formats::FloatType;
use std::f32::consts::LOG2_E;

/// See [`attention_paged`](crate::ops::attention_paged()); everything was checked.
pub(in crate::ops::attention) fn attention_paged(
    check: Check,
    gpu: &Gpu,
    (q, pages, positions): (&Tensor, Pages<'_>, &Tensor),
    shape: &PoolShape,
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    let Pages { keys, values, table } = pages;
    let (tokens, query_heads, dtype) = (q.dim(0), q.dim(1), check.float("q", q)?);
    let device = Device::Gpu(gpu.clone());
    let y = Tensor::allocate(&[tokens, query_heads, shape.widths[1]], dtype.dtype(), &device)?;
    if y.is_empty() {
        return Ok(y);
    }
    for x in [q, keys, values, &y] {
        check.index(x.len())?;
    }
    let call = Call {
        gpu,
        operands: [q, keys, values, positions],
        sinks,
        y: &y,
        params,
        group: query_heads / shape.heads,
        heads: shape.heads,
        capacity: shape.columns * PAGE_TOKENS,
        table: Some((table, shape.sizes(check)?)),
    };
    let dtypes = (dtype, CacheType::of(check, "keys", keys)?);
    let [width, value_width] = shape.widths;
    let sizes = [call.group, shape.heads, tokens, width, value_width];
    let (kernel, cubes) = policy::choose_paged(dtypes, sizes, params.scale * LOG2_E, gpu.target());
    call.run(PARTS, |out| match kernel.with_softcap(Softcap::of(params)) {
        Choice::Step(config) => cuda::launch_step(&call, config, cubes, out),
        Choice::Stream(config) => stream::launch(&call, config, cubes, out),
        Choice::Tile(_) | Choice::Wgmma(_) | Choice::CmmaTile(_) => unreachable!("they take no pages"),
    })?;
    Ok(y)
}

/// The type that the weights are rounded to, if any, for the `sizes` that [`policy::choose_paged`]
/// takes.
pub(in crate::ops::attention) fn rounded_paged(
    gpu: &Gpu,
    dtypes: (FloatType, CacheType),
    sizes: [usize; 5],
    params: &AttentionParams,
) -> Option<FloatType> {
    match policy::choose_paged(dtypes, sizes, params.scale * LOG2_E, gpu.target()).0 {
        Choice::Stream(_) => None,
        _ => Some(dtypes.0),
    }
}

/// The kernels over pages for `target`, at sizes of layers.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let [f32, f16, bf16] = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let combine = policy::combine_config(128, f16, PARTS, target.plane()).in_pages(true);
    let mut kernels = vec![super::combine::compiled(target, combine).code()];
    let of = CacheType::Float;
    let sizes = [
        ((f16, of(f16)), [4, 4, 16, 256, 256]),
        ((f16, of(f16)), [8, 2, 1, 128, 128]),
        ((bf16, of(bf16)), [16, 1, 64, 64, 64]),
        ((f32, of(f32)), [4, 4, 16, 128, 128]),
        ((f32, of(f16)), [3, 2, 1, 13, 13]),
        ((f16, CacheType::Int8), [4, 4, 16, 256, 256]),
        ((bf16, CacheType::Int8), [16, 1, 64, 64, 64]),
        ((f32, CacheType::Int8), [4, 4, 16, 128, 128]),
    ];
    for (dtypes, sizes) in sizes {
        kernels.push(match policy::choose_paged(dtypes, sizes, 0.1, target).0 {
            Choice::Stream(config) => stream::compiled(target, config).code(),
            choice => cuda::code(target, choice).expect("a kernel of CUDA's own"),
        });
    }
    kernels
}
