//! Attention on a GPU.
//!
//! | file | holds |
//! |---|---|
//! | `stream.rs` | the kernel for any types and sizes: keys and values go through registers |
//! | `cmma_tile/` | the kernel for many query rows of 16-bit floats on cooperative matrices |
//! | `../cuda/` | the kernel for 16-bit floats on NVIDIA's tensor cores |
//! | `combine.rs` | the kernel that makes one result of a row whose keys several cubes shared |
//! | `int8.rs` | caches of 8 bits: the choice, or their expansion for kernels of floats |
//! | `paged.rs`, `parts.rs` | keys in pages: the call, and the parts that a row's keys are summed in |
//! | `operands.rs` | the operands that the kernels over keys have in common |

mod cmma_tile;
mod combine;
mod int8;
pub(super) mod operands;
mod paged;
pub(super) mod parts;
mod stream;

use super::{AttentionParams, CHECK, cuda, policy};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::ops::cache_rows::CacheType;
use crate::ops::pages::gpu::{PoolSizes, Table};
use crate::{Device, KernelError, Tensor};
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
use lowbit_formats::{DType, FloatType};
use operands::{InputsArgs, Sizes, Softcap};
use policy::Choice;
use std::f32::consts::LOG2_E;

pub(super) use cmma_tile::CmmaTile;
pub(super) use combine::CombineConfig;
#[cfg(test)]
pub(super) use int8::rounded as rounded_int8;
pub(super) use paged::{attention_paged, rounded_paged};
pub(super) use stream::StreamConfig;

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op for `target`, at sizes of layers.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let combine = |(&dtype, (width, splits))| {
        combine::compiled(target, policy::combine_config(width, dtype, splits, target.plane())).code()
    };
    let mut kernels: Vec<_> = floats.iter().zip([(128, 2), (256, 33), (13, 33)]).map(combine).collect();
    let config = policy::combine_config(64, FloatType::BF16, 1, target.plane());
    kernels.push(combine::compiled(target, config.with_sinks(true)).code());
    kernels.extend(paged::kernels(target));
    kernels.extend(int8::kernels(target));
    let mut push = |dtype, cache, sizes| {
        let (config, _) = policy::stream_config([dtype, cache], sizes, target.caps());
        kernels.push(stream::compiled(target, config).code());
    };
    for (i, dtype) in floats.into_iter().enumerate() {
        // A step of Llama-3-8B's, and an odd size with a cache of another type.
        push(dtype, dtype, [4, 8, 4096, 128, 128]);
        push(dtype, floats[(i + 1) % 3], [7, 2, 64, 13, 13]);
    }
    // Of Gemma 4's layers without a window: a step, and a prompt.
    push(FloatType::BF16, FloatType::BF16, [16, 4, 4096, 512, 512]);
    push(FloatType::F16, FloatType::F16, [2048, 4, 4096, 512, 512]);
    // A prompt.
    push(FloatType::F32, FloatType::BF16, [2048, 8, 4096, 128, 128]);
    // Of Gemma 2, whose scores have a soft cap: steps and prompts.
    let softcap = Softcap::of(&AttentionParams { softcap: Some(50.0), ..AttentionParams::causal(1.0) });
    for dtype in [FloatType::F32, FloatType::F16] {
        let (config, _) = policy::stream_config([dtype; 2], [2, 4, 4096, 256, 256], target.caps());
        kernels.push(stream::compiled(target, StreamConfig { softcap, ..config }).code());
    }
    for rows in [2, 2048] {
        let sizes = [rows, 4, 4096, 256, 256];
        let all = policy::tensor_core_choices([FloatType::BF16; 2], sizes, 0.1, target).into_iter();
        kernels.extend(all.filter_map(|(choice, _)| cuda::code(target, choice.with_softcap(softcap))));
    }
    let all = policy::cmma_tiles([FloatType::F16; 2], [2048, 4, 4096, 256, 256], target).into_iter();
    let capped = all.take(1).map(|(config, _)| CmmaTile { softcap, ..config });
    kernels.extend(capped.map(|config| cmma_tile::compiled(target, config).code()));
    // Prompts of Llama-3-8B, Qwen3.5-9B and others, long and short, and steps of one token and of a
    // few.
    let sizes = [
        (8192, 4096, 128),
        (8192, 4096, 256),
        (4096, 4096, 64),
        (40, 4096, 80),
        (4, 4096, 128),
        (4, 256, 256),
        (16, 4096, 256),
        (16, 4096, 64),
        (4, 4096, 96),
        (8, 4096, 512),
    ];
    for (rows, capacity, width) in sizes {
        let dtype = if rows < 8192 { FloatType::F16 } else { FloatType::BF16 };
        let all = policy::tensor_core_choices([dtype; 2], [rows, 4, capacity, width, width], 0.1, target);
        kernels.extend(all.into_iter().filter_map(|(choice, _)| cuda::code(target, choice)));
    }
    // All tiles of cooperative matrices, alone and with parts of the keys.
    for (dtype, width) in
        [(FloatType::F16, 64), (FloatType::F16, 80), (FloatType::BF16, 128), (FloatType::F16, 256)]
    {
        for rows in [64, 32768] {
            let all = policy::cmma_tiles([dtype; 2], [rows, 4, 4096, width, width], target);
            kernels.extend(all.into_iter().map(|(config, _)| cmma_tile::compiled(target, config).code()));
        }
    }
    kernels
}

