//! Attention over a cache of 8 bits.

use super::attention_by;
#[cfg(test)]
use super::{cuda, policy::Choice, stream};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::ops::attention::{AttentionParams, policy};
use crate::ops::cache_rows::{CacheType, expand_cache};
use crate::{KernelError, Tensor};
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
use lowbit_formats::FloatType;
use std::f32::consts::LOG2_E;

/// See [`attention`](crate::ops::attention()); everything was checked, and q is of `dtype`.
pub(super) fn attention(
    gpu: &Gpu,
    dtype: FloatType,
    [q, k, v, positions]: [&Tensor; 4],
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    let value_width = CacheType::Int8.width(v.dim(2));
    let sizes = [q.dim(0) * q.dim(1) / k.dim(0), k.dim(0), k.dim(1), q.dim(2), value_width];
    if let Some(choice) = policy::choose_int8(dtype, sizes, params.scale * LOG2_E, gpu.target()) {
        return attention_by(gpu, [q, k, v, positions], sinks, params, |_| choice);
    }
    let [k, v] = [k, v].map(|x| expand_cache(x, dtype.dtype()));
    super::attention(gpu, [q, &k?, &v?, positions], sinks, params)
}

/// The type that keys, values and weights are rounded to, if any, for `sizes` as
/// [`policy::choose_int8`] takes them.
#[cfg(test)]
pub(in crate::ops::attention) fn rounded(
    gpu: &Gpu,
    dtype: FloatType,
    sizes: [usize; 5],
    params: &AttentionParams,
) -> Option<FloatType> {
    match policy::choose_int8(dtype, sizes, params.scale * LOG2_E, gpu.target()) {
        Some((Choice::Stream(_), _)) => None,
        _ => Some(dtype),
    }
}

/// The kernels over such caches for `target`, at sizes of layers.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let sizes = [
        (FloatType::F16, [4, 4, 4096, 256, 256]),
        (FloatType::BF16, [16, 4, 4096, 128, 128]),
        (FloatType::F16, [4, 8, 256, 64, 64]),
        (FloatType::BF16, [8, 4, 4096, 512, 512]),
        (FloatType::F32, [4, 8, 4096, 128, 128]),
        (FloatType::F32, [4, 8, 4096, 96, 80]),
    ];
    let choices = sizes.into_iter().filter_map(|(dtype, sizes)| {
        let (choice, _) = policy::choose_int8(dtype, sizes, 0.1, target)?;
        match choice {
            Choice::Stream(config) => Some(stream::compiled(target, config).code()),
            choice => cuda::code(target, choice),
        }
    });
    choices.collect()
}
