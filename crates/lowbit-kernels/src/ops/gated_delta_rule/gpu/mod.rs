//! The rule on a GPU: token after token on any; long sequences of 16-bit activations in chunks, on
//! NVIDIA's tensor cores (`../cuda/`) or on the cooperative matrices that a device reports
//! (`chunked/`), unless each channel of the keys has its own decay.

mod chunked;
pub(super) mod operands;
mod recurrent;

use super::cuda::{self, ChunkConfig};
use super::{CHECK, Dims, Form, GatedDeltaInputs, GatedDeltaRule, HeadMap, policy};
use crate::gpu::caps::Caps;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::launch::LaunchArgs;
use crate::gpu::{CUBES, Gpu};
use crate::{Device, KernelError, Tensor};
use chunked::MatrixChunks;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// One call; everything was checked.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    pub gpu: &'a Gpu,
    pub inputs: &'a GatedDeltaInputs<'a>,
    pub dims: Dims,
    pub params: &'a GatedDeltaRule,
    /// The type of q, k, v and y.
    pub dtype: FloatType,
}

/// The sizes that a kernel is launched with.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(super) struct Sizes {
    /// Tokens of all sequences.
    pub tokens: u32,
    pub sequences: u32,
    /// Rows of the state.
    pub states: u32,
    pub key_heads: u32,
    pub value_heads: u32,
}

impl Problem<'_> {
    /// With the rows that `state` has.
    pub(super) fn sizes(&self, state: &Tensor) -> Result<Sizes, KernelError> {
        Ok(Sizes {
            tokens: CHECK.index(self.inputs.q.dim(0))?,
            sequences: CHECK.index(self.inputs.sequences())?,
            states: CHECK.index(state.dim(0))?,
            key_heads: CHECK.index(self.dims.key_heads)?,
            value_heads: CHECK.index(self.dims.value_heads)?,
        })
    }
}

/// The key head that value head `head` reads.
#[cube]
pub(super) fn key_head(key_heads: usize, value_heads: usize, head: usize, #[comptime] map: HeadMap) -> usize {
    if comptime!(map == HeadMap::Grouped) { head / (value_heads / key_heads) } else { head % key_heads }
}

/// Cubes along y and z for `count` sequences or slots.
pub(super) fn cubes(count: usize) -> Result<[u32; 2], KernelError> {
    Ok([CHECK.index(count.min(CUBES))?, CHECK.index(count.div_ceil(CUBES))?])
}

/// The kernels that a device has for chunks.
enum Chunks {
    TensorCores(ChunkConfig),
    Matrices(MatrixChunks),
}

impl Chunks {
    /// For a device of these abilities, if it and the kernels support the type and the sizes.
    fn new(caps: &Caps, dims: Dims, params: &GatedDeltaRule, dtype: FloatType) -> Option<Self> {
        let tensor_cores = ChunkConfig::new(caps, dims, params, dtype).map(Self::TensorCores);
        tensor_cores.or_else(|| MatrixChunks::new(caps, dims, params, dtype).map(Self::Matrices))
    }

    /// Tokens of a chunk.
    fn tokens(&self) -> usize {
        match self {
            Self::TensorCores(_) => cuda::CHUNK,
            Self::Matrices(config) => config.cut.tokens,
        }
    }
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op for `target`.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = recurrent::kernels(target);
    kernels.extend(chunked::kernels(target));
    if target.tensor_cores() {
        kernels.extend(cuda::kernels(target));
    }
    kernels
}

/// See [`super::gated_delta_rule`]; everything was checked.
pub(super) fn gated_delta_rule(
    gpu: &Gpu,
    inputs: &GatedDeltaInputs,
    state: &mut Tensor,
    dims: Dims,
    params: &GatedDeltaRule,
) -> Result<Tensor, KernelError> {
    let GatedDeltaInputs { q, v, .. } = *inputs;
    let dtype = CHECK.float("q", q)?;
    let y = Tensor::allocate(v.shape(), v.dtype(), &Device::Gpu(gpu.clone()))?;
    state.unshare()?;
    if y.is_empty() {
        return Ok(y);
    }
    // Kernels count elements with 32 bits.
    [q, v, &*state].into_iter().try_for_each(|x| CHECK.index(x.len()).map(drop))?;
    let problem = Problem { gpu, inputs, dims, params, dtype };
    match chunks(gpu, inputs, dims, params)? {
        Some(Chunks::TensorCores(config)) => cuda::launch(&problem, config, state, &y)?,
        Some(Chunks::Matrices(config)) => chunked::launch(&problem, config, state, &y)?,
        None => recurrent::launch(&problem, state, &y)?,
    }
    Ok(y)
}

/// The kernels that compute a call in chunks, if they are chosen.
fn chunks(
    gpu: &Gpu,
    inputs: &GatedDeltaInputs,
    dims: Dims,
    params: &GatedDeltaRule,
) -> Result<Option<Chunks>, KernelError> {
    if inputs.gates.per_channel() {
        return Ok(None);
    }
    let chunks = Chunks::new(gpu.target().caps(), dims, params, CHECK.float("q", inputs.q)?);
    let form = policy::gpu_form(params.form, chunks.is_some(), inputs.q.dim(0), inputs.sequences());
    Ok(chunks.filter(|_| form == Form::Chunked))
}

/// Tokens per chunk, where a call is computed in chunks: its operands are then rounded, see
/// [`cuda`].
pub(super) fn chunk_tokens(
    gpu: &Gpu,
    inputs: &GatedDeltaInputs,
    dims: Dims,
    params: &GatedDeltaRule,
) -> Result<Option<usize>, KernelError> {
    Ok(chunks(gpu, inputs, dims, params)?.map(|chunks| chunks.tokens()))
}
