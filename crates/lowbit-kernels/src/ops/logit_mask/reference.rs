/// The masked logits, token by token.
pub(super) fn masked(logits: &[f32], bits: &[u32]) -> Vec<f64> {
    let is_allowed = |id: usize| (bits[id / 32] >> (id % 32)) % 2 == 1;
    let masked = |(id, &logit): (usize, &f32)| match is_allowed(id) {
        true => f64::from(logit),
        false => f64::NEG_INFINITY,
    };
    logits.iter().enumerate().map(masked).collect()
}
