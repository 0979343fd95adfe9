//! Adam's averages of numbers that learn, and the length of its steps.

use lowbit_kernels::ops::{AdamStep, adam_slices};

/// Numbers that are learned, f32, with the averages that Adam keeps of their gradients and of the
/// squares of these.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    pub values: Vec<f32>,
    pub mean: Vec<f32>,
    pub square: Vec<f32>,
}

impl Learned {
    pub fn new(values: Vec<f32>) -> Self {
        let zeros = vec![0.0; values.len()];
        Self { mean: zeros.clone(), square: zeros, values }
    }

    pub fn step(&mut self, gradient: &[f32], step: AdamStep) {
        adam_slices([&mut self.values, &mut self.mean, &mut self.square], gradient, step);
    }
}

/// The rate of step `count`, from 1, of `steps`: it rises for the first `warmup` steps, and falls
/// along a cosine, which would be 0 at the step after the last.
pub fn rate(peak: f32, count: u32, warmup: u32, steps: u32) -> f32 {
    if count <= warmup {
        return peak * count as f32 / warmup as f32;
    }
    let done = f64::from(count - warmup) / f64::from(steps - warmup + 1);
    peak * (0.5 + 0.5 * (std::f64::consts::PI * done).cos()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_and_falls() {
        let rates: Vec<f32> = (1..=9).map(|count| rate(2.0, count, 4, 9)).collect();
        assert_eq!(rates[..4], [0.5, 1.0, 1.5, 2.0]);
        assert!(rates[3..].windows(2).all(|pair| pair[1] < pair[0]) && rates[8] > 0.0, "{rates:?}");
        assert!((rates[6] - 1.0).abs() < 1e-6, "half way: {rates:?}");
        assert!(rate(1.0, 1, 0, 1) > 0.0);
    }
}
