//! The rule on a GPU: token after token on any; long sequences of 16-bit activations in chunks on NVIDIA's tensor cores
//! (`../cuda/`).

mod recurrent;

use super::cuda::{self, ChunkConfig};
use super::{CHECK, Dims, Form, GatedDeltaInputs, GatedDeltaRule, HeadMap, policy};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::launch::LaunchArgs;
use crate::{Device, KernelError, Tensor};
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
    pub key_heads: u32,
    pub value_heads: u32,
}

impl Problem<'_> {
    /// With the sequences that `state` has.
    pub(super) fn sizes(&self, state: &Tensor) -> Result<Sizes, KernelError> {
        Ok(Sizes {
            tokens: CHECK.index(self.inputs.q.dim(0))?,
            sequences: CHECK.index(state.dim(0))?,
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

#[cfg(test)]
inventory::submit!(crate::gpu::tests::Kernels(kernels));

/// Every kernel of the op for `target`.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = recurrent::kernels(target);
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
    let form = form(gpu, inputs, state, dims, params)?;
    match ChunkConfig::new(&gpu.caps(), dims, params, dtype).filter(|_| form == Form::Chunked) {
        Some(config) => cuda::launch(&problem, config, state, &y)?,
        None => recurrent::launch(&problem, state, &y)?,
    }
    Ok(y)
}

/// How a call is computed. In chunks its operands are rounded: see [`cuda`].
pub(super) fn form(
    gpu: &Gpu,
    inputs: &GatedDeltaInputs,
    state: &Tensor,
    dims: Dims,
    params: &GatedDeltaRule,
) -> Result<Form, KernelError> {
    let dtype = CHECK.float("q", inputs.q)?;
    let chunks = ChunkConfig::new(&gpu.caps(), dims, params, dtype).is_some();
    Ok(policy::gpu_form(params.form, chunks, inputs.q.dim(0), state.dim(0)))
}
