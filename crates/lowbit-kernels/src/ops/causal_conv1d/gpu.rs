//! The convolution on a GPU: a unit takes one channel through a piece of a sequence.

use super::{Activation, CHECK};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::UNITS;
use crate::gpu::float::{read, with_storage, write};
use crate::gpu::sequences::{piece, slots};
use crate::gpu::{CUBES, Dispatch, Gpu};
use crate::{Device, KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    dtype: FloatType,
    width: usize,
    biased: bool,
    activation: Option<Activation>,
}

impl Shape {
    /// Tokens of a piece. Only a sequence's first piece reads its state, which that piece then writes.
    fn piece(self) -> usize {
        32.max(self.width - 1)
    }
}

/// Tokens whose inputs a unit loads together.
const TOKENS: usize = 8;
#[cube(launch_unchecked)]
fn convolve<X: Int>(
    x: &[X],
    weight: &[f32],
    bias: &[f32],
    cu_seqlens: &[u32],
    state: &mut [f32],
    y: &mut [X],
    tokens: u32,
    channels: u32,
    sequences: u32,
    #[comptime] shape: Shape,
) {
    let past = comptime!(shape.width - 1);
    let (tokens, channels, sequences) = (tokens as usize, channels as usize, sequences as usize);
    let c = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X) as usize;
    let slot = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let piece = piece(cu_seqlens, slot, sequences, tokens, comptime!(shape.piece()));
    if c < channels && piece.first < piece.last {
        let row = (piece.sequence * channels + c) * past;
        let mut taps = Array::<f32>::new(comptime!(shape.width));
        // The inputs that some tokens see, oldest first.
        let mut inputs = Array::<f32>::new(comptime!(past + TOKENS));
        #[unroll]
        for i in 0..comptime!(shape.width) {
            taps[i] = weight[c * comptime!(shape.width) + i];
        }
        #[unroll]
        for i in 0..past {
            if piece.first == piece.start {
                inputs[i] = state[row + i];
            } else {
                inputs[i] = read(x, (piece.first + i - past) * channels + c, shape.dtype);
            }
        }
        let mut start = 0.0f32;
        if comptime!(shape.biased) {
            start = bias[c];
        }
        let mut first = piece.first;
        while first < piece.last {
            #[unroll]
            for t in 0..TOKENS {
                if first + t < piece.last {
                    inputs[comptime!(past + t)] = read(x, (first + t) * channels + c, shape.dtype);
                }
            }
            #[unroll]
            for t in 0..TOKENS {
                if first + t < piece.last {
                    let mut sum = start;
                    #[unroll]
                    for i in 0..comptime!(shape.width) {
                        sum = fma(taps[i], inputs[comptime!(t + i)], sum);
                    }
                    if comptime!(shape.activation.is_some()) {
                        sum /= 1.0f32 + (-sum).exp();
                    }
                    write(y, (first + t) * channels + c, sum, shape.dtype);
                }
            }
            #[unroll]
            for i in 0..past {
                inputs[i] = inputs[comptime!(i + TOKENS)];
            }
            first += TOKENS;
        }
        if piece.first == piece.start {
            // Each place is read before it is written: the sequence has a token.
            let length = piece.end - piece.start;
            #[unroll]
            for i in 0..past {
                if length + i < past {
                    state[row + i] = state[row + length + i];
                } else {
                    state[row + i] = read(x, (piece.end + i - past) * channels + c, shape.dtype);
                }
            }
        }
    }
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(shape.dtype, X => Box::new(convolve::Convolve::<X>::new(
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
        shape,
    )))
}

/// Every kernel of the op for `target`, one of each type of x and of each width that models have, and one with all
/// else.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let of = |dtype, width, biased, activation| kernel(target, Shape { dtype, width, biased, activation });
    let silu = Some(Activation::Silu);
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let usual = floats.into_iter().map(|dtype| of(dtype, 4, false, silu));
    usual.chain([of(FloatType::F32, 1, true, None), of(FloatType::F32, 40, true, silu)]).collect()
}

/// See [`super::causal_conv1d`], here of `[x, weight, cu_seqlens]`; everything was checked.
pub(super) fn causal_conv1d(
    gpu: &Gpu,
    [x, weight, cu_seqlens]: [&Tensor; 3],
    bias: Option<&Tensor>,
    state: &mut Tensor,
    activation: Option<Activation>,
) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("x", x)?;
    let y = Tensor::allocate(x.shape(), x.dtype(), &Device::Gpu(gpu.clone()))?;
    state.unshare()?;
    if y.is_empty() {
        return Ok(y);
    }
    let weight = weight.cast(DType::F32)?;
    let bias = bias.map(|bias| bias.cast(DType::F32)).transpose()?;
    let (tokens, channels, sequences) = (x.dim(0), x.dim(1), state.dim(0));
    let shape = Shape { dtype, width: weight.dim(1), biased: bias.is_some(), activation };
    let slots = slots(tokens, sequences, shape.piece());
    let index = |value: usize| CHECK.index(value);
    [x.len(), weight.len(), state.len()].into_iter().try_for_each(|len| index(len).map(drop))?;
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: [index(channels)?.div_ceil(UNITS), index(slots.min(CUBES))?, index(slots.div_ceil(CUBES))?],
        buffers: vec![
            x.memory()?,
            weight.memory()?,
            // What is not there is not read, and anything may stand for it.
            bias.as_ref().unwrap_or(&weight).memory()?,
            cu_seqlens.memory()?,
            state.memory()?,
            y.memory()?,
        ],
        scalars: vec![index(tokens)?, index(channels)?, index(sequences)?],
    })?;
    Ok(y)
}
