//! Causal depthwise convolution over tokens, with the inputs before them as state.
//!
//! For each sequence, with `x[-(W-1)..0]` the state's columns, oldest first:
//! ```text
//! y[t, c] = activation(bias[c] + sum_w weight[c, w] * x[t - (W-1) + w, c])
//! state[c] <- the last W-1 inputs of channel c, before the convolution
//! ```
//! | operand | shape | dtype |
//! |---|---|---|
//! | `x` | `[T, C]` | f32, f16 or bf16 |
//! | `weight` | `[C, W]`, `W >= 1` | f32, f16 or bf16 (f32 saves a conversion each call) |
//! | `bias` | `[C]` | f32, f16 or bf16 |
//! | `state` | `[S, C, W-1]`, or a pool `[slots, C, W-1]`, updated | f32 |
//! | `slots` | `[S]`: sequence `s` has state `slots[s]` of the pool; see [`SlotState`] | u32 |
//! | `cu_seqlens` | `[S + 1]`: sequence `s` is tokens `cu_seqlens[s]..cu_seqlens[s + 1]` | u32 |
//! | `y` | `[T, C]` | as `x` |
//!
//! Sums and activation are f32; `y` is rounded once. On a GPU `cu_seqlens` and `slots` are not
//! looked at beforehand: a sequence whose offsets do not rise, or go past `T`, or whose slot is
//! past the pool, is left out, and what `y` is for tokens of no sequence is undefined.
//!
//! Source: transformers 5 `causal_conv1d_fn` and `causal_conv1d_update` (whose state may be wider);
//! Dao's causal-conv1d.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
mod reference;
#[cfg(test)]
mod tests;

pub use gradient::{CausalConv1dGradient, CausalConv1dInputs, causal_conv1d_backward};

use super::Check;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("causal_conv1d");

/// The function that is applied to an op's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
}

/// The states that an op carries along sequences.
#[derive(Debug)]
pub struct SlotState<'a> {
    /// `[S, ..]`, one per sequence, or with `slots` a pool `[slots, ..]`.
    pub state: &'a mut Tensor,
    /// u32 `[S]`: sequence `s` reads and writes row `slots[s]` of the pool. Sequences whose results
    /// nobody reads may share a row: on a CPU the first of them leaves its state there, on a GPU
    /// each element may be any one's.
    pub slots: Option<&'a Tensor>,
}

/// One state per sequence.
impl<'a> From<&'a mut Tensor> for SlotState<'a> {
    fn from(state: &'a mut Tensor) -> Self {
        Self { state, slots: None }
    }
}

/// Convolves all sequences and leaves their last inputs in `state`: a tensor of one state per
/// sequence, or a [`SlotState`].
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that are
/// not as the [module](self) says; on the CPU [`KernelError::Id`] for a slot that the pool lacks.
/// NaN and infinity pass through.
pub fn causal_conv1d<'a>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: impl Into<SlotState<'a>>,
    cu_seqlens: &Tensor,
    activation: Option<Activation>,
) -> Result<Tensor, KernelError> {
    let (op, SlotState { state, slots }) = (CHECK, state.into());
    let operands = [x, weight, cu_seqlens];
    let [tokens, channels, width] = check_operands(op, operands, bias, (state, slots))?;
    match x.device().clone() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let states = SlotState { state, slots };
            gpu::causal_conv1d(&gpu, operands, bias, states, activation, [channels; 2])
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match gpu {},
        Device::Cpu(cpu) => {
            let sequences = op.sequences(cu_seqlens, tokens)?;
            let (wide, weight) = (op.widened("x", x)?, op.widened("weight", weight)?);
            let bias = bias.map(|bias| op.widened("bias", bias)).transpose()?;
            let mut y = Tensor::empty(x.shape(), DType::F32, x.device());
            let conv = cpu::Conv {
                x: wide.as_slice()?,
                weight: weight.as_slice()?,
                bias: bias.as_ref().map(Tensor::as_slice).transpose()?,
                channels,
                width,
                activation,
                slots: slots.map(Tensor::as_slice).transpose()?,
            };
            conv.run(&cpu, &sequences, y.as_mut_slice()?, state.as_mut_slice()?);
            y.cast(x.dtype())
        }
    }
}

