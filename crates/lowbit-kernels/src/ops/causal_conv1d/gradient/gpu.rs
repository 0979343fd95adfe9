//! The gradients on a GPU: a unit takes one channel through a piece of a sequence, as the
//! convolution does.
//!
//! dx of a token needs dz of the `W - 1` tokens behind it, so a unit computes dz of as many tokens
//! behind its piece too: less than a twentieth more, where to store dz and load it would move half
//! as much again. A piece's part of the weight's gradient is left as a row of partial sums, zeros
//! for a slot without a piece; these rows are summed afterwards.

#![allow(unsafe_code)] // Launches.

use super::{CHECK, CausalConv1dGradient, CausalConv1dInputs};
use crate::gpu::compile::Target;
use crate::gpu::copy::UNITS;
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::sigmoid;
use crate::gpu::sequences::{Piece, piece, slots};
use crate::gpu::{CUBES, Gpu};
use crate::ops::causal_conv1d::Activation;
use crate::ops::sum_rows;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    /// Taps per channel.
    width: usize,
    activation: Option<Activation>,
}

impl Config {
    /// Tokens of a piece: no fewer than the state has, so that all but the first find their past in
    /// x.
    fn piece(self) -> usize {
        64.max(self.width - 1)
    }
}

/// Tokens whose operands a unit loads together.
const TOKENS: usize = 8;

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Inputs {
    x: Box<[f32]>,
    weight: Box<[f32]>,
    state: Box<[f32]>,
    cu_seqlens: Box<[u32]>,
    dy: Box<[f32]>,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    tokens: u32,
    channels: u32,
    sequences: u32,
    slots: u32,
}

/// Channels go along x, the slots of pieces along y and z. `of_weight` is `[slots, C, W]`.
#[kernel]
fn causal_conv1d_backward_pieces(
    inputs: &Inputs,
    dx: &mut [f32],
    of_weight: &mut [f32],
    sizes: Sizes,
    #[comptime] config: Config,
) {
    let (width, past) = comptime!((config.width, config.width - 1));
    let (tokens, channels) = (sizes.tokens as usize, sizes.channels as usize);
    let c = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X) as usize;
    let slot = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    if c < channels && slot < sizes.slots as usize {
        let sequences = sizes.sequences as usize;
        let piece = piece(&inputs.cu_seqlens, slot, sequences, tokens, comptime!(config.piece()));
        let mut taps = Array::<f32>::new(width);
        let mut sums = Array::<f32>::new(width);
        #[unroll]
        for i in 0..width {
            taps[i] = inputs.weight[c * width + i];
            sums[i] = 0.0f32;
        }
        // The inputs that a few tokens see, oldest first, and dz of these tokens and of those
        // before.
        let mut window = first_inputs(inputs, &piece, (channels, c), config);
        let mut dzs = Array::<f32>::new(comptime!(past + TOKENS));
        #[unroll]
        for i in 0..comptime!(past + TOKENS) {
            dzs[i] = 0.0f32;
        }
        // An empty piece stops where it starts.
        let stop = select(piece.first < piece.last, piece.last + past, piece.first);
        let mut first = piece.first;
        while first < stop {
            load_dzs(
                inputs,
                &mut window,
                &mut dzs,
                &taps,
                (first, min(stop, piece.end), channels, c),
                config,
            );
            #[unroll]
            for t in 0..TOKENS {
                let token = first + t;
                let dz = dzs[comptime!(past + t)];
                if token < piece.last {
                    #[unroll]
                    for i in 0..width {
                        sums[i] = fma(dz, window[comptime!(t + i)], sums[i]);
                    }
                }
                if token >= piece.first + past && token < stop {
                    let mut dx_t = 0.0f32;
                    #[unroll]
                    for i in 0..width {
                        dx_t = fma(taps[i], dzs[comptime!(past + t - i)], dx_t);
                    }
                    dx[(token - past) * channels + c] = dx_t;
                }
            }
            #[unroll]
            for i in 0..past {
                window[i] = window[comptime!(i + TOKENS)];
                dzs[i] = dzs[comptime!(i + TOKENS)];
            }
            first += TOKENS;
        }
        #[unroll]
        for i in 0..width {
            of_weight[(slot * channels + c) * width + i] = sums[i];
        }
    }
}

