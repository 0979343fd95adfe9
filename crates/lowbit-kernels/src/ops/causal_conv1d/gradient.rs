//! The gradients of [`causal_conv1d()`](super::causal_conv1d()).

use super::{Activation, check_operands};
use crate::gemm::transpose;
use crate::ops::check::Check;
use crate::scan::{Piece, Scan};
use crate::simd::{Kernel, Simd, math};
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// Channels of a task.
const BLOCK: usize = 256;

/// The gradients of [`causal_conv1d()`](super::causal_conv1d()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct CausalConv1dGradient {
    pub dx: Tensor,
    pub dweight: Tensor,
    /// Where there is a bias.
    pub dbias: Option<Tensor>,
}

/// What [`causal_conv1d()`](super::causal_conv1d()) read.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct CausalConv1dInputs<'a> {
    pub x: &'a Tensor,
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    /// As it was before the op.
    pub state: &'a Tensor,
    pub cu_seqlens: &'a Tensor,
    pub activation: Option<Activation>,
}

/// With `z` the sum before the activation and `dz = dy * activation'(z)` (`silu'(z) = s (1 + z (1 - s))`, `s = 1 / (1 + e^-z)`), for
/// each sequence:
///
/// ```text
/// dx[t, c]      = sum over w of weight[c, w] * dz[t + (W-1) - w, c]       up to the sequence's end
/// dweight[c, w] = sum over t of dz[t, c] * x[t - (W-1) + w, c]            the state before the first input
/// dbias[c]      = sum over t of dz[t, c]
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | inputs | as in [`causal_conv1d()`](super::causal_conv1d()) | |
/// | dy | `[T, C]` | f32, f16, bf16 |
/// | dx | `[T, C]` | dy's |
/// | dweight, dbias | `[C, W]`, `[C]` | f32 |
///
/// The state before is a constant, and nothing is to depend on the state after. All arithmetic is f32, in an order that does not
/// depend on the number of threads.
///
/// # Errors
/// As [`causal_conv1d()`](super::causal_conv1d()); [`KernelError::Shape`] for a dy of another shape than x;
/// [`KernelError::Unsupported`] on a GPU.
pub fn causal_conv1d_backward(
    inputs: &CausalConv1dInputs<'_>,
    dy: &Tensor,
) -> Result<CausalConv1dGradient, KernelError> {
    let check = Check("causal_conv1d_backward");
    let CausalConv1dInputs { x, weight, bias, state, cu_seqlens, activation } = *inputs;
    let [tokens, channels, width] = check_operands(check, [x, weight, cu_seqlens], bias, state)?;
    check.shape("dy", dy, x.shape(), || "x".into())?;
    check.float("dy", dy)?;
    check.same_device("dy", dy.device(), x.device())?;
    let cpu = x.device().as_cpu(check.0)?;
    let sequences = check.sequences(cu_seqlens, tokens, state)?;
    let (x, weight, wide) =
        (check.widened("x", x)?, check.widened("weight", weight)?, check.widened("dy", dy)?);
    let wide_bias = bias.map(|bias| check.widened("bias", bias)).transpose()?;
    let backward = Backward {
        x: x.as_slice()?,
        weight: weight.as_slice()?,
        bias: wide_bias.as_ref().map(Tensor::as_slice).transpose()?,
        state: state.as_slice()?,
        dy: wide.as_slice()?,
        channels,
        width,
        activation,
    };
    let mut dx = Tensor::allocate_zeros(x.shape(), DType::F32, x.device())?;
    // The weight's gradient and the bias's, by sequence.
    let columns = width + 1;
    let mut partials = vec![0.0; sequences.len() * channels * columns];
    let scan = Scan { sequences: &sequences, width: channels, block: BLOCK, state: columns };
    scan.run(cpu, dx.as_mut_slice()?, &mut partials, |piece| {
        // Of sequences that start alike only the last has tokens.
        let sequence = sequences.partition_point(|tokens| tokens.start <= piece.tokens.start) - 1;
        cpu.isa().dispatch(Channels { of: &backward, sequence, piece });
    });
    let mut dweight = Tensor::allocate_zeros(weight.shape(), DType::F32, x.device())?;
    let mut dbias = Tensor::allocate_zeros(&[channels], DType::F32, x.device())?;
    let (weights, biases) = (dweight.as_mut_slice::<f32>()?, dbias.as_mut_slice::<f32>()?);
    for partials in partials.chunks_exact((channels * columns).max(1)) {
        for (c, partial) in partials.chunks_exact(columns).enumerate() {
            let taps = weights[c * width..(c + 1) * width].iter_mut().zip(partial);
            taps.for_each(|(sum, partial)| *sum += partial);
            biases[c] += partial[width];
        }
    }
    Ok(CausalConv1dGradient { dx: dx.cast(dy.dtype())?, dweight, dbias: bias.map(|_| dbias) })
}