/// [`causal_conv1d()`] whose result comes as three tensors: parts of the channels next to each
/// other, `widths` wide. A GPU stores them so where they start at multiples of 16
/// channels.
///
/// # Errors
/// As [`causal_conv1d()`]; [`KernelError::Shape`] when the widths are not all channels.
pub fn causal_conv1d_parts<'a>(
    x: &Tensor,
    (weight, bias): (&Tensor, Option<&Tensor>),
    state: impl Into<SlotState<'a>>,
    cu_seqlens: &Tensor,
    activation: Option<Activation>,
    widths: [usize; 3],
) -> Result<[Tensor; 3], KernelError> {
    let (op, SlotState { state, slots }) = (CHECK, state.into());
    let operands = [x, weight, cu_seqlens];
    let [_, channels, _] = check_operands(op, operands, bias, (state, slots))?;
    let ends = [widths[0], widths[0].saturating_add(widths[1])];
    if ends[1].checked_add(widths[2]) != Some(channels) {
        return Err(op.shape_error("x", x, format!("parts of {widths:?} channels were asked for")));
    }
    let starts = [0, ends[0], ends[1]];
    let parts: Vec<Tensor> = match x.device().clone() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) if ends.iter().all(|end| end.is_multiple_of(16)) => {
            let states = SlotState { state, slots };
            let y = gpu::causal_conv1d(&gpu, operands, bias, states, activation, ends)?;
            let (tokens, flat) = (x.dim(0), y.reshape(&[y.len()])?);
            let part = |(start, width): (usize, usize)| {
                flat.rows(tokens * start, tokens * (start + width))?.reshape(&[tokens, width])
            };
            starts.into_iter().zip(widths).map(part).collect::<Result<_, _>>()?
        }
        _ => {
            let y = causal_conv1d(x, weight, bias, SlotState { state, slots }, cu_seqlens, activation)?;
            let part = |(start, width)| super::narrow(&y, start, width);
            starts.into_iter().zip(widths).map(part).collect::<Result<_, _>>()?
        }
    };
    Ok(parts.try_into().expect("one for each width"))
}

/// Checks the operands against the [module](self)'s table; returns T, C and W.
fn check_operands(
    op: Check,
    [x, weight, cu_seqlens]: [&Tensor; 3],
    bias: Option<&Tensor>,
    (state, slots): (&Tensor, Option<&Tensor>),
) -> Result<[usize; 3], KernelError> {
    let [tokens, channels] = op.dims("x", x, "[T, C]")?;
    let [_, width] = op.dims("weight", weight, "[C, W]")?;
    op.shape("weight", weight, &[channels, width], || format!("x {:?}", x.shape()))?;
    if width == 0 {
        return Err(op.shape_error("weight", weight, "at least one tap is wanted".into()));
    }
    if let Some(bias) = bias {
        op.shape("bias", bias, &[channels], || format!("x {:?}", x.shape()))?;
    }
    let [states, ..] = op.dims::<3>("state", state, "[S, C, W-1]")?;
    op.shape("state", state, &[states, channels, width - 1], || format!("weight {:?}", weight.shape()))?;
    op.dtype("state", state, DType::F32)?;
    op.offsets(cu_seqlens, state, slots)?;
    op.float("x", x)?;
    let others = [("weight", weight), ("state", state), ("cu_seqlens", cu_seqlens)];
    let optional = [("bias", bias), ("slots", slots)];
    let optional = optional.into_iter().filter_map(|(operand, other)| Some((operand, other?)));
    for (operand, other) in others.into_iter().chain(optional) {
        op.same_device(operand, other.device(), x.device())?;
    }
    Ok([tokens, channels, width])
}
