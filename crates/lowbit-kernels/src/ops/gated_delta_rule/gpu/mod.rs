//! The rule on a GPU: token after token anywhere; long sequences of 16-bit activations in chunks where there are tensor
//! cores.

mod chunked;
mod mma;
mod recurrent;

pub(super) use chunked::CHUNK;

use super::{CHECK, Dims, Form, GatedDeltaInputs, GatedDeltaRule, HeadMap, policy};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::{Device, KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// One call; everything was checked.
#[derive(Clone, Copy)]
struct Problem<'a> {
    gpu: &'a Gpu,
    inputs: &'a GatedDeltaInputs<'a>,
    dims: Dims,
    params: &'a GatedDeltaRule,
    /// The type of q, k, v and y.
    dtype: FloatType,
}

/// The key head that value head `head` reads.
#[cube]
fn key_head(key_heads: usize, value_heads: usize, head: usize, #[comptime] map: HeadMap) -> usize {
    if comptime!(map == HeadMap::Grouped) { head / (value_heads / key_heads) } else { head % key_heads }
}

/// Every kernel of the op for `target`.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = recurrent::kernels(target);
    if target.tensor_cores() {
        kernels.extend(chunked::kernels(target));
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
    match form(gpu, inputs, state, dims, params)? {
        Form::Chunked => chunked::launch(&problem, state, &y)?,
        _ => recurrent::launch(&problem, state, &y)?,
    }
    Ok(y)
}

/// How a call is computed. In chunks its operands are rounded: see [`chunked`].
pub(super) fn form(
    gpu: &Gpu,
    inputs: &GatedDeltaInputs,
    state: &Tensor,
    dims: Dims,
    params: &GatedDeltaRule,
) -> Result<Form, KernelError> {
    let dtype = CHECK.float("q", inputs.q)?;
    let chunks = gpu.target().tensor_cores() && chunked::Shape::new(dims, params, dtype).fits();
    Ok(policy::gpu_form(params.form, chunks, inputs.q.dim(0), state.dim(0)))
}
