use super::RouterParams;

/// One expert of a token: its id, its weight in f64, and how far f32 may be from that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    pub id: u32,
    pub weight: f64,
    pub bound: f64,
}

/// One token's experts. In `e^(x - max)` the difference rounds once, which the exponential makes a
/// relative error of `|x - max| u`, and the exponential is within 2 u; a sum of `n` terms rounds
/// `n` times, the quotient once.
pub(crate) fn router_top_k(logits: &[f32], params: RouterParams) -> Vec<Choice> {
    const U: f64 = f32::EPSILON as f64 / 2.0;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let logit = |id: u32| f64::from(logits[id as usize]);
    order.sort_by(|&a, &b| logit(b).partial_cmp(&logit(a)).expect("no NaN").then(a.cmp(&b)));
    let max = logit(order[0]);
    let exp = |id: u32| (logit(id) - max).exp();
    // Minus infinity contributes nothing, exactly.
    let error = |id: u32| if exp(id) == 0.0 { 0.0 } else { exp(id) * (2.0 + max - logit(id)) * U };
    let summed = if params.normalize { &order[..params.top_k] } else { &order[..] };
    let sum: f64 = summed.iter().map(|&id| exp(id)).sum();
    let sum_error = summed.iter().map(|&id| error(id)).sum::<f64>() / sum + summed.len() as f64 * U;
    let choice = |&id: &u32| {
        let weight = exp(id) / sum;
        let bound = error(id) / sum + weight * (sum_error + U) + f64::from(f32::MIN_POSITIVE);
        Choice { id, weight, bound }
    };
    order[..params.top_k].iter().map(choice).collect()
}
