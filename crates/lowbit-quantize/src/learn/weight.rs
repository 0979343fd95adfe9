//! A quantised weight that is learned.

use super::Learn;
use super::adam::Learned;
use super::scales::GroupScales;
use crate::QuantizeError;
use lowbit_formats::{Codes, Format, FormatError, Scales};
use lowbit_kernels::ops::{AdamStep, ScalesGradient, WeightGradient, WeightPart};
use lowbit_kernels::{Device, KernelError, QuantizedTensor, Tensor};
use std::sync::Arc;

/// A weight in f32, beside its quantised form:
///
/// ```text
/// z = clamp((w - b) / s + zero, first code, last code)     y = s * (round(z) - zero) + b
/// ```
/// with a scale s and perhaps a bias b per group, which are rounded to what the format has where
/// they are used, and the code of value 0. Rounding is straight through:
/// `y = s * (z + c - zero) + b` is differentiated with `c = round(z) - z` as a constant. Where
/// codes are not learned, they are constants, and there is no w; and so they are in a group whose
/// scale is 0.
///
/// Source: Bengio, Léonard, Courville, "Estimating or Propagating Gradients Through Stochastic
/// Neurons" (2013); Esser et al., "Learned Step Size Quantization" (2020), for the scale's
/// gradient.
#[derive(Clone, Debug)]
pub struct LearnedWeight {
    format: Format,
    shape: Vec<usize>,
    /// Values per group.
    group: usize,
    range: Range,
    scales: GroupScales,
    /// w, and how it is rounded: empty where codes are constants.
    latent: Option<Learned>,
    /// One byte per code, as the weight is now: clones share them until they change.
    codes: Arc<[u8]>,
}

/// The parts of a weight that a model needs to compute with it.
pub enum Packed {
    /// Scales and biases, where codes are constants.
    Scales(Vec<Vec<u8>>),
    /// All of it.
    Weight(QuantizedTensor, WeightPart),
}

/// The codes that values are rounded to.
#[derive(Clone, Copy, Debug)]
struct Range {
    first: f32,
    last: f32,
    /// The code of value 0.
    zero: f32,
}

impl Range {
    fn of(format: Format) -> Self {
        let scheme = format.scheme();
        let Codes::Integer { zero } = scheme.codes else { unreachable!("such a format does not learn") };
        // Q8_0's encoder never makes a -128, and a peer's kernels may take a code's magnitude for a
        // signed byte.
        let first = if zero == 128 { 1.0 } else { 0.0 };
        Self { first, last: ((1u32 << scheme.bits) - 1) as f32, zero: zero as f32 }
    }

    /// `(w - b) / s + zero`, where s is not 0.
    fn position(self, w: f32, [s, b]: [f32; 2]) -> f32 {
        (w - b) / s + self.zero
    }

    fn clamp(self, z: f32) -> f32 {
        z.clamp(self.first, self.last)
    }
}

impl LearnedWeight {
    /// True if a format has scales to learn, and codes that are integers. Those of one or two bits
    /// in GGUF have not all integers that their bits could say.
    pub fn can_learn(format: Format) -> bool {
        let scheme = format.scheme();
        let scaled = matches!(
            scheme.scales,
            Scales::Group { .. } | Scales::Super { .. } | Scales::SuperWithMinima { .. }
        );
        let few = matches!(format, Format::TQ1_0 | Format::TQ2_0 | Format::Q1_0 | Format::Q2_0);
        scaled && !few && matches!(scheme.codes, Codes::Integer { .. })
    }

    /// The part of `weight` that is learned; its values before it was rounded are `original`.
    ///
    /// # Errors
    /// As [`QuantizedTensor::new`], and `original`'s.
    ///
    /// # Panics
    /// For a format that [cannot](Self::can_learn) be learned.
    pub fn new(
        weight: &QuantizedTensor,
        learn: Learn,
        original: impl FnOnce() -> Result<Vec<f32>, QuantizeError>,
    ) -> Result<Self, QuantizeError> {
        let format = weight.format();
        let components: Vec<&[u8]> = weight.components().iter().map(Tensor::bytes).collect();
        let (scales, range) = (GroupScales::new(format, &components), Range::of(format));
        let group = format.scheme().group_size().expect("a format that learns has groups");
        let mut codes = vec![0; weight.rows() * weight.k()];
        format.codes(components[0], weight.k(), &mut codes)?;
        let latent = (learn == Learn::Codes).then(|| original().map(Learned::new)).transpose()?;
        Ok(Self { format, shape: weight.shape().to_vec(), group, range, scales, latent, codes: codes.into() })
    }