/// The operands in f32.
struct Backward<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    state: &'a [f32],
    dy: &'a [f32],
    channels: usize,
    width: usize,
    activation: Option<Activation>,
}

/// A block of channels through the tokens of one sequence: the piece's output is dx, and its state the gradients of the weight and
/// of the bias.
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
        let Backward { x, weight, bias, state, dy, channels, width, activation } = *self.of;
        let (block, past) = (columns.len(), width - 1);
        // Tap by tap and input by input, so that vectors run along channels.
        let mut taps = vec![0.0; block * width];
        transpose((&weight[columns.start * width..], width), (&mut taps, block), (block, width));
        let mut history = vec![0.0; block * past];
        let state = &state[(self.sequence * channels + columns.start) * past..];
        transpose((state, past), (&mut history, block), (block, past));
        let mut inputs: Vec<&[f32]> = history.chunks_exact(block).collect();
        inputs.extend(tokens.clone().map(|t| &x[t * channels..][columns.clone()]));
        // `[W + 1, block]`
        let mut sums = vec![0.0; (width + 1) * block];
        let mut dz = vec![0.0; block];
        for (i, t) in tokens.enumerate() {
            match bias {
                Some(bias) => dz.copy_from_slice(&bias[columns.clone()]),
                None => dz.fill(0.0),
            }
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
            let (of_taps, of_bias) = sums.split_at_mut(width * block);
            of_bias.iter_mut().zip(&dz).for_each(|(sum, dz)| *sum += dz);
            for (w, (sums, tap)) in of_taps.chunks_exact_mut(block).zip(taps.chunks_exact(block)).enumerate()
            {
                sums.iter_mut().zip(dz.iter().zip(inputs[i + w])).for_each(|(sum, (dz, x))| *sum += dz * x);
                if let Some(t) = (i + w).checked_sub(past) {
                    dx[t].iter_mut().zip(dz.iter().zip(tap)).for_each(|(dx, (dz, tap))| *dx += dz * tap);
                }
            }
        }
        transpose((&sums, block), (partials, width + 1), (width + 1, block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::ops::causal_conv1d::reference;
    use crate::ops::rms_norm::gradient::reference::silu_and_slope;
    use crate::ops::testing::{
        FLOATS, assert_close, assert_derivatives, coarse, device, devices, dot, normal, values,
    };
    use numcheck::{Random, assert_bits, gamma};
    use std::ops::Range;

    /// A call's operands as the reference takes them.
    #[derive(Clone)]
    struct Values {
        x: Vec<f32>,
        weight: Vec<f32>,
        bias: Option<Vec<f32>>,
        state: Vec<f32>,
        lengths: Vec<usize>,
        channels: usize,
        activation: Option<Activation>,
    }

    impl Values {
        fn width(&self) -> usize {
            self.weight.len() / self.channels
        }

        fn sequences(&self) -> Vec<Range<usize>> {
            let end = |end: &mut usize, &n: &usize| {
                *end += n;
                Some(*end - n..*end)
            };
            self.lengths.iter().scan(0, end).collect()
        }

        /// The forward reference of all sequences; y and the sums' magnitudes.
        fn forward(&self) -> (Vec<f64>, Vec<f64>) {
            let (mut y, c) = ((vec![], vec![]), self.channels);
            for (i, tokens) in self.sequences().into_iter().enumerate() {
                let past = c * (self.width() - 1);
                let x = &self.x[tokens.start * c..tokens.end * c];
                let state = &self.state[i * past..][..past];
                let bias = self.bias.as_deref();
                let of = reference::causal_conv1d(x, &self.weight, bias, state, c, self.activation);
                y.0.extend(of.0);
                y.1.extend(of.1);
            }
            y
        }

        /// `[dx, dweight, dbias]` in f64, and the bound of each.
        fn backward(&self, dy: &[f32]) -> [(Vec<f64>, Vec<f64>); 3] {
            let (c, width) = (self.channels, self.width());
            let (z, magnitude) = Self { activation: None, ..self.clone() }.forward();
            let zeros = |n: usize| (vec![0.0; n], vec![0.0; n]);
            let [mut dx, mut dweight, mut dbias] = [self.x.len(), self.weight.len(), c].map(zeros);
            let terms = self.x.len() / c;
            let add =
                |sum: &mut (Vec<f64>, Vec<f64>), at: usize, (dz, off): (f64, f64), x: f64, count: usize| {
                    sum.0[at] += dz * x;
                    sum.1[at] += x.abs() * (off + gamma(count + 1) * (dz.abs() + off));
                };
            for (i, tokens) in self.sequences().into_iter().enumerate() {
                for (t, channel) in tokens.clone().flat_map(|t| (0..c).map(move |channel| (t, channel))) {
                    let at = t * c + channel;
                    let dy = f64::from(dy[at]);
                    let dz = match self.activation {
                        // silu's second derivative is 0.5 at most.
                        Some(Activation::Silu) => {
                            let (_, slope, most) = silu_and_slope(z[at]);
                            (
                                dy * slope,
                                dy.abs() * (0.5 * gamma(width + 1) * magnitude[at] + gamma(16) * most),
                            )
                        }
                        None => (dy, 0.0),
                    };
                    add(&mut dbias, channel, dz, 1.0, terms);
                    for w in 0..width {
                        let tap = channel * width + w;
                        let input = (t - tokens.start + w)
                            .checked_sub(width - 1)
                            .map(|t| (tokens.start + t) * c + channel);
                        let past = || self.state[(i * c + channel) * (width - 1) + t - tokens.start + w];
                        let x = input.map_or_else(past, |at| self.x[at]);
                        add(&mut dweight, tap, dz, x.into(), terms);
                        if let Some(at) = input {
                            add(&mut dx, at, dz, self.weight[tap].into(), width);
                        }
                    }
                }
            }
            [dx, dweight, dbias]
        }
    }

    #[test]
    fn formulas_are_the_derivatives_of_the_forward_reference() {
        let mut random = Random::new(1);
        let mut of = |n: usize| coarse(&mut random, n);
        let (lengths, channels, width) = (vec![4, 0, 2], 2, 3);
        let (x, weight, bias) = (of(6 * channels), of(channels * width), of(channels));
        let (state, dy) = (of(3 * channels * (width - 1)), of(6 * channels));
        for activation in [None, Some(Activation::Silu)] {
            let (x, weight, bias, lengths) = (x.clone(), weight.clone(), Some(bias.clone()), lengths.clone());
            let start = Values { x, weight, bias, state: state.clone(), lengths, channels, activation };
            let loss = |values: Values| dot(&values.forward().0, &dy);
            let [dx, dweight, dbias] = start.backward(&dy);
            assert_derivatives("dx", &start.x, &dx.0, |x| loss(Values { x: x.to_vec(), ..start.clone() }));
            assert_derivatives("dweight", &start.weight, &dweight.0, |weight| {
                loss(Values { weight: weight.to_vec(), ..start.clone() })
            });
            assert_derivatives("dbias", start.bias.as_ref().unwrap(), &dbias.0, |bias| {
                loss(Values { bias: Some(bias.to_vec()), ..start.clone() })
            });
        }
    }

    fn gradients(
        device: &Device,
        lengths: &[usize],
        channels: usize,
        width: usize,
        activation: Option<Activation>,
    ) {
        let (mut random, tokens) = (Random::new(width as u64), lengths.iter().sum());
        let mut float = |shape: &[usize]| normal(&mut random, shape, FLOATS[0], device);
        let ((x, xs), (weight, weights)) = (float(&[tokens, channels]), float(&[channels, width]));
        let ((bias, biases), (dy, dys)) = (float(&[channels]), float(&[tokens, channels]));
        let (state, states) = float(&[lengths.len(), channels, width - 1]);
        let mut offsets = vec![0u32];
        lengths.iter().for_each(|&n| offsets.push(offsets[offsets.len() - 1] + n as u32));
        let cu_seqlens = Tensor::new(&offsets, &[offsets.len()], device).unwrap();
        for has_bias in [true, false] {
            let bias = has_bias.then_some(&bias);
            let inputs = CausalConv1dInputs {
                x: &x,
                weight: &weight,
                bias,
                state: &state,
                cu_seqlens: &cu_seqlens,
                activation,
            };
            let got = causal_conv1d_backward(&inputs, &dy).unwrap();
            let values = Values {
                x: xs.clone(),
                weight: weights.clone(),
                bias: has_bias.then(|| biases.clone()),
                state: states.clone(),
                lengths: lengths.to_vec(),
                channels,
                activation,
            };
            let [dx, dweight, dbias] = values.backward(&dys);
            assert_close(&got.dx, x.shape(), FLOATS[0], &dx.0, |i| dx.1[i]);
            assert_close(&got.dweight, weight.shape(), FLOATS[0], &dweight.0, |i| dweight.1[i]);
            assert_eq!(got.dbias.is_some(), has_bias);
            if let Some(got) = got.dbias {
                assert_close(&got, &[channels], FLOATS[0], &dbias.0, |i| dbias.1[i]);
            }
        }
    }

    #[test]
    fn agrees_with_f64() {
        for device in devices() {
            for activation in [None, Some(Activation::Silu)] {
                gradients(&device, &[0, 5, 0, 1, 30], 19, 4, activation);
                gradients(&device, &[3], 1, 1, activation);
            }
            gradients(&device, &[9, 2], 700, 3, Some(Activation::Silu));
        }
    }

    #[test]
    fn the_same_for_every_number_of_threads_and_refusals() {
        let of = |threads| {
            let device = Device::cpu(Some(threads)).unwrap();
            let mut random = Random::new(3);
            let mut float = |shape: &[usize]| normal(&mut random, shape, FLOATS[0], &device).0;
            let (x, weight, state, dy) =
                (float(&[40, 600]), float(&[600, 4]), float(&[2, 600, 3]), float(&[40, 600]));
            let cu_seqlens = &Tensor::new(&[0u32, 17, 40], &[3], &device).unwrap();
            let activation = Some(Activation::Silu);
            let inputs = CausalConv1dInputs {
                x: &x,
                weight: &weight,
                bias: None,
                state: &state,
                cu_seqlens,
                activation,
            };
            let got = causal_conv1d_backward(&inputs, &dy).unwrap();
            [values(&got.dx), values(&got.dweight)]
        };
        for (got, want) in of(3).iter().zip(&of(1)) {
            assert_bits("threads", got, want);
        }
        let float =
            |shape: &[usize]| Tensor::new(&vec![0f32; shape.iter().product()], shape, &device()).unwrap();
        let (x, weight, state) = (float(&[2, 3]), float(&[3, 4]), float(&[1, 3, 3]));
        let cu_seqlens = &Tensor::new(&[0u32, 2], &[2], &device()).unwrap();
        let inputs = CausalConv1dInputs {
            x: &x,
            weight: &weight,
            bias: None,
            state: &state,
            cu_seqlens,
            activation: None,
        };
        let error = causal_conv1d_backward(&inputs, &weight).unwrap_err().to_string();
        assert_eq!(error, "causal_conv1d_backward: dy is [3, 4], but x wants [2, 3]");
    }
}
