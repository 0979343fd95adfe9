use super::SampleParams;
use crate::{
    Cpu, KernelError,
    ops::{
        argmax::cpu::{BLOCK, first_greatest, maxima},
        check::Check,
    },
    simd::{Kernel, Simd, math::Math},
};

pub(super) fn sample(
    check: Check,
    cpu: &Cpu,
    logits: &[f32],
    history: &[u32],
    params: &SampleParams,
    uniform: f64,
) -> Result<u32, KernelError> {
    let penalised = penalise(logits, history, params.repetition_penalty);
    let logits = penalised.as_deref().unwrap_or(logits);
    let maxima = maxima(check, "logits", cpu, logits)?;
    let greatest = first_greatest(logits, &maxima);
    if params.temperature == 0.0 {
        return Ok(greatest as u32);
    }
    let logits = Logits { cpu, logits, max: logits[greatest], maxima };
    let filtered =
        params.top_p < 1.0 || params.min_p > 0.0 || (1..logits.logits.len()).contains(&params.top_k);
    Ok(if filtered { draw(&logits.kept(params), uniform) } else { logits.draw(params.temperature, uniform) })
}

/// The logits with those of `history` penalised; `None` when that changes nothing.
fn penalise(logits: &[f32], history: &[u32], penalty: f32) -> Option<Vec<f32>> {
    if penalty == 1.0 || history.is_empty() {
        return None;
    }
    let mut penalised = logits.to_vec();
    for &id in history {
        // From the logit as it was, so that an id which comes up twice is penalised once.
        let logit = logits[id as usize];
        penalised[id as usize] = if logit < 0.0 { logit * penalty } else { logit / penalty };
    }
    Some(penalised)
}

/// An id and what its probability is proportional to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub id: u32,
    pub weight: f64,
}

/// The candidate at `uniform` of the way through all weights.
fn draw(candidates: &[Candidate], uniform: f64) -> u32 {
    let mut left = uniform * candidates.iter().map(|candidate| candidate.weight).sum::<f64>();
    for candidate in candidates {
        left -= candidate.weight;
        if left < 0.0 {
            return candidate.id;
        }
    }
    // Rounding has left a rest: it belongs to the last one that can be drawn.
    candidates.iter().rfind(|candidate| candidate.weight > 0.0).expect("the greatest can be").id
}

struct Logits<'a> {
    cpu: &'a Cpu,
    logits: &'a [f32],
    max: f32,
    /// The greatest of each [`BLOCK`].
    maxima: Vec<f32>,
}

impl Logits<'_> {
    /// The ids that pass the filters, in their order, with their weights at the temperature.
    fn kept(&self, params: &SampleParams) -> Vec<Candidate> {
        let all = self.logits.len();
        let top_k = if params.top_k == 0 { all } else { params.top_k.min(all) };
        let floor = if params.min_p > 0.0 { self.max + params.min_p.ln() } else { f32::NEG_INFINITY };
        let mass = (params.top_p < 1.0).then(|| f64::from(params.top_p) * self.sums(1.0).iter().sum::<f64>());
        // Few tokens hold most of the probability: sort a few, and more only when top-p is not reached.
        let mut count = if mass.is_some() { top_k.min(256) } else { top_k };
        loop {
            let mut largest = self.largest(count, floor);
            let cut = mass.and_then(|mass| self.nucleus(&largest, mass));
            if cut.is_none() && largest.len() == count && count < top_k {
                count = top_k.min(count * 8);
                continue;
            }
            largest.truncate(cut.unwrap_or(largest.len()));
            largest.sort_unstable_by_key(|&(_, id)| id);
            let weight = |logit: f32| (f64::from(logit - self.max) / f64::from(params.temperature)).exp();
            return largest.iter().map(|&(logit, id)| Candidate { id, weight: weight(logit) }).collect();
        }
    }

    /// How many of the `sorted` logits top-p keeps; `None` when that is all of them and more may follow.
    fn nucleus(&self, sorted: &[(f32, u32)], mass: f64) -> Option<usize> {
        let (mut above, mut threshold) = (0.0, f32::NAN);
        for (i, &(logit, _)) in sorted.iter().enumerate() {
            if above >= mass && logit != threshold {
                return Some(i);
            }
            if above < mass {
                threshold = logit;
            }
            above += f64::from(logit - self.max).exp();
        }
        None
    }

    /// The `count` largest finite logits that are at least `floor`, largest first, lower ids first where they tie.
    fn largest(&self, count: usize, floor: f32) -> Vec<(f32, u32)> {
        let mut floor = floor.max(f32::MIN);
        if count < self.maxima.len() {
            // As many blocks hold something that large: nothing smaller is among the largest.
            let mut maxima = self.maxima.clone();
            floor = floor.max(*maxima.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1);
        }
        let mut found = vec![];
        for (block, logits) in self.logits.chunks(BLOCK).enumerate() {
            if self.maxima[block] >= floor {
                let ids = (block * BLOCK) as u32..;
                found.extend(logits.iter().copied().zip(ids).filter(|&(logit, _)| logit >= floor));
            }
        }
        // Not `total_cmp`, for which -0 and 0 do not tie.
        let order = |a: &(f32, u32), b: &(f32, u32)| {
            b.0.partial_cmp(&a.0).expect("no NaN among checked logits").then(a.1.cmp(&b.1))
        };
        if count < found.len() {
            found.select_nth_unstable_by(count, order);
            found.truncate(count);
        }
        found.sort_unstable_by(order);
        found
    }

    /// The sums of `exp((logits - max) / temperature)` over each [`BLOCK`].
    fn sums(&self, temperature: f32) -> Vec<f64> {
        let mut sums = vec![f64::NAN; self.maxima.len()];
        self.cpu.for_each_rows(&mut sums, 1, 16 * BLOCK, |first, sums| {
            for (block, sum) in (first..).zip(sums) {
                *sum = self.weights(block, temperature).iter().map(|&weight| f64::from(weight)).sum();
            }
        });
        sums
    }

    /// `exp((logits - max) / temperature)` of a block, and zeros after the last one.
    fn weights(&self, block: usize, temperature: f32) -> [f32; BLOCK] {
        let logits = &self.logits[block * BLOCK..self.logits.len().min((block + 1) * BLOCK)];
        let mut weights = [0.0; BLOCK];
        self.cpu.isa().dispatch(Weights { logits, max: self.max, temperature, weights: &mut weights });
        weights
    }

    /// Draws from all ids, in their order.
    fn draw(&self, temperature: f32, uniform: f64) -> u32 {
        let sums = self.sums(temperature);
        let mut left = uniform * sums.iter().sum::<f64>();
        let mut last = 0;
        for (block, sum) in sums.iter().enumerate() {
            if *sum > 0.0 {
                last = block;
                if left < *sum {
                    break;
                }
                left -= sum;
            }
        }
        let weights = self.weights(last, temperature);
        let mut id = 0;
        for (i, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            id = (last * BLOCK + i) as u32;
            left -= f64::from(weight);
            if left < 0.0 {
                break;
            }
        }
        id
    }
}

struct Weights<'a> {
    logits: &'a [f32],
    max: f32,
    temperature: f32,
    weights: &'a mut [f32; BLOCK],
}

impl Kernel for Weights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (max, temperature) = (simd.splat(self.max), simd.splat(self.temperature));
        for (x, y) in self.logits.chunks(S::LANES).zip(self.weights.chunks_mut(S::LANES)) {
            let x = simd.load_partial(x, f32::NEG_INFINITY);
            simd.store(simd.exp(simd.div(simd.sub(x, max), temperature)), y);
        }
    }
}
