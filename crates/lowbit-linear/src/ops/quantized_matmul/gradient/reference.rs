//! The gradients in f64, as their formulas say, each with the sum of its terms' magnitudes: any
//! order of an f32 sum of `t` terms stays within `gamma(t)` times that (and a rounding more where
//! terms are products of three).

/// Values, and what the terms of each come to without cancelling.
#[derive(Clone, Debug, Default)]
pub(in crate::ops) struct Sums {
    pub values: Vec<f64>,
    pub magnitudes: Vec<f64>,
}

impl Sums {
    /// Adds the sum of `terms`.
    pub fn push(&mut self, terms: impl Iterator<Item = f64>) {
        let (value, magnitude) = terms.fold((0.0, 0.0), |(v, m), term| (v + term, m + term.abs()));
        self.values.push(value);
        self.magnitudes.push(magnitude);
    }
}

/// `dx[m, k] = sum over n of dy[m, n] * weight[n, k]`.
pub(in crate::ops) fn backward_x(dy: &[f32], weight: &[f32], k: usize) -> Sums {
    let n = weight.len() / k;
    let mut dx = Sums::default();
    for dy in dy.chunks_exact(n) {
        for column in 0..k {
            dx.push((0..n).map(|n| f64::from(dy[n]) * f64::from(weight[n * k + column])));
        }
    }
    dx
}

/// `dweight[n, k] = sum over m of dy[m, n] * x[m, k]`.
pub(in crate::ops) fn backward_weight(x: &[f32], dy: &[f32], (n, k): (usize, usize)) -> Sums {
    let m = dy.len() / n;
    let mut dweight = Sums::default();
    for row in 0..n {
        for column in 0..k {
            dweight.push((0..m).map(|m| f64::from(dy[m * n + row]) * f64::from(x[m * k + column])));
        }
    }
    dweight
}

/// `[dscales, dbiases]` of groups of `group` values, from the gradient of the values and each
/// code's value, both `[n, k]`.
pub(in crate::ops) fn backward_scales(dweight: &Sums, codes: &[f64], group: usize) -> [Sums; 2] {
    let sum = |value: &dyn Fn(usize) -> f64| {
        let mut sums = Sums::default();
        for first in (0..codes.len()).step_by(group) {
            let range = first..first + group;
            sums.values.push(range.clone().map(|i| dweight.values[i] * value(i)).sum());
            sums.magnitudes.push(range.map(|i| dweight.magnitudes[i] * value(i).abs()).sum());
        }
        sums
    };
    [sum(&|i| codes[i]), sum(&|_| 1.0)]
}
