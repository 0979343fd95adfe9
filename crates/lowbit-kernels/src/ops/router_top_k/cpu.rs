use super::{RouterParams, RouterScores};
use crate::Cpu;
use crate::simd::{Kernel, Simd, math};

/// Simple operations an expert.
const COST: usize = 16;

/// `(id, weight)` of each token's experts.
pub(super) fn router_top_k(
    cpu: &Cpu,
    logits: &[f32],
    bias: Option<&[f32]>,
    experts: usize,
    params: RouterParams,
) -> Vec<(u32, f32)> {
    let mut chosen = vec![(u32::MAX, f32::NAN); logits.len() / experts * params.top_k];
    cpu.for_each_rows(&mut chosen, params.top_k, experts * COST, |first, chosen| {
        let logits = &logits[first * experts..];
        cpu.isa().dispatch(Rows { logits, bias, experts, params, chosen });
    });
    chosen
}

struct Rows<'a> {
    logits: &'a [f32],
    bias: Option<&'a [f32]>,
    experts: usize,
    params: RouterParams,
    chosen: &'a mut [(u32, f32)],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let RouterParams { top_k, normalize, scores, sum_eps, scale, n_group, topk_group } = self.params;
        let mut choices = vec![0.0; self.experts];
        let rows = self.logits.chunks_exact(self.experts);
        for (logits, chosen) in rows.zip(self.chosen.chunks_exact_mut(top_k)) {
            let all = match scores {
                RouterScores::Softmax => {
                    if topk_group < n_group {
                        choices.copy_from_slice(logits);
                        keep_best_groups(&mut choices, n_group, topk_group, |[first, _]| first);
                        select(&choices, chosen);
                    } else {
                        select(logits, chosen);
                    }
                    // The greatest of all, since its group is the best one.
                    let max = chosen[0].1;
                    chosen.iter_mut().for_each(|(_, x)| *x = math::exp(*x - max));
                    if normalize { 1.0 } else { sum_of_exp(logits, max) }
                }
                RouterScores::Sigmoid => {
                    let off = f32::NEG_INFINITY;
                    let choice = |x: f32| if x == off { off } else { math::sigmoid(x) };
                    choices.iter_mut().zip(logits).for_each(|(c, &x)| *c = choice(x));
                    let bias = self.bias.unwrap_or_default();
                    choices.iter_mut().zip(bias).for_each(|(c, bias)| *c += bias);
                    if topk_group < n_group {
                        keep_best_groups(&mut choices, n_group, topk_group, |[first, second]| first + second);
                    }
                    select(&choices, chosen);
                    chosen.iter_mut().for_each(|(id, x)| *x = math::sigmoid(logits[*id as usize]));
                    1.0
                }
            };
            let sum = if normalize { chosen.iter().map(|(_, x)| x).sum::<f32>() + sum_eps } else { all };
            chosen.iter_mut().for_each(|(_, x)| *x = *x / sum * scale);
        }
    }
}

/// The largest values and their ids, in order, by insertion: a later one must be greater to come
/// before.
#[inline(always)]
fn select(logits: &[f32], chosen: &mut [(u32, f32)]) {
    let mut count = 0;
    for (id, &logit) in (0u32..).zip(logits) {
        if count == chosen.len() && logit <= chosen[count - 1].1 {
            continue;
        }
        count = chosen.len().min(count + 1);
        let place = chosen[..count - 1].iter().rposition(|&(_, kept)| kept >= logit).map_or(0, |i| i + 1);
        chosen.copy_within(place..count - 1, place + 1);
        chosen[place] = (id, logit);
    }
}

/// Leaves the experts of the groups with the greatest values, which `value` makes of a group's two
/// best experts, and switches off the others.
#[inline(always)]
fn keep_best_groups(choices: &mut [f32], n_group: usize, topk_group: usize, value: impl Fn([f32; 2]) -> f32) {
    let size = choices.len() / n_group;
    let of_group = |group: &[f32]| {
        let start = [f32::NEG_INFINITY; 2];
        value(group.iter().fold(start, |[first, second], &x| match x > first {
            true => [x, first],
            false => [first, if x > second { x } else { second }],
        }))
    };
    let values: Vec<f32> = choices.chunks_exact(size).map(of_group).collect();
    let mut best = vec![(u32::MAX, f32::NAN); topk_group];
    select(&values, &mut best);
    for (id, group) in (0u32..).zip(choices.chunks_exact_mut(size)) {
        if !best.iter().any(|&(kept, _)| kept == id) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// `sum e^(x - max)`, in sixteen sums side by side.
#[inline(always)]
fn sum_of_exp(xs: &[f32], max: f32) -> f32 {
    let (blocks, rest) = xs.as_chunks::<16>();
    let mut sums = [0.0; 16];
    for block in blocks {
        for (sum, &x) in sums.iter_mut().zip(block) {
            *sum += math::exp(x - max);
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|&x| math::exp(x - max)).sum::<f32>()
}
