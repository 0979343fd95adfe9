//! Adam with bias correction. Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), algorithm 1.

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;
const EPS: f32 = 1e-8;

/// Numbers that are learned, f32, with the averages that Adam keeps of their gradients and of the squares of these.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    pub values: Vec<f32>,
    pub mean: Vec<f32>,
    pub square: Vec<f32>,
}

/// One step of all numbers that are learned.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// How far a number moves whose gradient has been the same for long.
    pub rate: f32,
    /// Steps taken so far, with this one: from 1.
    pub count: u32,
}

impl Learned {
    pub fn new(values: Vec<f32>) -> Self {
        let zeros = vec![0.0; values.len()];
        Self { mean: zeros.clone(), square: zeros, values }
    }

    pub fn step(&mut self, gradient: &[f32], step: Step) {
        let unbias = |beta: f32| 1.0 / (1.0 - f64::from(beta).powi(step.count as i32)) as f32;
        let (mean_factor, square_factor) = (unbias(BETA1), unbias(BETA2));
        let averages = self.mean.iter_mut().zip(&mut self.square);
        for ((value, (mean, square)), &gradient) in self.values.iter_mut().zip(averages).zip(gradient) {
            *mean = BETA1 * *mean + (1.0 - BETA1) * gradient;
            *square = BETA2 * *square + (1.0 - BETA2) * gradient * gradient;
            *value -= step.rate * (*mean * mean_factor) / ((*square * square_factor).sqrt() + EPS);
        }
    }
}

/// The rate of step `count`, from 1, of `steps`: it rises for the first `warmup` steps, and falls along
/// a cosine, which would be 0 at the step after the last.
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

    /// The values are torch 2.15's: `torch.optim.Adam([x], lr=0.1)` with these gradients.
    #[test]
    fn steps_are_torchs() {
        let mut learned = Learned::new(vec![1.0, -2.0, 0.5]);
        for (count, gradient) in (1..).zip([[0.1, -4.0, 0.0], [0.3, 1.0, 1e-4], [-0.2, 2.0, -1e-6]]) {
            learned.step(&gradient, Step { rate: 0.1, count });
        }
        let want: [f32; 3] = [0.782_431_5, -1.848_309_9, 0.368_726_67];
        for (got, want) in learned.values.iter().zip(want) {
            assert!((got - want).abs() <= 4.0 * f32::EPSILON * want.abs(), "{:?} {want:?}", learned.values);
        }
    }

    #[test]
    fn the_rate_rises_and_falls() {
        let rates: Vec<f32> = (1..=9).map(|count| rate(2.0, count, 4, 9)).collect();
        assert_eq!(rates[..4], [0.5, 1.0, 1.5, 2.0]);
        assert!(rates[3..].windows(2).all(|pair| pair[1] < pair[0]) && rates[8] > 0.0, "{rates:?}");
        assert!((rates[6] - 1.0).abs() < 1e-6, "half way: {rates:?}");
        assert!(rate(1.0, 1, 0, 1) > 0.0);
    }
}
