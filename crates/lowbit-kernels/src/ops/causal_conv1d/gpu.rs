//! The convolution on a GPU: a unit takes one channel through a piece of a sequence.
//!
//! Only a sequence's first piece reads its state, and it alone writes the next one: a piece is no
//! shorter than the state, so that all others find their past in x. The inputs of a few tokens are
//! loaded together, and slide through registers.

#![allow(unsafe_code)] // Launches.

use super::{Activation, CHECK, SlotState};
use crate::gpu::compile::Target;
use crate::gpu::copy::UNITS;
use crate::gpu::float::{read, with_storage, write};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::sequences::{Piece, Sequences, SequencesArgs, piece, slots, state_row};
use crate::gpu::{CUBES, Gpu};
use crate::{Device, KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ConvConfig {
    dtype: FloatType,
    /// Taps per channel.
    width: usize,
    biased: bool,
    activation: Option<Activation>,
    /// True if states are in a pool.
    pooled: bool,
}

impl ConvConfig {
    /// Tokens of a piece.
    fn piece(self) -> usize {
        32.max(self.width - 1)
    }
}

/// Tokens whose inputs a unit loads together.
const TOKENS: usize = 8;

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Inputs<X: Int> {
    x: Box<[X]>,
    weight: Box<[f32]>,
    bias: Box<[f32]>,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    tokens: u32,
    channels: u32,
    sequences: u32,
    /// Rows of the state.
    states: u32,
    /// The ends of the first and of the second part of the channels.
    end0: u32,
    end1: u32,
}

/// Channels go along x, the slots of pieces along y and z.
#[kernel]
fn causal_conv1d_pieces<X: Int>(
    inputs: &Inputs<X>,
    of: &Sequences,
    state: &mut [f32],
    y: &mut [X],
    sizes: Sizes,
    #[comptime] config: ConvConfig,
) {
    let past = comptime!(config.width - 1);
    let (tokens, channels) = (sizes.tokens as usize, sizes.channels as usize);
    let (sequences, states) = (sizes.sequences as usize, sizes.states as usize);
    let c = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X) as usize;
    let (to, a_row) = place(&sizes, c);
    let slot = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let piece = piece(&of.offsets, slot, sequences, tokens, comptime!(config.piece()));
    let state_row = state_row(of, piece.sequence, (sequences, states), config.pooled);
    if c < channels && piece.first < piece.last && state_row < states {
        let row = (state_row * channels + c) * past;
        let mut taps = Array::<f32>::new(comptime!(config.width));
        // The inputs that the tokens see, oldest first.
        let mut window = Array::<f32>::new(comptime!(past + TOKENS));
        #[unroll]
        for i in 0..comptime!(config.width) {
            taps[i] = inputs.weight[c * comptime!(config.width) + i];
        }
        #[unroll]
        for i in 0..past {
            if piece.first == piece.start {
                window[i] = state[row + i];
            } else {
                window[i] = read(&inputs.x, (piece.first + i - past) * channels + c, config.dtype);
            }
        }
        let mut start = 0.0f32;
        if comptime!(config.biased) {
            start = inputs.bias[c];
        }
        let mut first = piece.first;
        while first < piece.last {
            #[unroll]
            for t in 0..TOKENS {
                if first + t < piece.last {
                    window[comptime!(past + t)] = read(&inputs.x, (first + t) * channels + c, config.dtype);
                }
            }
            #[unroll]
            for t in 0..TOKENS {
                if first + t < piece.last {
                    let mut sum = start;
                    #[unroll]
                    for i in 0..comptime!(config.width) {
                        sum = fma(taps[i], window[comptime!(t + i)], sum);
                    }
                    if comptime!(config.activation.is_some()) {
                        sum /= 1.0f32 + (-sum).exp();
                    }
                    write(y, to + (first + t) * a_row, sum, config.dtype);
                }
            }
            #[unroll]
            for i in 0..past {
                window[i] = window[comptime!(i + TOKENS)];
            }
            first += TOKENS;
        }
        if piece.first == piece.start {
            write_state(inputs, state, row, &piece, (channels, c), config);
        }
    }
}

/// The place of channel `c` of the first token in y, whose parts of the channels lie one after the
/// other, and the distance to the next token's.
#[cube]
fn place(sizes: &Sizes, c: usize) -> (usize, usize) {
    let mut start = 0u32;
    let mut end = sizes.end0;
    if c >= sizes.end0 as usize {
        start = sizes.end0;
        end = sizes.end1;
    }
    if c >= sizes.end1 as usize {
        start = sizes.end1;
        end = sizes.channels;
    }
    ((sizes.tokens * start) as usize + c - start as usize, (end - start) as usize)
}

