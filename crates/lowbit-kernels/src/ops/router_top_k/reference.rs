use super::{RouterParams, RouterScores};

const U: f64 = f32::EPSILON as f64 / 2.0;

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
pub(crate) fn router_top_k(logits: &[f32], bias: &[f32], params: RouterParams) -> Vec<Choice> {
    if params.scores == RouterScores::Sigmoid {
        return of_sigmoids(logits, bias, params);
    }
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let logit = |id: u32| f64::from(logits[id as usize]);
    order.sort_by(|&a, &b| logit(b).partial_cmp(&logit(a)).expect("no NaN").then(a.cmp(&b)));
    let max = logit(order[0]);
    let all = order.clone();
    if params.topk_group < params.n_group {
        // The groups of the best experts, each as the first of its experts comes up.
        let group = |id: u32| id as usize / (logits.len() / params.n_group);
        let mut groups: Vec<usize> = vec![];
        order.iter().for_each(|&id| groups.extend((!groups.contains(&group(id))).then(|| group(id))));
        order.retain(|&id| groups[..params.topk_group].contains(&group(id)));
    }
    let exp = |id: u32| (logit(id) - max).exp();
    // Minus infinity contributes nothing, exactly.
    let error = |id: u32| if exp(id) == 0.0 { 0.0 } else { exp(id) * (2.0 + max - logit(id)) * U };
    let summed = if params.normalize { &order[..params.top_k] } else { &all[..] };
    let sum: f64 = summed.iter().map(|&id| exp(id)).sum();
    let sum_error = summed.iter().map(|&id| error(id)).sum::<f64>() / sum + summed.len() as f64 * U;
    let choice = |&id: &u32| {
        let weight = exp(id) / sum;
        let bound = error(id) / sum + weight * (sum_error + 2.0 * U) + f64::from(f32::MIN_POSITIVE);
        let scale = f64::from(params.scale);
        Choice { id, weight: weight * scale, bound: bound * scale.abs() }
    };
    order[..params.top_k].iter().map(choice).collect()
}

/// The same of sigmoids, each within 5 u; a sum of `n` terms rounds `n` times, the quotient and the
/// scaled one once.
fn of_sigmoids(logits: &[f32], bias: &[f32], params: RouterParams) -> Vec<Choice> {
    let score = |id: u32| 1.0 / (1.0 + (-f64::from(logits[id as usize])).exp());
    let value = |id: u32| match logits[id as usize] {
        f32::NEG_INFINITY => f64::NEG_INFINITY,
        _ => score(id) + bias.get(id as usize).map_or(0.0, |&bias| f64::from(bias)),
    };
    let largest_first = |values: &[f64]| {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        let value = |id: u32| values[id as usize];
        order.sort_by(|&a, &b| value(b).partial_cmp(&value(a)).expect("no NaN").then(a.cmp(&b)));
        order
    };
    let values: Vec<f64> = (0..logits.len() as u32).map(value).collect();
    let size = values.len() / params.n_group;
    let of_group = |group: &[f64]| {
        let best = largest_first(group);
        best.iter().take(2).map(|&id| group[id as usize]).sum::<f64>()
    };
    let groups: Vec<f64> = values.chunks_exact(size).map(of_group).collect();
    let chosen = &largest_first(&groups)[..params.topk_group];
    let mut order = largest_first(&values);
    order.retain(|&id| chosen.contains(&(id / size as u32)));
    order.truncate(params.top_k);
    let eps = f64::from(params.sum_eps);
    let sum = if params.normalize { order.iter().map(|&id| score(id)).sum::<f64>() + eps } else { 1.0 };
    let choice = |&id: &u32| {
        let weight = score(id) / sum * f64::from(params.scale);
        Choice {
            id,
            weight,
            bound: weight.abs() * (14 + params.top_k) as f64 * U + f64::from(f32::MIN_POSITIVE),
        }
    };
    order.iter().map(choice).collect()
}