    /// Its numbers, which with its components are all that changes while it learns.
    pub fn learned(&self) -> impl Iterator<Item = &Learned> {
        self.scales.learned().chain(&self.latent)
    }

    /// The same, to be changed.
    pub fn learned_mut(&mut self) -> impl Iterator<Item = &mut Learned> {
        self.scales.learned_mut().chain(&mut self.latent)
    }

    /// One byte per code: the same memory for as long as no code changes.
    pub fn codes(&self) -> &Arc<[u8]> {
        &self.codes
    }

    /// True if all that is learned of it are floats that the format has by themselves.
    pub fn has_floats_alone(&self) -> bool {
        self.latent.is_none() && self.scales.are_apart()
    }

    /// Rounds scales anew, whose numbers were changed.
    pub fn round_scales(&mut self) {
        self.scales.round();
    }

    /// Its format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The length of a row.
    fn k(&self) -> usize {
        *self.shape.last().expect("a weight has dimensions")
    }

    /// The parts that a model needs to compute with it; whole weights are on `host`.
    ///
    /// # Errors
    /// As [`QuantizedTensor::new`].
    pub fn packed(&self, host: &Device) -> Result<Packed, KernelError> {
        match (&self.latent, self.scales.pack_floats()) {
            (Some(_), _) => Ok(Packed::Weight(self.quantized(host)?, WeightPart::Values)),
            (None, Some(scales)) => Ok(Packed::Scales(scales)),
            (None, None) => Ok(Packed::Weight(self.quantized(host)?, WeightPart::Scales)),
        }
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
        self.scales.pack(&self.codes, self.k())
    }

    /// The number of bytes of each component.
    ///
    /// # Errors
    /// None: the weight is made of them.
    pub fn component_bytes(&self) -> Result<Vec<usize>, FormatError> {
        let rows = self.codes.len().checked_div(self.k()).unwrap_or(0);
        let components = self.format.components(self.k())?;
        Ok(components.iter().map(|component| rows * component.row_bytes()).collect())
    }

    /// The inverse of [`Self::components`]: takes over codes, and scales as they are used.
    ///
    /// # Errors
    /// As [`Format::codes`].
    ///
    /// # Panics
    /// When they have other lengths than [`Self::component_bytes`].
    pub fn set_components(&mut self, components: &[&[u8]]) -> Result<(), FormatError> {
        self.format.codes(components[0], self.k(), Arc::make_mut(&mut self.codes))?;
        self.scales.set(components);
        Ok(())
    }

    /// Takes a step against `gradient`, and rounds anew.
    pub fn step(&mut self, gradient: &WeightGradient, step: AdamStep) -> Result<(), KernelError> {
        match gradient {
            WeightGradient::Scales(ScalesGradient { dscales, dbiases }) => {
                let dbiases = dbiases.as_ref().map(Tensor::as_slice).transpose()?;
                self.scales.step(dscales.as_slice()?, dbiases, step);
            }
            WeightGradient::Values(dy) => self.step_straight_through(dy.as_slice()?, step),
        }
        Ok(())
    }

    fn step_straight_through(&mut self, dy: &[f32], step: AdamStep) {
        let Some([dw, dscales, dbiases]) = self.straight_through(dy) else { return };
        self.scales.step(&dscales, Some(&dbiases), step);
        let Some(latent) = &mut self.latent else { return };
        latent.step(&dw, step);
        let groups = Arc::make_mut(&mut self.codes)
            .chunks_exact_mut(self.group)
            .zip(latent.values.chunks_exact(self.group));
        for ((codes, w), &used) in groups.zip(self.scales.used()) {
            if used[0] == 0.0 {
                continue;
            }
            for (code, &w) in codes.iter_mut().zip(w) {
                *code = self.range.clamp(self.range.position(w, used).round_ties_even()) as u8;
            }
        }
    }

