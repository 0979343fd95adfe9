//! Reproducible operands for tests and benchmarks.

use crate::random::Random;
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use lowbit_formats::{DType, FloatType, Format};

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
    let values = Random::new(seed).normal(rows.min(DISTINCT) * k, 1.0 / (k.max(1) as f32).sqrt());
    let mut components = Vec::new();
    for (component, encoded) in format.components(k)?.iter().zip(format.encode(&values, k)?) {
        let len = rows * component.row_bytes();
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            bytes.extend(&encoded[..encoded.len().min(len - bytes.len())]);
        }
        components.push(Tensor::mapped(bytes.into(), &[rows, component.columns], component.dtype, device)?);
    }
    QuantizedTensor::new(format, shape, components)
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
