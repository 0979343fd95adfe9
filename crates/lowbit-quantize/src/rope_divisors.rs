//! Llama 3's scaling of the rotary embedding, which GGUF has as divisors of the frequencies
//! (`rope_freqs.weight`).
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `conversion/llama.py`, `generate_extra_tensors`.

/// The parameters, as `config.json` names them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3 {
    pub factor: f32,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_max_position_embeddings: f64,
}

impl Llama3 {
    /// The divisors of the frequencies `theta^(-2 i / dim)`.
    pub fn divisors(&self, theta: f64, dim: usize) -> Vec<f32> {
        let Self { factor, low_freq_factor: low, high_freq_factor: high, .. } = *self;
        let original = self.original_max_position_embeddings;
        let divisor = |pair: usize| {
            let exponent = (2 * pair) as f32 / dim as f32;
            let frequency = 1.0 / (theta.powf(exponent.into()) as f32);
            let wavelength = std::f32::consts::TAU / frequency;
            if f64::from(wavelength) < original / high {
                1.0
            } else if f64::from(wavelength) > original / low {
                factor
            } else {
                let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        (0..dim / 2).map(divisor).collect()
    }

    /// The parameters that give `divisors`; `None` where none of those do that models are published
    /// with: factors of 1 and 4, and an original context of a power of two, Llama's 8192 if several
    /// fit.
    pub fn from_divisors(divisors: &[f32], theta: f64) -> Option<Self> {
        let factor = divisors.iter().copied().fold(1.0, f32::max);
        let contexts = [13].into_iter().chain(4..=24).map(|power| f64::from(1u32 << power));
        let with = |original_max_position_embeddings| Self {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings,
        };
        contexts.map(with).find(|candidate| {
            let own = candidate.divisors(theta, 2 * divisors.len());
            // Far more than f32's rounding, and far less than another power of two makes of a pair
            // between the two factors.
            own.iter().zip(divisors).all(|(own, divisor)| (own - divisor).abs() <= 1e-4 * divisor)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_again() {
        for (factor, theta, original) in [(8.0, 5e5, 8192.0), (32.0, 5e5, 8192.0), (4.0, 1e4, 64.0)] {
            let (low_freq_factor, high_freq_factor) = (1.0, 4.0);
            let llama3 = Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            };
            let mut divisors = llama3.divisors(theta, 128);
            assert!(divisors.iter().any(|&divisor| divisor > 1.0 && divisor < factor));
            assert_eq!(Llama3::from_divisors(&divisors, theta), Some(llama3));
            divisors[40] *= 1.01;
            assert_eq!(Llama3::from_divisors(&divisors, theta), None);
        }
        let other = Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 8.0,
            original_max_position_embeddings: 8192.0,
        };
        assert_eq!(Llama3::from_divisors(&other.divisors(5e5, 128), 5e5), None);
    }
}
