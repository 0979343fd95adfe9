//! A quantised weight that is learned.

use super::Learn;
use super::adam::{Learned, Step};
use crate::QuantizeError;
use lowbit_formats::{FloatType, Format, Scales};
use lowbit_kernels::ops::{ScalesGradient, WeightGradient, WeightPart};
use lowbit_kernels::{Device, KernelError, QuantizedTensor, Tensor};
use lowbit_models::tape::Parameter;

/// A weight in f32, beside its quantised form:
///
/// ```text
/// z = clamp((w - b) / s, 0, levels - 1)     y = s * round(z) + b
/// ```
/// with a scale s and a bias b per group, which are rounded to the format's type where they are used. Rounding is straight through:
/// `y = s * (z + c) + b` is differentiated with `c = round(z) - z` as a constant. Where codes are not learned, they are constants, and there is no w.
///
/// Source: Bengio, Léonard, Courville, "Estimating or Propagating Gradients Through Stochastic Neurons" (2013); Esser et al., "Learned Step Size
/// Quantization" (2020), for the scale's gradient.
#[derive(Clone, Debug)]
pub struct LearnedWeight {
    format: Format,
    shape: Vec<usize>,
    float: FloatType,
    group: usize,
    scales: Learned,
    biases: Learned,
    /// w, and how it is rounded: empty where codes are constants.
    latent: Option<Learned>,
    /// One byte per code, as the weight is now.
    codes: Vec<u8>,
}

impl LearnedWeight {
    /// Of what is to be learned of `weight`, whose values before it was rounded are `original`; `None` for a format that has no scales and biases to learn.
    ///
    /// # Errors
    /// As [`QuantizedTensor::new`], and `original`'s.
    pub fn new(
        weight: &QuantizedTensor,
        learn: Learn,
        original: impl FnOnce() -> Result<Vec<f32>, QuantizeError>,
    ) -> Result<Option<Self>, QuantizeError> {
        let (format, k) = (weight.format(), weight.k());
        let (Format::Affine { .. }, Scales::Group { float, size: group, biased: true }) =
            (format, format.scheme().scales)
        else {
            return Ok(None);
        };
        let floats = |component: usize| {
            let bytes = weight.components()[component].bytes();
            let mut values = vec![0.0; bytes.len() / float.size()];
            float.widen(bytes, &mut values);
            values
        };
        let mut codes = vec![0; weight.rows() * k];
        format.codes(weight.components()[0].bytes(), k, &mut codes)?;
        Ok(Some(Self {
            format,
            shape: weight.shape().to_vec(),
            float,
            group,
            scales: Learned::new(floats(1)),
            biases: Learned::new(floats(2)),
            latent: (learn == Learn::Codes).then(|| original().map(Learned::new)).transpose()?,
            codes,
        }))
    }

    /// All that changes while it learns: numbers, and codes.
    pub fn state(&self) -> (Vec<&Learned>, &[u8]) {
        ([&self.scales, &self.biases].into_iter().chain(&self.latent).collect(), &self.codes)
    }

    /// The same, to be changed.
    pub fn state_mut(&mut self) -> (Vec<&mut Learned>, &mut [u8]) {
        ([&mut self.scales, &mut self.biases].into_iter().chain(&mut self.latent).collect(), &mut self.codes)
    }

    /// How it is quantised.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The parameter that a tape computes with.
    ///
    /// # Errors
    /// As [`QuantizedTensor::new`].
    pub fn parameter(&self, device: &Device) -> Result<Parameter, KernelError> {
        let part = if self.latent.is_some() { WeightPart::Values } else { WeightPart::Scales };
        Ok(Parameter::Weight(self.quantized(device)?, part))
    }

    /// The weight as it is written.
    ///
    /// # Errors
    /// As [`QuantizedTensor::new`].
    pub fn quantized(&self, device: &Device) -> Result<QuantizedTensor, KernelError> {
        let (&k, rows) = self.shape.split_last().expect("a weight has dimensions");
        let tensors =
            self.components().into_iter().zip(self.format.components(k)?).map(|(bytes, component)| {
                let shape = [rows, &[component.columns]].concat();
                Tensor::mapped(bytes.into(), &shape, component.dtype, device)
            });
        QuantizedTensor::new(self.format, &self.shape, tensors.collect::<Result<_, _>>()?)
    }

