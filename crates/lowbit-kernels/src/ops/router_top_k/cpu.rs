use super::RouterParams;
use crate::Cpu;
use crate::simd::{Kernel, Simd, math};

/// Simple operations an expert.
const COST: usize = 16;

/// `(id, weight)` of each token's experts.
pub(super) fn router_top_k(
    cpu: &Cpu,
    logits: &[f32],
    experts: usize,
    params: RouterParams,
) -> Vec<(u32, f32)> {
    let mut chosen = vec![(u32::MAX, f32::NAN); logits.len() / experts * params.top_k];
    cpu.for_each_rows(&mut chosen, params.top_k, experts * COST, |first, chosen| {
        let logits = &logits[first * experts..];
        cpu.isa().dispatch(Rows { logits, experts, params, chosen });
    });
    chosen
}

struct Rows<'a> {
    logits: &'a [f32],
    experts: usize,
    params: RouterParams,
    chosen: &'a mut [(u32, f32)],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let RouterParams { top_k, normalize } = self.params;
        let rows = self.logits.chunks_exact(self.experts);
        for (logits, chosen) in rows.zip(self.chosen.chunks_exact_mut(top_k)) {
            select(logits, chosen);
            let max = chosen[0].1;
            let all = if normalize { 0.0 } else { sum_of_exp(logits, max) };
            chosen.iter_mut().for_each(|(_, x)| *x = math::exp(*x - max));
            let sum = if normalize { chosen.iter().map(|(_, e)| e).sum() } else { all };
            chosen.iter_mut().for_each(|(_, x)| *x /= sum);
        }
    }
}

/// The largest logits and their ids, in order, by insertion: a later one must be greater to come
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
