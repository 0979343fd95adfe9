use super::Activation;
use crate::Cpu;
use crate::gemm::transpose;
use crate::scan::{Piece, Scan};
use crate::simd::math::Math;
use crate::simd::{Kernel, Lanes, Scalar, Simd};
use std::ops::Range;

/// Channels of a piece of work: a few rows of so many stay in the nearest cache, and each is a run
/// of memory long enough to be read ahead.
const BLOCK: usize = 1024;

/// Simple operations of an output besides its taps.
const ACTIVATION: usize = 12;

/// The operands in f32, as the module says.
pub(super) struct Conv<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub bias: Option<&'a [f32]>,
    pub channels: usize,
    pub width: usize,
    pub activation: Option<Activation>,
    pub slots: Option<&'a [u32]>,
}

impl Conv<'_> {
    pub fn run(&self, cpu: &Cpu, sequences: &[Range<usize>], y: &mut [f32], state: &mut [f32]) {
        let (width, state_width) = (self.channels, self.width - 1);
        let scan = Scan { sequences, width, block: BLOCK, state: state_width, slots: self.slots };
        scan.run(cpu, self.width + ACTIVATION, y, state, |piece| {
            cpu.isa().dispatch(Channels { conv: self, piece })
        });
    }
}

/// A block of channels through the tokens of one sequence.
struct Channels<'c, 'r, 'y> {
    conv: &'c Conv<'c>,
    piece: Piece<'r, 'y>,
}

impl Kernel for Channels<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Piece { tokens, columns, y, state } = self.piece;
        let Conv { x, weight, bias, channels, width, activation, .. } = *self.conv;
        let (block, past) = (columns.len(), width - 1);
        // Tap by tap and input by input, so that vectors run along channels.
        let mut taps = vec![0.0; block * width];
        transpose((&weight[columns.start * width..], width), (&mut taps, block), (block, width));
        let mut history = vec![0.0; block * past];
        transpose((state, past), (&mut history, block), (block, past));
        let bias = bias.map(|bias| &bias[columns.clone()]);

        // The inputs that the last tokens have seen, oldest first.
        let mut inputs: Vec<&[f32]> = history.chunks_exact(block).collect();
        for (t, y) in tokens.zip(y) {
            inputs.push(&x[t * channels..][columns.clone()]);
            let sum = Sum { taps: &taps, inputs: &inputs[inputs.len() - width..], bias };
            sum.token(simd, y, activation);
        }
        let last = &inputs[inputs.len() - past..];
        for (c, state) in state.chunks_exact_mut(past.max(1)).enumerate() {
            state.iter_mut().zip(last).for_each(|(s, input)| *s = input[c]);
        }
    }
}

/// Computes one token's outputs.
struct Sum<'a> {
    /// `[W, block]`
    taps: &'a [f32],
    /// `[W][block]`
    inputs: &'a [&'a [f32]],
    bias: Option<&'a [f32]>,
}

impl Sum<'_> {
    #[inline(always)]
    fn token<S: Simd>(&self, simd: S, y: &mut [f32], activation: Option<Activation>) {
        let whole = y.len() - y.len() % S::LANES;
        for c in (0..whole).step_by(S::LANES) {
            self.channels(simd, y, c, activation);
        }
        for c in whole..y.len() {
            self.channels::<Scalar>(Lanes, y, c, activation);
        }
    }

    /// A vector of channels.
    #[inline(always)]
    fn channels<S: Simd>(&self, simd: S, y: &mut [f32], c: usize, activation: Option<Activation>) {
        let mut sum = match self.bias {
            Some(bias) => simd.load(&bias[c..]),
            None => simd.splat(0.0),
        };
        for (tap, input) in self.taps.chunks_exact(y.len()).zip(self.inputs) {
            sum = simd.mul_add(simd.load(&tap[c..]), simd.load(&input[c..]), sum);
        }
        let activated = match activation {
            Some(Activation::Silu) => simd.silu(sum),
            None => sum,
        };
        simd.store(activated, &mut y[c..]);
    }
}