    /// The bytes of the format's components.
    pub fn components(&self) -> Vec<Vec<u8>> {
        let k = *self.shape.last().expect("a weight has dimensions");
        let mut stream = Vec::with_capacity(self.codes.len() * self.format.scheme().bits / 8);
        let rows = self.codes.chunks_exact(k.max(1));
        rows.for_each(|codes| self.format.scheme().pack_stream(codes, &mut stream));
        let floats = |values: &[f32]| {
            let mut bytes = Vec::with_capacity(values.len() * self.float.size());
            values.iter().for_each(|&value| self.float.push(value, &mut bytes));
            bytes
        };
        vec![stream, floats(&self.scales.values), floats(&self.biases.values)]
    }

    /// Takes a step against `gradient`, and rounds anew.
    pub fn step(&mut self, gradient: &WeightGradient, step: Step) -> Result<(), KernelError> {
        match gradient {
            WeightGradient::Scales(ScalesGradient { dscales, dbiases }) => {
                self.scales.step(dscales.as_slice()?, step);
                if let Some(dbiases) = dbiases {
                    self.biases.step(dbiases.as_slice()?, step);
                }
            }
            WeightGradient::Values(dy) => self.step_straight_through(dy.as_slice()?, step),
        }
        Ok(())
    }

    /// A group's scale and bias as they are used.
    fn rounded(&self, group: usize) -> (f32, f32) {
        (self.float.round(self.scales.values[group]), self.float.round(self.biases.values[group]))
    }

    /// `(w - b) / s`; a group whose scale is 0 has its first code everywhere.
    fn position(w: f32, (s, b): (f32, f32)) -> f32 {
        if s == 0.0 { 0.0 } else { (w - b) / s }
    }

    fn step_straight_through(&mut self, dy: &[f32], step: Step) {
        let Some([dw, dscales, dbiases]) = self.straight_through(dy) else { return };
        self.scales.step(&dscales, step);
        self.biases.step(&dbiases, step);
        let Some(mut latent) = self.latent.take() else { return };
        latent.step(&dw, step);
        let most = self.most();
        let mut codes = std::mem::take(&mut self.codes);
        let groups = codes.chunks_exact_mut(self.group).zip(latent.values.chunks_exact(self.group));
        for (group, (codes, w)) in groups.enumerate() {
            let used = self.rounded(group);
            for (code, &w) in codes.iter_mut().zip(w) {
                *code = Self::position(w, used).round_ties_even().clamp(0.0, most) as u8;
            }
        }
        (self.codes, self.latent) = (codes, Some(latent));
    }

    /// The gradients of w, s and b, from those of y.
    fn straight_through(&self, dy: &[f32]) -> Option<[Vec<f32>; 3]> {
        let latent = self.latent.as_ref()?;
        let (most, groups) = (self.most(), self.scales.values.len());
        let (mut dw, mut dscales, mut dbiases) = (dy.to_vec(), vec![0.0; groups], vec![0.0; groups]);
        let each = dw.chunks_exact_mut(self.group).zip(latent.values.chunks_exact(self.group));
        for (group, (dw, w)) in each.enumerate() {
            let used = self.rounded(group);
            for (dw, &w) in dw.iter_mut().zip(w) {
                let (z, dy) = (Self::position(w, used), *dw);
                if (0.0..=most).contains(&z) {
                    dscales[group] += dy * (z.round_ties_even() - z);
                } else {
                    dscales[group] += dy * z.clamp(0.0, most);
                    dbiases[group] += dy;
                    *dw = 0.0;
                }
            }
        }
        Some([dw, dscales, dbiases])
    }

