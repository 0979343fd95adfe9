/// The sums in f64. `biases` may have an id several times.
pub(super) fn sums(logits: &[f32], biases: &[(u32, f32)]) -> Vec<f64> {
    let mut sums: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for &(id, bias) in biases {
        sums[id as usize] += f64::from(bias);
    }
    sums
}
