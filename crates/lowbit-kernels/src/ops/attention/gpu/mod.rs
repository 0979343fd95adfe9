//! Attention on a GPU.
//!
//! | file | holds |
//! |---|---|
//! | `stream.rs` | any types and sizes: keys and values go through registers |
//! | `combine.rs` | one result where several cubes shared a row's keys |

mod combine;
mod stream;

use super::{AttentionParams, CHECK, policy};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::with_storage;
use crate::gpu::{Dispatch, Gpu};
use crate::{Device, KernelError, Tensor};
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

pub(crate) use stream::Shape;

/// Cubes a dimension: Vulkan promises no more.
const CUBES: u32 = 65535;

/// The kernel for `shape`, its types chosen by what the buffers store.
fn stream_kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start((shape.plane * shape.planes) as u32);
    macro_rules! typed {
        ($q:ty, $k:ty, $y:ty, $vector:expr) => {
            Box::new(stream::stream::Stream::<$q, $k, $y>::new(
                settings,
                properties,
                registers,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                (),
                (),
                (),
                $vector,
                shape,
            ))
        };
    }
    with_storage!(shape.dtype, Q => match (shape.wide, shape.cache.size(), shape.split) {
        (true, _, true) => typed!(Q, u32, u32, 4),
        (true, _, false) => typed!(Q, u32, Q, 4),
        (false, 4, true) => typed!(Q, u32, u32, 1),
        (false, 4, false) => typed!(Q, u32, Q, 1),
        (false, _, true) => typed!(Q, u16, u32, 1),
        (false, _, false) => typed!(Q, u16, Q, 1),
    })
}

fn combine_kernel(target: &Target, width: usize, dtype: FloatType) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(dtype, Y => Box::new(combine::combine::Combine::<Y>::new(
        settings, properties, registers, buffer(), buffer(), (), (), width, dtype,
    )))
}

/// Every kernel of the op for `target`, at sizes of layers.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let mut kernels: Vec<_> = floats.iter().map(|&dtype| combine_kernel(target, 128, dtype)).collect();
    let mut push = |dtype, cache, sizes| {
        let (shape, _) = policy::stream([dtype, cache], sizes, target.plane());
        kernels.push(stream_kernel(target, shape));
    };
    for (i, dtype) in floats.into_iter().enumerate() {
        // A step of Llama-3-8B's, and an odd size with a cache of another type.
        push(dtype, dtype, [4, 8, 4096, 128, 128]);
        push(dtype, floats[(i + 1) % 3], [7, 2, 64, 13, 13]);
    }
    // A prompt.
    push(FloatType::F32, FloatType::BF16, [2048, 8, 4096, 128, 128]);
    kernels
}

/// See [`super::attention`]; everything was checked.
pub(super) fn attention(
    gpu: &Gpu,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    positions: &Tensor,
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    let (dtype, cache) = (CHECK.float("q", q)?, CHECK.float("k", k)?);
    let (tokens, query_heads, width) = (q.dim(0), q.dim(1), q.dim(2));
    let (heads, capacity, value_width) = (k.dim(0), k.dim(1), v.dim(2));
    let device = Device::Gpu(gpu.clone());
    let y = Tensor::allocate(&[tokens, query_heads, value_width], dtype.dtype(), &device)?;
    if y.is_empty() {
        return Ok(y);
    }
    for x in [q, k, v, &y] {
        CHECK.index(x.len())?;
    }
    let group = query_heads / heads;
    let rows = tokens * group;
    let target = gpu.target();
    let sizes = [rows, heads, capacity, width, value_width];
    let (shape, splits) = policy::stream([dtype, cache], sizes, target.plane());
    let parts = match shape.split {
        false => None,
        true => {
            Some(Tensor::allocate(&[splits, tokens * query_heads, value_width + 2], DType::F32, &device)?)
        }
    };
    let blocks = CHECK.index(rows.div_ceil(shape.rows))?;
    let scalars = [rows, group, capacity].map(|size| CHECK.index(size));
    let mut scalars = scalars.into_iter().collect::<Result<Vec<_>, _>>()?;
    let window = params.sliding_window.map_or(u32::MAX, |window| window.try_into().unwrap_or(u32::MAX));
    scalars.extend([window, params.scale.to_bits()]);
    for first in (0..blocks).step_by(CUBES as usize) {
        let out = parts.as_ref().unwrap_or(&y);
        gpu.launch(Dispatch {
            kernel: stream_kernel(target, shape),
            cubes: [(blocks - first).min(CUBES), CHECK.index(heads)?, CHECK.index(splits)?],
            buffers: vec![q.memory()?, k.memory()?, v.memory()?, positions.memory()?, out.memory()?],
            scalars: [&scalars[..], &[first]].concat(),
        })?;
    }
    if let Some(parts) = &parts {
        CHECK.index(parts.len())?;
        gpu.launch(Dispatch {
            kernel: combine_kernel(target, value_width, dtype),
            cubes: cubes(y.len()),
            buffers: vec![parts.memory()?, y.memory()?],
            scalars: vec![CHECK.index(tokens * query_heads)?, CHECK.index(splits)?],
        })?;
    }
    Ok(y)
}
