//! The gradients of [`causal_conv1d()`](super::causal_conv1d()).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use super::{Activation, check_operands};
use crate::gemm::transpose;
use crate::ops::Check;
use crate::scan::{Piece, Scan};
use crate::simd::{Kernel, Simd, math};
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;
use std::ops::Range;

const CHECK: Check = Check("causal_conv1d_backward");

/// Channels of a task.
const BLOCK: usize = 256;

/// The gradients of [`causal_conv1d()`](super::causal_conv1d()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct CausalConv1dGradient {
    pub dx: Tensor,
    pub dweight: Tensor,
}

/// The operands of [`causal_conv1d()`](super::causal_conv1d()) without a bias.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct CausalConv1dInputs<'a> {
    pub x: &'a Tensor,
    pub weight: &'a Tensor,
    /// As it was before the op.
    pub state: &'a Tensor,
    pub cu_seqlens: &'a Tensor,
    pub activation: Option<Activation>,
}

/// With `z` the sum before the activation and `dz = dy * activation'(z)`
/// (`silu'(z) = s (1 + z (1 - s))`, `s = 1 / (1 + e^-z)`), for each sequence:
///
/// ```text
/// dx[t, c]      = sum over w of weight[c, w] * dz[t + (W-1) - w, c]       up to the sequence's end
/// dweight[c, w] = sum over t of dz[t, c] * x[t - (W-1) + w, c]            the state before the first input
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | inputs | as in [`causal_conv1d()`](super::causal_conv1d()) | |
/// | dy | `[T, C]` | f32, f16, bf16 |
/// | dx | `[T, C]` | dy's |
/// | dweight | `[C, W]` | f32 |
///
/// Convolutions with a bias have no gradient. The state before is a constant, and nothing is to
/// depend on the state after. All arithmetic is f32, in an order that does not depend on the number
/// of threads. On a GPU a sequence whose offsets do not rise, or go past `T`, is left out, and dx
/// is 0 for tokens of no sequence.
///
/// # Errors
/// As [`causal_conv1d()`](super::causal_conv1d()); [`KernelError::Shape`] for a dy of another shape
/// than x.
pub fn causal_conv1d_backward(
    inputs: &CausalConv1dInputs<'_>,
    dy: &Tensor,
) -> Result<CausalConv1dGradient, KernelError> {
    let check = CHECK;
    let CausalConv1dInputs { x, weight, state, cu_seqlens, .. } = *inputs;
    let [tokens, ..] = check_operands(check, [x, weight, cu_seqlens], None, (state, None))?;
    check.shape("dy", dy, x.shape(), || "x".into())?;
    check.float("dy", dy)?;
    check.same_device("dy", dy.device(), x.device())?;
    let (x, weight, wide) =
        (check.widened("x", x)?, check.widened("weight", weight)?, check.widened("dy", dy)?);
    let inputs = CausalConv1dInputs { x: &x, weight: &weight, ..*inputs };
    let gradient = match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward(gpu, &inputs, &wide)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => backward(cpu, &inputs, &check.sequences(cu_seqlens, tokens)?, &wide)?,
    };
    Ok(CausalConv1dGradient { dx: gradient.dx.cast(dy.dtype())?, ..gradient })
}

/// On the CPU; the inputs are f32, like dy.
fn backward(
    cpu: &Cpu,
    inputs: &CausalConv1dInputs<'_>,
    sequences: &[Range<usize>],
    dy: &Tensor,
) -> Result<CausalConv1dGradient, KernelError> {
    let CausalConv1dInputs { x, weight, state, activation, .. } = *inputs;
    let (channels, width) = (x.dim(1), weight.dim(1));
    let backward = Backward {
        x: x.as_slice()?,
        weight: weight.as_slice()?,
        state: state.as_slice()?,
        dy: dy.as_slice()?,
        channels,
        width,
        activation,
    };
    let mut dx = Tensor::allocate_zeros(x.shape(), DType::F32, x.device())?;
    // The weight's gradient by sequence.
    let mut partials = vec![0.0; sequences.len() * channels * width];
    let scan = Scan { sequences, width: channels, block: BLOCK, state: width, slots: None };
    scan.run(cpu, 8 * width, dx.as_mut_slice()?, &mut partials, |piece| {
        // Of sequences that start alike only the last has tokens.
        let sequence = sequences.partition_point(|tokens| tokens.start <= piece.tokens.start) - 1;
        cpu.isa().dispatch(Channels { of: &backward, sequence, piece });
    });
    let mut dweight = Tensor::allocate_zeros(weight.shape(), DType::F32, x.device())?;
    let sums = dweight.as_mut_slice::<f32>()?;
    for partials in partials.chunks_exact(sums.len().max(1)) {
        sums.iter_mut().zip(partials).for_each(|(sum, partial)| *sum += partial);
    }
    Ok(CausalConv1dGradient { dx, dweight })
}

/// The operands in f32.
struct Backward<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    state: &'a [f32],
    dy: &'a [f32],
    channels: usize,
    width: usize,
    activation: Option<Activation>,
}

/// A block of channels through the tokens of one sequence: the piece's output is dx, and its state
/// the gradient of the weight.
struct Channels<'c, 'r, 'y> {
    of: &'c Backward<'c>,
    sequence: usize,
    piece: Piece<'r, 'y>,
}

impl Kernel for Channels<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Piece { tokens, columns, y: dx, state: partials } = self.piece;
        let Backward { x, weight, state, dy, channels, width, activation } = *self.of;
        let (block, past) = (columns.len(), width - 1);
        // Tap by tap and input by input, so that vectors run along channels.
        let mut taps = vec![0.0; block * width];
        transpose((&weight[columns.start * width..], width), (&mut taps, block), (block, width));
        let mut history = vec![0.0; block * past];
        let state = &state[(self.sequence * channels + columns.start) * past..];
        transpose((state, past), (&mut history, block), (block, past));
        let mut inputs: Vec<&[f32]> = history.chunks_exact(block).collect();
        inputs.extend(tokens.clone().map(|t| &x[t * channels..][columns.clone()]));
        // `[W, block]`
        let mut sums = vec![0.0; width * block];
        let mut dz = vec![0.0; block];
        for (i, t) in tokens.enumerate() {
            dz.fill(0.0);
            for (tap, input) in taps.chunks_exact(block).zip(&inputs[i..i + width]) {
                dz.iter_mut().zip(tap.iter().zip(*input)).for_each(|(z, (tap, x))| *z += tap * x);
            }
            for (z, dy) in dz.iter_mut().zip(&dy[t * channels..][columns.clone()]) {
                *z = match activation {
                    // 1 - s is sigmoid(-z), which keeps its digits.
                    Some(Activation::Silu) => dy * (math::sigmoid(*z) * (1.0 + *z * math::sigmoid(-*z))),
                    None => *dy,
                };
            }
            for (w, (sums, tap)) in sums.chunks_exact_mut(block).zip(taps.chunks_exact(block)).enumerate() {
                sums.iter_mut().zip(dz.iter().zip(inputs[i + w])).for_each(|(sum, (dz, x))| *sum += dz * x);
                if let Some(t) = (i + w).checked_sub(past) {
                    dx[t].iter_mut().zip(dz.iter().zip(tap)).for_each(|(dx, (dz, tap))| *dx += dz * tap);
                }
            }
        }
        transpose((&sums, block), (partials, width), (width, block));
    }
}
