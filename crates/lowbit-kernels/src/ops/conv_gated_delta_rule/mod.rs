//! The gated delta rule of what a convolution gives: what a gated delta net does between its projections.
//!
//! ```text
//! q | k | v = causal_conv1d(qkv, weight, conv_state)     Hk Dk, Hk Dk and Hv Dv columns
//! y         = gated_delta_rule(q, k, v, gates, state)
//! ```
//! | operand | shape | dtype |
//! |---|---|---|
//! | `qkv` | `[T, C]`, `C = 2 Hk Dk + Hv Dv` | f32, f16 or bf16 |
//! | `weight` | `[C, W]`, `W >= 1` | f32, f16 or bf16 (f32 saves a conversion each call) |
//! | gates | `[T, Hv]`: see [`DeltaGates`] | |
//! | `conv_state` | `[S, C, W-1]`, updated | f32 |
//! | `state` | `[S, Hv, Dk, Dv]` or `[S, Hv, Dv, Dk]`, updated | f32 |
//! | `cu_seqlens` | `[S + 1]`: sequence `s` is tokens `cu_seqlens[s]..cu_seqlens[s + 1]` | u32 |
//! | `y` | `[T, Hv, Dv]` | as `qkv` |
//!
//! The same as [`causal_conv1d()`](super::causal_conv1d()) without bias, [`narrow()`] and
//! [`gated_delta_rule()`](super::gated_delta_rule()), whose formulas and sources hold here: q, k and v are rounded to the
//! dtype of `qkv`. Where each sequence has about one token, a GPU does all in one launch: such a token costs more to
//! launch for than to convolve.

mod bench;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod reference;
#[cfg(test)]
mod tests;

#[cfg(feature = "gpu")]
use super::gated_delta_rule::gpu;
use super::gated_delta_rule::{Dims, StateLayout};
use super::{
    Activation, Check, DeltaGates, GatedDeltaInputs, GatedDeltaRule, causal_conv1d, gated_delta_rule, narrow,
};
#[cfg(feature = "gpu")]
use crate::Device;
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("conv_gated_delta_rule");

/// The tokens of all sequences and what convolves them; shapes and dtypes as the [module](self) says.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ConvGatedDeltaInputs<'a> {
    pub qkv: &'a Tensor,
    pub weight: &'a Tensor,
    pub activation: Option<Activation>,
    pub gates: DeltaGates<'a>,
    pub cu_seqlens: &'a Tensor,
}

/// Runs both over all sequences and leaves their last inputs and states in `conv_state` and `state`.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that are not as the
/// [module](self) says. NaN and infinity pass through.
pub fn conv_gated_delta_rule(
    inputs: &ConvGatedDeltaInputs,
    [conv_state, state]: [&mut Tensor; 2],
    params: &GatedDeltaRule,
) -> Result<Tensor, KernelError> {
    let dims = check(inputs, [conv_state, state], params)?;
    #[cfg(feature = "gpu")]
    if let Device::Gpu(gpu) = inputs.qkv.device()
        && gpu::convolves(gpu, inputs, state, dims, params)
    {
        return gpu::conv_gated_delta_rule(gpu, inputs, [conv_state, state], dims, params);
    }
    composed(inputs, [conv_state, state], dims, params)
}

/// One op after the other.
fn composed(
    inputs: &ConvGatedDeltaInputs,
    [conv_state, state]: [&mut Tensor; 2],
    dims: Dims,
    params: &GatedDeltaRule,
) -> Result<Tensor, KernelError> {
    let ConvGatedDeltaInputs { qkv, weight, activation, gates, cu_seqlens } = *inputs;
    let qkv = causal_conv1d(qkv, weight, None, conv_state, cu_seqlens, activation)?;
    let [q, k, v] = split(&qkv, dims)?;
    gated_delta_rule(&GatedDeltaInputs { q: &q, k: &k, v: &v, gates, cu_seqlens }, state, params)
}

/// Columns to q, k and v.
fn split(qkv: &Tensor, dims: Dims) -> Result<[Tensor; 3], KernelError> {
    let Dims { key_heads, key_dim, value_heads, value_dim } = dims;
    let (tokens, keys) = (qkv.dim(0), key_heads * key_dim);
    let part = |start, heads, dim| narrow(qkv, start, heads * dim)?.reshape(&[tokens, heads, dim]);
    Ok([
        part(0, key_heads, key_dim)?,
        part(keys, key_heads, key_dim)?,
        part(2 * keys, value_heads, value_dim)?,
    ])
}

/// The sizes of a call, once all operands are as the [module](self) says.
fn check(
    inputs: &ConvGatedDeltaInputs,
    [conv_state, state]: [&Tensor; 2],
    params: &GatedDeltaRule,
) -> Result<Dims, KernelError> {
    let op = CHECK;
    let ConvGatedDeltaInputs { qkv, weight, gates, cu_seqlens, .. } = *inputs;
    let [tokens, channels] = op.dims("qkv", qkv, "[T, C]")?;
    let [_, width] = op.dims("weight", weight, "[C, W]")?;
    op.shape("weight", weight, &[channels, width], || format!("qkv {:?}", qkv.shape()))?;
    if width == 0 {
        return Err(op.shape_error("weight", weight, "at least one tap is wanted".into()));
    }
    let dims = heads(qkv, state, params.state_layout)?;
    let sequences = state.dim(0);
    op.shape("conv_state", conv_state, &[sequences, channels, width - 1], || {
        format!("weight {:?} with state {:?}", weight.shape(), state.shape())
    })?;
    op.dtype("conv_state", conv_state, DType::F32)?;
    op.dtype("state", state, DType::F32)?;
    op.offsets(cu_seqlens, state)?;
    params.qk_norm.map_or(Ok(()), |norm| op.eps(norm.eps))?;
    op.float("qkv", qkv)?;
    op.float("weight", weight)?;
    let whose = || format!("qkv {:?} with state {:?}", qkv.shape(), state.shape());
    gates.check(op, params.sign, (whose, &[tokens, dims.value_heads]), qkv.device())?;
    let others =
        [("weight", weight), ("conv_state", conv_state), ("state", state), ("cu_seqlens", cu_seqlens)];
    others
        .into_iter()
        .try_for_each(|(operand, other)| op.same_device(operand, other.device(), qkv.device()))?;
    Ok(dims)
}

/// The heads that the columns of `qkv` are, of the sizes that `state` has.
fn heads(qkv: &Tensor, state: &Tensor, layout: StateLayout) -> Result<Dims, KernelError> {
    let op = CHECK;
    let [_, value_heads, rows, columns] = op.dims("state", state, "[S, Hv, Dk, Dv] or [S, Hv, Dv, Dk]")?;
    let (key_dim, value_dim) = match layout {
        StateLayout::KeyValue => (rows, columns),
        StateLayout::ValueKey => (columns, rows),
    };
    let keys = value_heads.checked_mul(value_dim).and_then(|values| qkv.dim(1).checked_sub(values));
    let key_heads = keys.and_then(|keys| keys.checked_div(2 * key_dim)).unwrap_or(0);
    let dims = Dims { key_heads, key_dim, value_heads, value_dim };
    if key_heads == 0 || keys != Some(2 * key_heads * key_dim) || value_heads % key_heads != 0 {
        let want = format!(
            "columns of queries, keys and values are wanted whose value heads, those of state {:?} in {layout:?}, are a \
             multiple of the key heads",
            state.shape()
        );
        return Err(op.shape_error("qkv", qkv, want));
    }
    Ok(dims)
}
