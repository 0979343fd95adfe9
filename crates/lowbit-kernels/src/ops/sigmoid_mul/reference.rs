/// Roundings to a result: the sigmoid is within 2.5 ulp, the product is one more.
pub(crate) const ROUNDINGS: usize = 6;

/// `x * sigmoid(gate)`; `gate` has one value for each `x.len() / gate.len()` of x.
pub(crate) fn sigmoid_mul(x: &[f32], gate: &[f32]) -> Vec<f64> {
    let width = x.len() / gate.len();
    x.iter().enumerate().map(|(i, &x)| f64::from(x) / (1.0 + (-f64::from(gate[i / width])).exp())).collect()
}