/// The inputs before a piece, with room for those of the first tokens.
#[cube]
fn first_inputs(
    inputs: &Inputs,
    piece: &Piece,
    channel: (usize, usize),
    #[comptime] config: Config,
) -> Array<f32> {
    let (channels, c) = channel;
    let past = comptime!(config.width - 1);
    let mut window = Array::<f32>::new(comptime!(past + TOKENS));
    #[unroll]
    for i in 0..comptime!(past + TOKENS) {
        window[i] = 0.0f32;
    }
    if piece.first < piece.last {
        #[unroll]
        for i in 0..past {
            if piece.first == piece.start {
                window[i] = inputs.state[(piece.sequence * channels + c) * past + i];
            } else {
                window[i] = inputs.x[(piece.first + i - past) * channels + c];
            }
        }
    }
    window
}

/// The inputs and dz of the tokens from `first` on; dz is 0 from token `end` on.
#[cube]
fn load_dzs(
    inputs: &Inputs,
    window: &mut Array<f32>,
    dzs: &mut Array<f32>,
    taps: &Array<f32>,
    of: (usize, usize, usize, usize),
    #[comptime] config: Config,
) {
    let (first, end, channels, c) = of;
    let past = comptime!(config.width - 1);
    #[unroll]
    for t in 0..TOKENS {
        let mut dz = 0.0f32;
        if first + t < end {
            let at = (first + t) * channels + c;
            window[comptime!(past + t)] = inputs.x[at];
            dz = inputs.dy[at];
        }
        dzs[comptime!(past + t)] = dz;
    }
    if comptime!(config.activation.is_some()) {
        #[unroll]
        for t in 0..TOKENS {
            if first + t < end {
                let mut z = 0.0f32;
                #[unroll]
                for i in 0..comptime!(config.width) {
                    z = fma(taps[i], window[comptime!(t + i)], z);
                }
                // 1 - sigmoid(z) is sigmoid(-z), which keeps its digits.
                dzs[comptime!(past + t)] *= sigmoid(z) * (1.0f32 + z * sigmoid(-z));
            }
        }
    }
}

fn compiled(target: &Target, config: Config) -> Kernel<CausalConv1dBackwardPieces<'static>> {
    CausalConv1dBackwardPieces::kernel(target, UNITS, config)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// That of models, that of one tap, and one of many.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let silu = Some(Activation::Silu);
    let configs = [(4, silu), (1, None), (40, silu)];
    configs.map(|(width, activation)| compiled(target, Config { width, activation }).code()).into()
}

/// See [`super::causal_conv1d_backward`]; everything was checked, and the inputs are f32, like dy.
pub(super) fn backward(
    gpu: &Gpu,
    inputs: &CausalConv1dInputs<'_>,
    dy: &Tensor,
) -> Result<CausalConv1dGradient, KernelError> {
    let CausalConv1dInputs { x, weight, state, cu_seqlens, activation } = *inputs;
    let (tokens, channels, sequences) = (x.dim(0), x.dim(1), state.dim(0));
    let config = Config { width: weight.dim(1), activation };
    // Tokens of no sequence have no gradient.
    let dx = Tensor::allocate_zeros(x.shape(), DType::F32, x.device())?;
    let slots = if sequences == 0 || x.is_empty() { 0 } else { slots(tokens, sequences, config.piece()) };
    let of_weight = Tensor::allocate(&[slots, weight.len()], DType::F32, x.device())?;
    if slots > 0 {
        let index = |value: usize| CHECK.index(value);
        [x.len(), of_weight.len(), state.len()].into_iter().try_for_each(|len| index(len).map(drop))?;
        let cubes = [channels.div_ceil(UNITS), slots.min(CUBES), slots.div_ceil(CUBES)].map(index);
        let [along_channels, along_slots, more_slots] = cubes;
        let arguments = CausalConv1dBackwardPieces {
            inputs: InputsArgs {
                x: x.buffer()?,
                weight: weight.buffer()?,
                // Unused operands get a placeholder buffer.
                state: if state.is_empty() { weight } else { state }.buffer()?,
                cu_seqlens: cu_seqlens.buffer()?,
                dy: dy.buffer()?,
            },
            dx: dx.buffer()?,
            of_weight: of_weight.buffer()?,
            sizes: Sizes {
                tokens: index(tokens)?,
                channels: index(channels)?,
                sequences: index(sequences)?,
                slots: index(slots)?,
            },
        };
        // SAFETY: the sizes are the tensors', and slots without a piece, or whose offsets go past
        // the tokens, write zeros in their own row alone.
        unsafe {
            gpu.launch(
                compiled(gpu.target(), config),
                [along_channels?, along_slots?, more_slots?],
                arguments,
            )?;
        }
    }
    let dweight = sum_rows(&of_weight)?.reshape(weight.shape())?;
    Ok(CausalConv1dGradient { dx, dweight })
}