/// The last inputs of the sequence, for channel `c` of `channels`. `row` is where the channel's
/// state begins.
#[cube]
fn write_state<X: Int>(
    inputs: &Inputs<X>,
    state: &mut [f32],
    row: usize,
    piece: &Piece,
    channel: (usize, usize),
    #[comptime] config: ConvConfig,
) {
    let (channels, c) = channel;
    let past = comptime!(config.width - 1);
    // Each place is read before it is written: the sequence has a token.
    let length = piece.end - piece.start;
    #[unroll]
    for i in 0..past {
        if length + i < past {
            state[row + i] = state[row + length + i];
        } else {
            state[row + i] = read(&inputs.x, (piece.end + i - past) * channels + c, config.dtype);
        }
    }
}

fn compiled(target: &Target, config: ConvConfig) -> Kernel<CausalConv1dPieces<'static>> {
    with_storage!(config.dtype, X => CausalConv1dPieces::kernel::<X>(target, UNITS, config))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op for `target`, one of each type of x and of each width that models have,
/// and one with all else.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let of = |dtype, width, biased, activation| {
        compiled(target, ConvConfig { dtype, width, biased, activation, pooled: false }).code()
    };
    let pooled =
        ConvConfig { dtype: FloatType::BF16, width: 4, biased: false, activation: None, pooled: true };
    let silu = Some(Activation::Silu);
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let usual = floats.into_iter().map(|dtype| of(dtype, 4, false, silu));
    let others = [of(FloatType::F32, 1, true, None), of(FloatType::F32, 40, true, silu)];
    usual.chain(others).chain([compiled(target, pooled).code()]).collect()
}

/// See [`super::causal_conv1d`], here of `[x, weight, cu_seqlens]`; everything was checked.
/// Channels up to the first of `ends`, those up to the second, and the others are matrices of their
/// own, one after the other.
pub(super) fn causal_conv1d(
    gpu: &Gpu,
    [x, weight, cu_seqlens]: [&Tensor; 3],
    bias: Option<&Tensor>,
    SlotState { state, slots: of_pool }: SlotState<'_>,
    activation: Option<Activation>,
    [end0, end1]: [usize; 2],
) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("x", x)?;
    let y = Tensor::allocate(x.shape(), x.dtype(), &Device::Gpu(gpu.clone()))?;
    state.unshare()?;
    if y.is_empty() {
        return Ok(y);
    }
    let weight = weight.cast(DType::F32)?;
    let bias = bias.map(|bias| bias.cast(DType::F32)).transpose()?;
    let (tokens, channels, sequences) = (x.dim(0), x.dim(1), cu_seqlens.len() - 1);
    let (width, biased, pooled) = (weight.dim(1), bias.is_some(), of_pool.is_some());
    let config = ConvConfig { dtype, width, biased, activation, pooled };
    let slots = slots(tokens, sequences, config.piece());
    let index = |value: usize| CHECK.index(value);
    [x.len(), weight.len(), state.len()].into_iter().try_for_each(|len| index(len).map(drop))?;
    let cubes = [channels.div_ceil(UNITS), slots.min(CUBES), slots.div_ceil(CUBES)].map(index);
    let [along_channels, along_slots, more_slots] = cubes;
    let arguments = CausalConv1dPieces {
        inputs: InputsArgs {
            x: x.buffer()?,
            weight: weight.buffer()?,
            // An unused operand gets a placeholder buffer.
            bias: bias.as_ref().unwrap_or(&weight).buffer()?,
        },
        of: SequencesArgs::new(cu_seqlens, of_pool)?,
        state: state.buffer()?,
        y: y.buffer()?,
        sizes: Sizes {
            tokens: index(tokens)?,
            channels: index(channels)?,
            sequences: index(sequences)?,
            states: index(state.dim(0))?,
            end0: index(end0)?,
            end1: index(end1)?,
        },
    };
    let kernel = compiled(gpu.target(), config);
    // SAFETY: the sizes are the tensors', and slots without a piece, or whose offsets go past the
    // tokens, or their state past the pool, are left out.
    unsafe { gpu.launch(kernel, [along_channels?, along_slots?, more_slots?], arguments)? };
    Ok(y)
}
