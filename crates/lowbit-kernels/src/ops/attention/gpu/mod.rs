//! Attention on a GPU.
//!
//! | file | holds |
//! |---|---|
//! | `stream.rs` | any types and sizes: keys and values go through registers |
//! | `tile.rs`, `ptx.rs` | 16-bit floats on CUDA's tensor cores |
//! | `combine.rs` | one result where several cubes shared a row's keys |

mod combine;
mod ptx;
mod stream;
mod tile;

use super::{AttentionParams, CHECK, policy};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::with_storage;
use crate::gpu::rows::cubes;
use crate::gpu::{CUBES, Dispatch, Gpu};
use crate::{Device, KernelError, Tensor};
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};
use std::f32::consts::LOG2_E;

pub(crate) use combine::Shape as Combination;
pub(crate) use stream::Shape;
pub(crate) use tile::{STEEPEST, Tile};

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

fn tile_kernel(target: &Target, shape: Tile) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.units() as u32);
    Box::new(tile::tiled::Tiled::new(
        settings,
        properties,
        registers,
        buffer(),
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
        shape,
    ))
}

fn combine_kernel(target: &Target, shape: Combination) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.units() as u32);
    with_storage!(shape.dtype, Y => Box::new(combine::combine::Combine::<Y>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), (), (), shape.vector(), shape,
    )))
}

/// Every kernel of the op for `target`, at sizes of layers.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let combine = |(&dtype, width)| combine_kernel(target, policy::combine(width, dtype, target.plane()));
    let mut kernels: Vec<_> = floats.iter().zip([128, 256, 13]).map(combine).collect();
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
    // Prompts of Llama-3-8B, Qwen3.5-9B and others, long and short, and steps after many and few tokens.
    let sizes = [
        (8192, 4096, 128),
        (8192, 4096, 256),
        (4096, 4096, 64),
        (40, 4096, 80),
        (4, 4096, 128),
        (4, 256, 256),
    ];
    for (rows, capacity, width) in sizes {
        let dtype = if rows < 8192 { FloatType::F16 } else { FloatType::BF16 };
        let tile = policy::tile([dtype; 2], [rows, 4, capacity, width, width], 0.1, target);
        kernels.extend(tile.map(|(shape, _)| tile_kernel(target, shape)));
    }
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
    let call = Call { gpu, operands: [q, k, v, positions], y: &y, params, group };
    let sizes = [rows, heads, capacity, width, value_width];
    let steepness = params.scale * LOG2_E;
    if let Some((shape, splits)) = policy::tile([dtype, cache], sizes, steepness, gpu.target()) {
        let blocks = CHECK.index(rows.div_ceil(shape.rows()))?;
        let cubes = [CHECK.index(heads)?, blocks, CHECK.index(splits)?];
        call.run(splits, |out| {
            call.launch(tile_kernel(gpu.target(), shape), cubes, out, &[steepness.to_bits()])
        })?;
        return Ok(y);
    }
    let (shape, splits) = policy::stream([dtype, cache], sizes, gpu.target().plane());
    let blocks = CHECK.index(rows.div_ceil(shape.rows))?;
    let (heads, parts) = (CHECK.index(heads)?, CHECK.index(splits)?);
    call.run(splits, |out| {
        (0..blocks).step_by(CUBES).try_for_each(|first| {
            let cubes = [(blocks - first).min(CUBES as u32), heads, parts];
            call.launch(stream_kernel(gpu.target(), shape), cubes, out, &[params.scale.to_bits(), first])
        })
    })?;
    Ok(y)
}

/// The type that the weights of an attention are rounded to, if any. `sizes` are those of the reference.
pub(crate) fn rounded(
    gpu: &Gpu,
    dtypes: [FloatType; 2],
    sizes: [usize; 5],
    tokens: usize,
    params: &AttentionParams,
) -> Option<FloatType> {
    let [query_heads, heads, capacity, width, value_width] = sizes;
    let sizes = [tokens * query_heads / heads, heads, capacity, width, value_width];
    policy::tile(dtypes, sizes, params.scale * LOG2_E, gpu.target()).map(|(shape, _)| shape.dtype)
}

/// The operands of an attention that was checked.
#[derive(Clone, Copy)]
struct Call<'a> {
    gpu: &'a Gpu,
    /// q, k, v and positions.
    operands: [&'a Tensor; 4],
    y: &'a Tensor,
    params: &'a AttentionParams,
    /// Query heads that read one key head.
    group: usize,
}

impl Call<'_> {
    /// Has `launch` write y, or the parts of it where `splits` cubes share the keys, which are then combined.
    fn run(
        self,
        splits: usize,
        launch: impl Fn([&Tensor; 2]) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        if splits == 1 {
            // Nothing is written to the second.
            return launch([self.y, self.y]);
        }
        let (rows, width) = (self.y.dim(0) * self.y.dim(1), self.y.dim(2));
        let parts = Tensor::allocate(&[splits, rows, width], DType::F32, self.y.device())?;
        let scales = Tensor::allocate(&[rows, splits, 2], DType::F32, self.y.device())?;
        CHECK.index(parts.len())?;
        launch([&parts, &scales])?;
        let (target, dtype) = (self.gpu.target(), CHECK.float("q", self.y)?);
        let count = CHECK.index(rows)?;
        self.gpu.launch(Dispatch {
            kernel: combine_kernel(target, policy::combine(width, dtype, target.plane())),
            cubes: cubes(rows),
            buffers: vec![parts.memory()?, scales.memory()?, self.y.memory()?],
            scalars: vec![count, CHECK.index(splits)?],
        })
    }

    /// A launch of a kernel with the arguments that all begin with, and `more`.
    fn launch(
        self,
        kernel: Box<dyn CubeKernel>,
        cubes: [u32; 3],
        [out, scales]: [&Tensor; 2],
        more: &[u32],
    ) -> Result<(), KernelError> {
        let [q, k, v, positions] = self.operands;
        let rows = CHECK.index(q.dim(0) * self.group)?;
        let window =
            self.params.sliding_window.map_or(u32::MAX, |window| window.try_into().unwrap_or(u32::MAX));
        let sizes = [rows, CHECK.index(self.group)?, CHECK.index(k.dim(1))?, window];
        self.gpu.launch(Dispatch {
            kernel,
            cubes,
            buffers: vec![
                q.memory()?,
                k.memory()?,
                v.memory()?,
                positions.memory()?,
                out.memory()?,
                scales.memory()?,
            ],
            scalars: [&sizes[..], more].concat(),
        })
    }
}