    /// The gradients of w, s and b, from those of y.
    fn straight_through(&self, dy: &[f32]) -> Option<[Vec<f32>; 3]> {
        let (latent, range) = (self.latent.as_ref()?, self.range);
        let groups = self.scales.used().len();
        let (mut dw, mut dscales, mut dbiases) = (dy.to_vec(), vec![0.0; groups], vec![0.0; groups]);
        let each = dw.chunks_exact_mut(self.group).zip(latent.values.chunks_exact(self.group));
        for (group, (dw, w)) in each.enumerate() {
            let (used, codes) = (self.scales.used()[group], &self.codes[group * self.group..]);
            for ((dw, &w), &code) in dw.iter_mut().zip(w).zip(codes) {
                let (z, dy) = (range.position(w, used), *dw);
                let constant = match used[0] {
                    0.0 => Some(f32::from(code)),
                    _ => (z != range.clamp(z)).then(|| range.clamp(z)),
                };
                match constant {
                    None => dscales[group] += dy * (z.round_ties_even() - z),
                    Some(code) => {
                        dscales[group] += dy * (code - range.zero);
                        dbiases[group] += dy;
                        *dw = 0.0;
                    }
                }
            }
        }
        Some([dw, dscales, dbiases])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowbit_formats::FloatType;

    /// Those that learn, of all kinds of scales and numbers of bits.
    fn formats() -> Vec<Format> {
        use Format::{Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
        let affine = |bits| Format::affine(bits, 32, FloatType::BF16).unwrap();
        let blocks = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K];
        [2, 3, 4, 5, 6, 8].map(affine).into_iter().chain(blocks).collect()
    }

    const K: usize = 256;

    /// A weight of two rows, whose values before rounding are taken for `factor` times as large as
    /// they were.
    fn learned(format: Format, learn: Learn, factor: f32) -> (LearnedWeight, QuantizedTensor) {
        let values: Vec<f32> = (0..2 * K).map(|i| ((i * 37 % 101) as f32 - 50.0) / 60.0).collect();
        let device = Device::cpu(Some(1)).unwrap();
        let components = format.encode(&values, K).unwrap().into_iter().zip(format.components(K).unwrap());
        let tensors = components.map(|(bytes, component)| {
            Tensor::mapped(bytes.into(), &[2, component.columns], component.dtype, &device).unwrap()
        });
        let weight = QuantizedTensor::new(format, &[2, K], tensors.collect()).unwrap();
        let wide = values.iter().map(|value| value * factor).collect();
        (LearnedWeight::new(&weight, learn, || Ok(wide)).unwrap(), weight)
    }

    #[test]
    fn nothing_learned_is_the_same_bytes() {
        for format in formats() {
            assert!(LearnedWeight::can_learn(format), "{format}");
            let (mut learned, weight) = learned(format, Learn::Scales, 1.0);
            let want: Vec<&[u8]> = weight.components().iter().map(Tensor::bytes).collect();
            assert_eq!(learned.components(), want, "{format}");
            assert_eq!(learned.component_bytes().unwrap(), want.iter().map(|x| x.len()).collect::<Vec<_>>());
            // Nor are they others after a step that is too short to change a float.
            let groups = learned.scales.used().len();
            let zeros = vec![0.0; groups];
            learned.scales.step(&zeros, Some(&zeros), AdamStep { rate: 1e-3, count: 1 });
            assert_eq!(learned.components(), want, "{format}");
        }
        let others = Format::all()
            .filter(|other| !formats().iter().any(|format| format.unpack().is_some() && format == other));
        for format in others.filter(|format| !matches!(format, Format::Affine { .. })) {
            assert!(!LearnedWeight::can_learn(format), "{format}");
        }
    }

    /// `sum of dy * (s (z + c - zero) + b)`, with `z` moved and `c` not.
    fn objective(dy: &[f32], w: &[f64], [s, b]: [f64; 2], c: &[f64], range: Range) -> f64 {
        let zero = f64::from(range.zero);
        let z = |w: &f64| ((w - b) / s + zero).clamp(range.first.into(), range.last.into());
        let terms = dy.iter().zip(w).zip(c);
        terms.map(|((&dy, w), c)| f64::from(dy) * (s * (z(w) + c - zero) + b)).sum()
    }

    #[test]
    fn gradients_are_those_of_the_formula() {
        for format in
            [Format::affine(3, 32, FloatType::BF16).unwrap(), Format::Q4_0, Format::Q3_K, Format::Q4_K]
        {
            let (learned, _) = learned(format, Learn::Codes, 1.2);
            let dy: Vec<f32> = (0..2 * K).map(|i| ((i * 29 % 17) as f32 - 8.0) / 8.0).collect();
            let [dw, dscales, dbiases] = learned.straight_through(&dy).unwrap();
            let latent: Vec<f64> =
                learned.latent.as_ref().unwrap().values.iter().map(|&w| w.into()).collect();
            let (mut clamped, range) = (0, learned.range);
            for (group, used) in learned.scales.used().iter().enumerate() {
                let each = group * learned.group..(group + 1) * learned.group;
                let (w, dy) = (&latent[each.clone()], &dy[each.clone()]);
                let [s, b] = used.map(f64::from);
                let free = |w: &f64| (w - b) / s + f64::from(range.zero);
                let z = |w: &f64| free(w).clamp(range.first.into(), range.last.into());
                let c: Vec<f64> = w.iter().map(|w| z(w).round_ties_even() - z(w)).collect();
                clamped += w.iter().filter(|w| free(w) != z(w)).count();
                let step = 1e-6;
                let slope = |by: &dyn Fn(f64) -> f64| (by(step) - by(-step)) / (2.0 * step);
                let of_scale = slope(&|h| objective(dy, w, [s + h, b], &c, range));
                let of_bias = slope(&|h| objective(dy, w, [s, b + h], &c, range));
                let close = |got: f32, want: f64| {
                    assert!((f64::from(got) - want).abs() < 1e-4, "{format}: {got} {want}");
                };
                close(dscales[group], of_scale);
                close(dbiases[group], of_bias);
                for (i, &got) in dw[each].iter().enumerate() {
                    let moved = |h| {
                        let mut w = w.to_vec();
                        w[i] += h;
                        objective(dy, &w, [s, b], &c, range)
                    };
                    close(got, slope(&moved));
                }
            }
            assert!(clamped > 3, "{format}: {clamped} values are beyond the codes");
        }
    }

    /// The squared error against a target, and the gradient of half of it.
    fn error(learned: &LearnedWeight, target: &[f32], device: &Device) -> (f32, Vec<f32>) {
        let weight = learned.quantized(device).unwrap();
        let mut values = vec![0.0; 2 * K];
        weight.format().decode(&weight.parts(), 2, K, &mut values).unwrap();
        let errors: Vec<f32> = values.iter().zip(target).map(|(value, target)| value - target).collect();
        (errors.iter().map(|error| error * error).sum(), errors)
    }

    #[test]
    fn codes_follow_their_weights() {
        let device = Device::cpu(Some(1)).unwrap();
        // Two bits are as far from any target as from this one.
        for format in formats().into_iter().filter(|format| format.scheme().bits > 2) {
            let (mut learned, _) = learned(format, Learn::Codes, 0.9);
            let latent = &learned.latent.as_ref().unwrap().values;
            let target: Vec<f32> =
                latent.iter().enumerate().map(|(i, w)| w + 0.1 * (i as f32).sin()).collect();
            let before = error(&learned, &target, &device).0;
            for count in 1..=400 {
                let shape = Tensor::new(&error(&learned, &target, &device).1, &[2, K], &device).unwrap();
                learned.step(&WeightGradient::Values(shape), AdamStep { rate: 3e-4, count }).unwrap();
            }
            let after = error(&learned, &target, &device).0;
            // Codes that lie 1.7 / 2^bits apart are off by that / sqrt(12), squared and for each
            // value.
            let step = 1.7 / 2f32.powi(format.scheme().bits as i32);
            let rounding = step * step / 12.0 * 2.0 * K as f32;
            // Steps of a fixed length stay a little away, which shows where codes are fine or
            // scales are few.
            let coarse = matches!(format, Format::Affine { bits: ..=5, .. });
            let most = 1.5 * rounding + if coarse { 0.0 } else { 0.15 };
            assert!(before > 2.0 && after < most, "{format}: {before} {after} {most}");
        }
    }

    #[test]
    fn scales_follow_their_gradients() {
        let device = Device::cpu(Some(1)).unwrap();
        for format in formats() {
            let (mut learned, _) = learned(format, Learn::Scales, 1.0);
            let (size, scheme) = (learned.group, format.scheme());
            let rounded = learned.scales.used().to_vec();
            // The values of the codes with scales and biases that are a tenth off.
            let values = scheme.code_values().unwrap();
            let target: Vec<f32> = learned
                .codes
                .iter()
                .enumerate()
                .map(|(i, &code)| {
                    let [scale, bias] = rounded[i / size];
                    let factor = |phase: f32| 1.0 + 0.1 * ((i / size) as f32 + phase).sin();
                    values[usize::from(code)] * scale * factor(0.0) + bias * factor(1.0)
                })
                .collect();
            let before = error(&learned, &target, &device).0;
            for count in 1..=300 {
                let errors = error(&learned, &target, &device).1;
                let groups = || errors.chunks_exact(size).zip(learned.codes.chunks_exact(size));
                let dscales: Vec<f32> = groups()
                    .map(|(dy, codes)| {
                        dy.iter().zip(codes).map(|(dy, &code)| dy * values[usize::from(code)]).sum()
                    })
                    .collect();
                let dbiases: Vec<f32> = groups().map(|(dy, _)| dy.iter().sum()).collect();
                let rate = 0.02 * rounded[0][0].abs();
                learned.scales.step(&dscales, Some(&dbiases), AdamStep { rate, count });
            }
            let after = error(&learned, &target, &device).0;
            println!("{format}: {before} {after}");
            // Q2_K's scales are 16 integers.
            let allowed = if format == Format::Q2_K { 0.3 } else { 0.15 };
            assert!(after < allowed * before, "{format}: {before} {after}");
        }
    }
}
