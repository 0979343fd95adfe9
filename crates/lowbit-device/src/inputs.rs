//! Reproducible operands for tests and benchmarks.

use crate::random::Random;
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use lowbit_formats::{BlockScales, Component, DType, FloatType, Format};

/// The formats of these names; affine with bf16 scales.
pub fn formats(names: &[&str]) -> Vec<Format> {
    Format::all().filter(|format| names.contains(&format.to_string().as_str())).collect()
}

/// Distinct rows of a [`weight`]: making more would take longer than using them. No tile's width
/// divides it, so that a misplaced row shows.
pub const DISTINCT: usize = 61;

/// A weight of `shape`, `[.., N, K]`, whose values are roughly normal with variance 1/K. Row `i`
/// equals row `i % DISTINCT`.
pub fn weight(
    format: Format,
    shape: &[usize],
    seed: u64,
    device: &Device,
) -> Result<QuantizedTensor, KernelError> {
    let k = shape.last().copied().unwrap_or(0);
    let rows: usize = shape.iter().rev().skip(1).product();
    let (distinct, deviation) = (rows.min(DISTINCT), 1.0 / (k.max(1) as f32).sqrt());
    let encoded = if format.encodes() {
        format.encode(&Random::new(seed).normal(distinct * k, deviation), k)?
    } else {
        vec![random_blocks(format, distinct * k, deviation, seed)?]
    };
    let mut components = Vec::new();
    for (component, encoded) in format.components(k)?.iter().zip(encoded) {
        let len = rows * component.row_bytes();
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            bytes.extend(&encoded[..encoded.len().min(len - bytes.len())]);
        }
        components.push(Tensor::mapped(bytes.into(), &[rows, component.columns], component.dtype, device)?);
    }
    QuantizedTensor::new(format, shape, components)
}

/// Blocks of a format that has no encoder, IQ1, IQ2 or IQ3: random points, signs and integers, and
/// a scale with which `values` values deviate from 0 by `deviation`, roughly.
fn random_blocks(format: Format, values: usize, deviation: f32, seed: u64) -> Result<Vec<u8>, KernelError> {
    let (mut random, scheme) = (Random::new(seed), format.scheme());
    let bytes = format.components(format.block())?.iter().map(Component::row_bytes).sum();
    // Integers are odd and uniform up to the greatest.
    let integer = f32::from(format.sub_scales()[1]) / 2.0;
    let entries = scheme.code_values().into_iter().flatten().take(1 << scheme.bits);
    let squares: Vec<f32> = entries.filter(|&x| x != 0.0).map(|x| x * x).collect();
    let entry = (squares.iter().sum::<f32>() / squares.len().max(1) as f32).sqrt();
    let scale = BlockScales::of(deviation / (integer * entry), 0.0).scale;
    let mut blocks: Vec<u8> = (0..values / format.block() * bytes).map(|_| random.below(256) as u8).collect();
    for block in blocks.chunks_exact_mut(bytes) {
        if format == Format::IQ1_M {
            // A digit in the upper half of each of the last four words.
            for digit in 0..4 {
                let high = &mut block[48 + 2 * digit + 1];
                *high = *high & 15 | ((scale >> (4 * digit)) as u8 & 15) << 4;
            }
        } else {
            block[..2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    Ok(blocks)
}

/// As many copies of `weight` as asked for, each in its own memory.
pub fn copies(weight: &QuantizedTensor, count: usize) -> Result<Vec<QuantizedTensor>, KernelError> {
    let copy = |_| {
        let components = weight.components().iter().map(copy);
        QuantizedTensor::new(weight.format(), weight.shape(), components.collect::<Result<_, _>>()?)
    };
    (0..count).map(copy).collect()
}

/// `x` in its own memory.
pub fn copy(x: &Tensor) -> Result<Tensor, KernelError> {
    Tensor::mapped(x.bytes().to_vec().into(), x.shape(), x.dtype(), x.device())
}

/// Activations of `shape`, roughly standard normal, of `dtype`.
pub fn activations(
    shape: &[usize],
    dtype: FloatType,
    seed: u64,
    device: &Device,
) -> Result<Tensor, KernelError> {
    let values = Random::new(seed).normal(shape.iter().product(), 1.0);
    Tensor::new(&values, shape, device)?.cast(dtype.dtype())
}

/// [`activations`] on `device`, and their values where the host can read them.
pub fn operand(
    shape: &[usize],
    dtype: FloatType,
    seed: u64,
    device: &Device,
) -> Result<(Tensor, Vec<f32>), KernelError> {
    let x = activations(shape, dtype, seed, &device.host()?)?;
    Ok((x.to_device(device)?, x.cast(DType::F32)?.as_slice()?.to_vec()))
}

/// The most that rounding a result of magnitude `value` to `dtype` can change it; nothing for f32,
/// whose rounding is part of the sums' own bound.
pub fn rounding(dtype: FloatType, value: f64) -> f64 {
    // Half a unit in the last place, and half the smallest subnormal.
    let (relative, absolute) = match dtype {
        FloatType::F32 => (0.0, 0.0),
        FloatType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        FloatType::BF16 => (2f64.powi(-8), 2f64.powi(-134)),
    };
    value.abs() * relative + absolute
}
