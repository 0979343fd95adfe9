use super::*;
use crate::Device;
use crate::ops::causal_conv1d::reference;
use crate::ops::rms_norm::reference::silu_and_slope;
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
            let of = reference::causal_conv1d(x, &self.weight, None, state, c, self.activation);
            y.0.extend(of.0);
            y.1.extend(of.1);
        }
        y
    }

    /// `[dx, dweight]` in f64, and the bound of each.
    fn backward(&self, dy: &[f32]) -> [(Vec<f64>, Vec<f64>); 2] {
        let (c, width) = (self.channels, self.width());
        let (z, magnitude) = Self { activation: None, ..self.clone() }.forward();
        let zeros = |n: usize| (vec![0.0; n], vec![0.0; n]);
        let [mut dx, mut dweight] = [self.x.len(), self.weight.len()].map(zeros);
        let terms = self.x.len() / c;
        let add = |sum: &mut (Vec<f64>, Vec<f64>), at: usize, (dz, off): (f64, f64), x: f64, count: usize| {
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
                        (dy * slope, dy.abs() * (0.5 * gamma(width + 1) * magnitude[at] + gamma(16) * most))
                    }
                    None => (dy, 0.0),
                };
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
        [dx, dweight]
    }
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    let mut of = |n: usize| coarse(&mut random, n);
    let (lengths, channels, width) = (vec![4, 0, 2], 2, 3);
    let (x, weight) = (of(6 * channels), of(channels * width));
    let (state, dy) = (of(3 * channels * (width - 1)), of(6 * channels));
    for activation in [None, Some(Activation::Silu)] {
        let (x, weight, lengths) = (x.clone(), weight.clone(), lengths.clone());
        let start = Values { x, weight, state: state.clone(), lengths, channels, activation };
        let loss = |values: Values| dot(&values.forward().0, &dy);
        let [dx, dweight] = start.backward(&dy);
        assert_derivatives("dx", &start.x, &dx.0, |x| loss(Values { x: x.to_vec(), ..start.clone() }));
        assert_derivatives("dweight", &start.weight, &dweight.0, |weight| {
            loss(Values { weight: weight.to_vec(), ..start.clone() })
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
    let (dy, dys) = float(&[tokens, channels]);
    let (state, states) = float(&[lengths.len(), channels, width - 1]);
    let mut offsets = vec![0u32];
    lengths.iter().for_each(|&n| offsets.push(offsets[offsets.len() - 1] + n as u32));
    let cu_seqlens = Tensor::new(&offsets, &[offsets.len()], device).unwrap();
    let inputs =
        CausalConv1dInputs { x: &x, weight: &weight, state: &state, cu_seqlens: &cu_seqlens, activation };
    let got = causal_conv1d_backward(&inputs, &dy).unwrap();
    let lengths = lengths.to_vec();
    let values = Values { x: xs, weight: weights, state: states, lengths, channels, activation };
    let [dx, dweight] = values.backward(&dys);
    assert_close(&got.dx, x.shape(), FLOATS[0], &dx.0, |i| dx.1[i]);
    assert_close(&got.dweight, weight.shape(), FLOATS[0], &dweight.0, |i| dweight.1[i]);
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

fn agrees_with_f64_on(devices: &[Device]) {
    for device in devices {
        for activation in [None, Some(Activation::Silu)] {
            gradients(device, &[0, 5, 0, 1, 30], 19, 4, activation);
            gradients(device, &[3], 1, 1, activation);
            // Around the pieces that a GPU cuts sequences into.
            gradients(device, &[63, 64, 0, 65, 1, 66, 131, 2], 5, 4, activation);
        }
        gradients(device, &[9, 2], 700, 3, Some(Activation::Silu));
        // A state as long as a piece, and longer.
        gradients(device, &[200, 70], 2, 65, Some(Activation::Silu));
        gradients(device, &[7, 301], 2, 70, None);
        // More pieces than are summed together.
        gradients(device, &[64 * 66], 2, 2, None);
        gradients(device, &[1; 70], 3, 4, Some(Activation::Silu));
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
        let inputs = CausalConv1dInputs { x: &x, weight: &weight, state: &state, cu_seqlens, activation };
        let got = causal_conv1d_backward(&inputs, &dy).unwrap();
        [values(&got.dx), values(&got.dweight)]
    };
    for (got, want) in of(3).iter().zip(&of(1)) {
        assert_bits("threads", got, want);
    }
    let float = |shape: &[usize]| Tensor::new(&vec![0f32; shape.iter().product()], shape, &device()).unwrap();
    let (x, weight, state) = (float(&[2, 3]), float(&[3, 4]), float(&[1, 3, 3]));
    let cu_seqlens = &Tensor::new(&[0u32, 2], &[2], &device()).unwrap();
    let inputs = CausalConv1dInputs { x: &x, weight: &weight, state: &state, cu_seqlens, activation: None };
    let error = causal_conv1d_backward(&inputs, &weight).unwrap_err().to_string();
    assert_eq!(error, "causal_conv1d_backward: dy is [3, 4], but x wants [2, 3]");
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::testing::gpu;
    use lowbit_formats::DType;

    #[test]
    fn agrees_with_f64() {
        agrees_with_f64_on(&[gpu()]);
    }

    /// Of ones, for 9 tokens of 2 channels: `[dx, dweight]`.
    fn of_offsets(offsets: &[u32]) -> [Vec<f32>; 2] {
        let gpu = gpu();
        let ones = |shape: &[usize]| Tensor::new(&vec![1f32; shape.iter().product()], shape, &gpu).unwrap();
        let inputs = CausalConv1dInputs {
            x: &ones(&[9, 2]),
            weight: &ones(&[2, 3]),
            state: &ones(&[offsets.len() - 1, 2, 2]),
            cu_seqlens: &Tensor::new(offsets, &[offsets.len()], &gpu).unwrap(),
            activation: None,
        };
        let got = causal_conv1d_backward(&inputs, &ones(&[9, 2])).unwrap();
        [values(&got.dx), values(&got.dweight)]
    }

    #[test]
    fn wrong_offsets_leave_a_sequence_out() {
        let whole = [[3.0; 14].to_vec(), vec![2.0, 2.0, 1.0, 1.0]].concat();
        let nine = [whole, vec![9.0; 6]];
        assert_eq!(of_offsets(&[0, 9]), nine);
        for wrong in [[0, 9, 10], [0, 9, 4], [0, 9, u32::MAX]] {
            assert_eq!(of_offsets(&wrong), nine, "{wrong:?}");
        }
        let none = [vec![0.0; 18], vec![0.0; 6]];
        for wrong in [&[0, 10][..], &[0, u32::MAX], &[u32::MAX, 9], &[9, 0], &[0]] {
            assert_eq!(of_offsets(wrong), none, "{wrong:?}");
        }
    }

    #[test]
    fn nothing() {
        let gpu = gpu();
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &gpu);
        for [tokens, channels] in [[0, 2], [3, 0]] {
            let inputs = CausalConv1dInputs {
                x: &zeros(&[tokens, channels]),
                weight: &zeros(&[channels, 3]),
                state: &zeros(&[1, channels, 2]),
                cu_seqlens: &Tensor::new(&[0, tokens as u32], &[2], &gpu).unwrap(),
                activation: None,
            };
            let got = causal_conv1d_backward(&inputs, inputs.x).unwrap();
            assert_eq!(got.dx.shape(), [tokens, channels]);
            assert_eq!(got.dweight.shape(), [channels, 3]);
            assert!(values(&got.dweight).iter().all(|&x| x == 0.0));
        }
    }
}
