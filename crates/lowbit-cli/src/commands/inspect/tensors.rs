//! A checkpoint's tensors, as weights: with the scales and biases that belong to them.

use crate::Failure;
use lowbit::{Checkpoint, Format};
use lowbit_files::{Stored, TensorView, shown};
use serde::Serialize;
use std::collections::BTreeMap;

/// One weight, including its scales and biases.
#[derive(Serialize)]
pub struct Weight {
    pub name: String,
    pub format: String,
    pub shape: Vec<usize>,
    pub bytes: u64,
    /// In a device's memory.
    #[serde(skip)]
    loaded: u64,
}

/// Sums over some weights.
#[derive(Serialize, Default)]
pub struct Total {
    pub tensors: usize,
    pub parameters: u64,
    pub bytes: u64,
    /// In a device's memory.
    #[serde(skip)]
    pub loaded: u64,
}

impl Total {
    fn add(&mut self, weight: &Weight) {
        // A tensor with a dimension of 0 may claim any size for the others.
        let count = weight.shape.iter().fold(1u64, |count, &n| count.saturating_mul(n as u64));
        self.tensors += 1;
        self.parameters = self.parameters.saturating_add(count);
        self.bytes += weight.bytes;
        self.loaded = self.loaded.saturating_add(weight.loaded);
    }

    /// Bytes, in bits, by the number of values.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / (self.parameters as f64).max(1.0)
    }
}

/// All weights, in the order of the file.
pub fn all(checkpoint: &Checkpoint) -> Result<Vec<Weight>, Failure> {
    checkpoint.tensors().iter().filter_map(|view| weight(checkpoint, view).transpose()).collect()
}

/// Over all of them.
pub fn sums(weights: &[Weight]) -> Total {
    let mut total = Total::default();
    weights.iter().for_each(|weight| total.add(weight));
    total
}

/// By the name of the format.
pub fn by_format(weights: &[Weight]) -> BTreeMap<String, Total> {
    let mut formats = BTreeMap::<String, Total>::new();
    weights.iter().for_each(|weight| formats.entry(weight.format.clone()).or_default().add(weight));
    formats
}

/// `None` for the scales and biases of an MLX weight: they are counted with it.
fn weight(checkpoint: &Checkpoint, view: &TensorView) -> Result<Option<Weight>, Failure> {
    let tensors = checkpoint.tensors();
    let bytes = |view: &TensorView| view.bytes.len() as u64;
    let (name, mut shape) = (view.name.clone(), view.shape.clone());
    let companion = |suffix: &str| {
        name.strip_suffix(suffix).filter(|module| tensors.get(&format!("{module}.scales")).is_some())
    };
    if companion(".scales").is_some() || companion(".biases").is_some() {
        return Ok(None);
    }
    let Some(module) = companion(".weight") else {
        let (format, bytes) = (view.stored.to_string(), bytes(view));
        let loaded = match view.stored {
            Stored::Blocks(format) => loaded_bytes(format, &shape),
            Stored::Plain(_) => bytes,
        };
        return Ok(Some(Weight { name, format, shape, bytes, loaded }));
    };
    let scales = tensors.get(&format!("{module}.scales")).ok_or("scales are gone")?;
    let quantization = checkpoint.quantization(module)?;
    let quantization = quantization.ok_or_else(|| {
        format!("{} has scales, but config.json does not say how it is quantised", shown(module))
    })?;
    let Stored::Plain(dtype) = scales.stored else {
        let module = shown(module);
        return Err(format!("{module}.scales are {}, but a plain type is wanted", scales.stored).into());
    };
    let format: Format = quantization.format(dtype)?;
    if let Some(k) = shape.last_mut() {
        *k = k.saturating_mul(32) / format.scheme().bits;
    }
    let biases = tensors.get(&format!("{module}.biases")).map_or(0, bytes);
    let bytes = bytes(view) + bytes(scales) + biases;
    Ok(Some(Weight { name: module.to_string(), format: format.to_string(), shape, bytes, loaded: bytes }))
}

/// The bytes of a weight whose blocks are taken apart, as every device does it: codes of some IQ
/// types take more bits then than in a block.
fn loaded_bytes(format: Format, shape: &[usize]) -> u64 {
    let of_256: usize = format.scheme().bytes(256).iter().sum();
    let values = shape.iter().fold(1u128, |count, &n| count.saturating_mul(n as u128));
    u64::try_from(values.saturating_mul(of_256 as u128) / 256).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_take_more_room_in_memory() {
        let bits = |format| loaded_bytes(format, &[64, 256]) as f64 / (64.0 * 256.0 / 8.0);
        assert_eq!(bits(Format::IQ1_S), 4.3125);
        assert_eq!(bits(Format::IQ2_XS), 4.5625);
        assert_eq!(bits(Format::Q4_K), 4.625);
        assert_eq!(bits(Format::Q4_0), 4.5);
        assert_eq!(bits(Format::Q3_K), 3.5625);
    }
}