/// See [`super::attention`]; everything was checked.
pub(super) fn attention(
    gpu: &Gpu,
    operands: [&Tensor; 4],
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    let [q, k, ..] = operands;
    let dtype = CHECK.float("q", q)?;
    match CacheType::of(CHECK, "k", k)? {
        CacheType::Float(cache) => attention_by(gpu, operands, sinks, params, |sizes| {
            policy::choose([dtype, cache], sizes, params.scale * LOG2_E, gpu.target())
        }),
        CacheType::Int8 => int8::attention(gpu, dtype, operands, sinks, params),
    }
}

/// The results of every tile of cooperative matrices that the device has room for, and of every
/// kernel on tensor cores.
#[cfg(test)]
pub(super) fn by_each_matrix_kernel(
    gpu: &Gpu,
    operands: [&Tensor; 4],
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Result<Vec<Tensor>, KernelError> {
    let [q, k, v, _] = operands;
    let tokens = q.dim(0);
    let sizes = [tokens * q.dim(1) / k.dim(0), k.dim(0), k.dim(1), q.dim(2), v.dim(2)];
    let dtypes = [CHECK.float("q", q)?, CHECK.float("k", k)?];
    let all = policy::cmma_tiles(dtypes, sizes, gpu.target()).into_iter();
    let all = all.map(|(config, splits)| (Choice::CmmaTile(config), splits));
    let scale = params.scale * LOG2_E;
    let of_tensor_cores = policy::tensor_core_choices(dtypes, sizes, scale, gpu.target());
    let by = |choice| attention_by(gpu, operands, sinks, params, |_| choice);
    all.chain(of_tensor_cores).map(by).collect()
}

/// By the kernel and the number of cubes per row that `choose` makes of rows per key head, key
/// heads, capacity, D and Dv.
pub(super) fn attention_by(
    gpu: &Gpu,
    [q, k, v, positions]: [&Tensor; 4],
    sinks: Option<&Tensor>,
    params: &AttentionParams,
    choose: impl FnOnce([usize; 5]) -> (Choice, usize),
) -> Result<Tensor, KernelError> {
    let (dtype, cache) = (CHECK.float("q", q)?, CacheType::of(CHECK, "k", k)?);
    let (tokens, query_heads, width) = (q.dim(0), q.dim(1), q.dim(2));
    let (heads, capacity, value_width) = (k.dim(0), k.dim(1), cache.width(v.dim(2)));
    let device = Device::Gpu(gpu.clone());
    let y = Tensor::allocate(&[tokens, query_heads, value_width], dtype.dtype(), &device)?;
    if y.is_empty() {
        return Ok(y);
    }
    for x in [q, k, v, &y] {
        CHECK.index(x.len())?;
    }
    let group = query_heads / heads;
    let operands = [q, k, v, positions];
    let call = Call { gpu, operands, sinks, y: &y, params, group, heads, capacity, table: None };
    let sizes = [tokens * group, heads, capacity, width, value_width];
    let (kernel, splits) = choose(sizes);
    let kernel = if sinks.is_some() { kernel.in_parts() } else { kernel };
    let kernel = kernel.with_softcap(Softcap::of(params));
    call.run(splits, |out| match kernel {
        Choice::Step(config) => cuda::launch_step(&call, config, splits, out),
        Choice::Tile(config) => cuda::launch_tile(&call, config, splits, out),
        Choice::Wgmma(config) => cuda::launch_wgmma(&call, config, splits, out),
        Choice::CmmaTile(config) => cmma_tile::launch(&call, config, splits, out),
        Choice::Stream(config) => stream::launch(&call, config, splits, out),
    })?;
    Ok(y)
}

/// The type that the weights of an attention are rounded to, if any. `sizes` are those of the
/// reference.
pub(crate) fn rounded(
    gpu: &Gpu,
    dtypes: [FloatType; 2],
    sizes: [usize; 5],
    tokens: usize,
    params: &AttentionParams,
) -> Option<FloatType> {
    let [query_heads, heads, capacity, width, value_width] = sizes;
    let sizes = [tokens * query_heads / heads, heads, capacity, width, value_width];
    match policy::choose(dtypes, sizes, params.scale * LOG2_E, gpu.target()).0 {
        Choice::Step(_) | Choice::Tile(_) | Choice::Wgmma(_) | Choice::CmmaTile(_) => Some(dtypes[0]),
        Choice::Stream(_) => None,
    }
}

/// The operands of an attention that was checked.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub gpu: &'a Gpu,
    /// q, k, v and positions.
    operands: [&'a Tensor; 4],
    sinks: Option<&'a Tensor>,
    y: &'a Tensor,
    pub params: &'a AttentionParams,
    /// Query heads per key head.
    group: usize,
    /// Key heads.
    heads: usize,
    /// Keys per key head; where they are in pages, positions that the table has pages for.
    capacity: usize,
    /// For keys in pages.
    table: Option<Table<'a>>,
}

/// The output of a kernel over keys.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    /// The result, or the parts of it that are combined later.
    pub y: &'a Tensor,
    /// Each part's greatest score and sum of weights; not written where there are no parts.
    pub scales: &'a Tensor,
}

