use super::SampleParams;

/// The ids that may be drawn with their probabilities, in their order: everything sorted, summed in
/// f64.
pub(crate) fn distribution(logits: &[f32], history: &[u32], params: &SampleParams) -> Vec<(u32, f64)> {
    let penalty = f64::from(params.repetition_penalty);
    let mut sorted: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect();
    for (id, logit) in &mut sorted {
        let count = history.iter().filter(|other| *other == id).count();
        if count > 0 {
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            *logit -= count as f64 * f64::from(params.frequency_penalty) + f64::from(params.presence_penalty);
        }
    }
    // Stable: ids that tie stay in order.
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
    let max = sorted[0].1;
    let p = |logit: f64| (logit - max).exp();
    let total: f64 = sorted.iter().map(|&(_, logit)| p(logit)).sum();
    let mut threshold = max;
    let mut above = 0.0;
    for &(_, logit) in &sorted {
        if params.top_p < 1.0 && above >= f64::from(params.top_p) * total {
            break;
        }
        threshold = logit;
        above += p(logit);
    }
    sorted.retain(|&(_, logit)| logit >= threshold && p(logit) >= f64::from(params.min_p));
    if params.top_k > 0 {
        sorted.truncate(params.top_k);
    }
    sorted.sort_by_key(|&(id, _)| id);
    let weight = |logit: f64| ((logit - max) / f64::from(params.temperature)).exp();
    let total: f64 = sorted.iter().map(|&(_, logit)| weight(logit)).sum();
    sorted.into_iter().map(|(id, logit)| (id, weight(logit) / total)).filter(|(_, p)| *p > 0.0).collect()
}