    /// The greatest code.
    fn most(&self) -> f32 {
        ((1u32 << self.format.scheme().bits) - 1) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: usize = 32;

    /// A weight of two rows, whose values before rounding are taken for `factor` times as large as they were.
    fn learned(bits: usize, learn: Learn, factor: f32) -> (LearnedWeight, QuantizedTensor) {
        let values: Vec<f32> = (0..128).map(|i| ((i * 37 % 101) as f32 - 50.0) / 60.0).collect();
        let format = Format::affine(bits, GROUP, FloatType::BF16).unwrap();
        let device = Device::cpu(Some(1)).unwrap();
        let components = format.encode(&values, 64).unwrap().into_iter().zip(format.components(64).unwrap());
        let tensors = components.map(|(bytes, component)| {
            Tensor::mapped(bytes.into(), &[2, component.columns], component.dtype, &device).unwrap()
        });
        let weight = QuantizedTensor::new(format, &[2, 64], tensors.collect()).unwrap();
        let wide = values.iter().map(|value| value * factor).collect();
        (LearnedWeight::new(&weight, learn, || Ok(wide)).unwrap().unwrap(), weight)
    }

    #[test]
    fn nothing_learned_is_the_same_bytes() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let (learned, weight) = learned(bits, Learn::Scales, 1.0);
            let want: Vec<&[u8]> = weight.components().iter().map(Tensor::bytes).collect();
            assert_eq!(learned.components(), want, "{bits} bits");
        }
    }

    /// `sum of dy * (s (z + c) + b)`, with `z` moved and `c` not.
    fn objective(dy: &[f32], w: &[f64], [s, b]: [f64; 2], c: &[f64], most: f64) -> f64 {
        let terms = dy.iter().zip(w).zip(c);
        terms.map(|((&dy, w), c)| f64::from(dy) * (s * (((w - b) / s).clamp(0.0, most) + c) + b)).sum()
    }

    #[test]
    fn gradients_are_those_of_the_formula() {
        let (learned, _) = learned(3, Learn::Codes, 1.2);
        let dy: Vec<f32> = (0..128).map(|i| ((i * 29 % 17) as f32 - 8.0) / 8.0).collect();
        let [dw, dscales, dbiases] = learned.straight_through(&dy).unwrap();
        let latent: Vec<f64> = learned.latent.as_ref().unwrap().values.iter().map(|&w| w.into()).collect();
        let mut clamped = 0;
        for group in 0..4 {
            let range = group * GROUP..(group + 1) * GROUP;
            let (w, dy) = (&latent[range.clone()], &dy[range.clone()]);
            let (s, b) = learned.rounded(group);
            let [s, b] = [f64::from(s), f64::from(b)];
            let z = |w: &f64| ((w - b) / s).clamp(0.0, 7.0);
            let c: Vec<f64> = w.iter().map(|w| z(w).round_ties_even() - z(w)).collect();
            clamped += w.iter().filter(|w| (**w - b) / s != z(w)).count();
            let step = 1e-6;
            let slope = |by: &dyn Fn(f64) -> f64| (by(step) - by(-step)) / (2.0 * step);
            let of_scale = slope(&|h| objective(dy, w, [s + h, b], &c, 7.0));
            let of_bias = slope(&|h| objective(dy, w, [s, b + h], &c, 7.0));
            let close = |got: f32, want: f64| assert!((f64::from(got) - want).abs() < 1e-4, "{got} {want}");
            close(dscales[group], of_scale);
            close(dbiases[group], of_bias);
            for (i, &got) in dw[range].iter().enumerate() {
                let moved = |h| {
                    let mut w = w.to_vec();
                    w[i] += h;
                    objective(dy, &w, [s, b], &c, 7.0)
                };
                close(got, slope(&moved));
            }
        }
        assert!(clamped > 3, "{clamped} values are beyond the codes");
    }

    #[test]
    fn codes_follow_their_weights() {
        let (mut learned, _) = learned(4, Learn::Codes, 0.9);
        let device = Device::cpu(Some(1)).unwrap();
        let latent = &learned.latent.as_ref().unwrap().values;
        let target: Vec<f32> = latent.iter().enumerate().map(|(i, w)| w + 0.1 * (i as f32).sin()).collect();
        let error = |learned: &LearnedWeight| {
            let weight = learned.quantized(&device).unwrap();
            let mut values = vec![0.0; 128];
            weight.format().decode(&weight.parts(), 2, 64, &mut values).unwrap();
            let errors: Vec<f32> = values.iter().zip(&target).map(|(value, target)| value - target).collect();
            (errors.iter().map(|error| error * error).sum::<f32>(), errors)
        };
        let before = error(&learned).0;
        // The gradient is y less a target.
        for count in 1..=400 {
            let shape = Tensor::new(&error(&learned).1, &[2, 64], &device).unwrap();
            learned.step(&WeightGradient::Values(shape), Step { rate: 3e-4, count }).unwrap();
        }
        let after = error(&learned).0;
        // Codes of 4 bits that lie 0.1 apart are off by 0.1 / sqrt(12), squared and times 128.
        assert!(before > 0.5 && after < 1.5 * 128.0 * 0.01 / 12.0, "{before} {after}");
    }
}
