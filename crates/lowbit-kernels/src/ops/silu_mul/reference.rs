/// Roundings to a result: silu is within 3.5 ulp, the product is one more.
pub(crate) const ROUNDINGS: usize = 8;

/// `silu(gate) * up`.
pub(crate) fn silu_mul(gate: &[f32], up: &[f32]) -> Vec<f64> {
    gate.iter().zip(up).map(|(&gate, &up)| silu(f64::from(gate)) * f64::from(up)).collect()
}

/// `x / (1 + e^-x)`.
pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