impl Call<'_> {
    /// Has `launch` write y, or the parts of it where `splits` cubes share the keys or there are
    /// sinks: they are then combined.
    fn run(
        &self,
        splits: usize,
        launch: impl Fn(Output) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        if splits == 1 && self.sinks.is_none() && self.table.is_none() {
            // An unused operand gets a placeholder buffer.
            return launch(Output { y: self.y, scales: self.y });
        }
        let (rows, width) = (self.y.dim(0) * self.y.dim(1), self.y.dim(2));
        let y = Tensor::allocate(&[splits, rows, width], DType::F32, self.y.device())?;
        let scales = Tensor::allocate(&[rows, splits, 2], DType::F32, self.y.device())?;
        CHECK.index(y.len())?;
        let parts = Output { y: &y, scales: &scales };
        launch(parts)?;
        let config =
            policy::combine_config(width, CHECK.float("q", self.y)?, splits, self.gpu.target().plane());
        let config = config.with_sinks(self.sinks.is_some()).in_pages(self.table.is_some());
        combine::launch(self, config, parts, splits)
    }

    /// Key heads, as a kernel takes them.
    pub(super) fn heads(&self) -> Result<u32, KernelError> {
        CHECK.index(self.heads)
    }

    pub(super) fn tokens(&self) -> usize {
        self.operands[0].dim(0)
    }

    fn positions(&self) -> &Tensor {
        self.operands[3]
    }

    /// The table of pages with its sizes; placeholders where keys are contiguous.
    pub(super) fn table(&self) -> Table<'_> {
        self.table.unwrap_or_else(|| (self.positions(), PoolSizes::none()))
    }

    /// Query rows per key head.
    pub(super) fn rows(&self) -> usize {
        self.tokens() * self.group
    }

    pub(super) fn inputs(&self) -> Result<InputsArgs<'_>, KernelError> {
        let [q, k, v, positions] = self.operands;
        Ok(InputsArgs { q: q.buffer()?, k: k.buffer()?, v: v.buffer()?, positions: positions.buffer()? })
    }

    pub(super) fn sizes(&self) -> Result<Sizes, KernelError> {
        let window = self.params.sliding_window.and_then(|window| window.try_into().ok()).unwrap_or(u32::MAX);
        Ok(Sizes {
            rows: CHECK.index(self.rows())?,
            group: CHECK.index(self.group)?,
            capacity: CHECK.index(self.capacity)?,
            window,
            ahead: self.params.look_ahead.try_into().unwrap_or(u32::MAX),
        })
    }
}
