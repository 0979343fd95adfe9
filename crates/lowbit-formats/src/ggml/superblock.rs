//! Shared by K-quants: the encoding of a superblock's 256 values in sub-blocks whose scales are
//! codes themselves.

use super::F16;
use super::fit::{MinFit, MinSearch, largest, nearest_int};
use crate::BlockScales;

/// `value = scale * scales[s] * code - min * minima[s]`, `COUNT` sub-blocks s.
pub(super) struct WithMinima<const COUNT: usize> {
    pub scale: F16,
    pub min: F16,
    pub scales: [u8; COUNT],
    pub minima: [u8; COUNT],
    pub codes: [u8; 256],
}

impl<const COUNT: usize> WithMinima<COUNT> {
    /// All but the codes.
    pub(super) fn scales(&self) -> BlockScales {
        let mut scales =
            BlockScales { scale: self.scale.bits(), min: self.min.bits(), ..BlockScales::default() };
        for s in 0..COUNT {
            (scales.sub_scales[s], scales.sub_minima[s]) = (self.scales[s] as i8, self.minima[s] as i8);
        }
        scales
    }

    /// Fits each sub-block of `SIZE` values, rounds the scales and minima to codes up to
    /// `max_scale`, and then each value to what these codes say.
    pub(super) fn encode<const SIZE: usize>(
        values: &[f32; 256],
        max_scale: u8,
        search: &MinSearch,
        weights: impl Fn(&[f32; SIZE]) -> [f32; SIZE],
    ) -> Self {
        const { assert!(COUNT * SIZE == 256) };
        let values = values.as_chunks::<SIZE>().0;
        let fits: [MinFit<SIZE>; COUNT] =
            std::array::from_fn(|s| search.fit(&values[s], &weights(&values[s])));
        let (scale, scales) = round_scales(std::array::from_fn(|s| fits[s].scale), max_scale);
        let (min, minima) = round_scales(std::array::from_fn(|s| fits[s].min), max_scale);
        let mut codes = [0; 256];
        for (s, codes) in codes.as_chunks_mut::<SIZE>().0.iter_mut().enumerate() {
            let (scale, min) = (scale.get() * f32::from(scales[s]), min.get() * f32::from(minima[s]));
            // Without a scale every code means the same.
            *codes = if scale == 0.0 {
                fits[s].codes
            } else {
                values[s].map(|value| nearest_int((value + min) / scale).clamp(0, search.max_code) as u8)
            };
        }
        Self { scale, min, scales, minima, codes }
    }
}

/// Codes of scales that are at least 0: the largest becomes `max_code`.
fn round_scales<const COUNT: usize>(scales: [f32; COUNT], max_code: u8) -> (F16, [u8; COUNT]) {
    let largest = scales.iter().fold(0.0, |largest, &scale| if scale > largest { scale } else { largest });
    let inverse = if largest > 0.0 { f32::from(max_code) / largest } else { 0.0 };
    let codes = scales.map(|scale| (nearest_int(inverse * scale) as u8).min(max_code));
    (F16::new(largest / f32::from(max_code)), codes)
}

/// `value = scale * scales[s] * (code - half)`, 16 sub-blocks s of 16.
pub(super) struct Symmetric {
    pub scale: F16,
    pub scales: [i8; 16],
    pub codes: [u8; 256],
}

impl Symmetric {
    /// All but the codes.
    pub(super) fn scales(&self) -> BlockScales {
        BlockScales { scale: self.scale.bits(), sub_scales: self.scales, ..BlockScales::default() }
    }
}

/// The search for [`Symmetric`] scales.
pub(super) struct SymmetricSearch {
    /// The code of value 0.
    pub half: i32,
    /// Scales are codes from `-max_scale` to `max_scale - 1`.
    pub max_scale: i32,
    /// If no scale reaches this, all count as zero.
    pub zero: f32,
    /// Finds a sub-block's scale and codes.
    pub fit: fn(&[f32; 16], i32) -> (f32, [u8; 16]),
}

impl SymmetricSearch {
    /// Fits each sub-block, rounds the scales to codes, and then each value to what these codes
    /// say. `None` where the scales count as zero.
    pub(super) fn encode(&self, values: &[f32; 256]) -> Option<Symmetric> {
        let (half, max_scale) = (self.half, self.max_scale);
        let values = values.as_chunks::<16>().0;
        let fits: [(f32, [u8; 16]); 16] = std::array::from_fn(|s| (self.fit)(&values[s], half));
        let largest = largest(&fits.map(|(scale, _)| scale));
        if largest.abs() < self.zero {
            return None;
        }
        let inverse = -max_scale as f32 / largest;
        let scale = F16::new(1.0 / inverse);
        let scales =
            fits.map(|(scale, _)| nearest_int(inverse * scale).clamp(-max_scale, max_scale - 1) as i8);
        let mut codes = [0; 256];
        for (s, codes) in codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = scale.get() * f32::from(scales[s]);
            // Without a scale every code means the same.
            *codes = if scale == 0.0 {
                fits[s].1
            } else {
                values[s].map(|value| (nearest_int(value / scale).clamp(-half, half - 1) + half) as u8)
            };
        }
        Some(Symmetric { scale, scales, codes })
    }
}

/// Q4_K's and Q5_K's weights of least squares: a value's magnitude, and the root mean square of all
/// of them.
pub(super) fn magnitude_plus_rms(values: &[f32; 32]) -> [f32; 32] {
    let sum: f32 = values.iter().fold(0.0, |sum, value| sum + value * value);
    let rms = (sum / 32.0).sqrt();
    values.map(|value| rms + value.abs())
}
