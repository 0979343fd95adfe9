use super::SampleParams;
use crate::{
    Cpu, KernelError,
    ops::{
        Check,
        argmax::cpu::{BLOCK, first_greatest, maxima},
    },
    simd::{Kernel, Simd, math::Math},
};

pub(super) fn sample(
    check: Check,
    cpu: &Cpu,
    logits: &[f32],
    history: &[u32],
    params: &SampleParams,
    word: u64,
) -> Result<u32, KernelError> {
    let penalised = penalise(logits, history, params);
    let logits = penalised.as_deref().unwrap_or(logits);
    let maxima = maxima(check, "logits", cpu, logits)?;
    let greatest = first_greatest(logits, &maxima);
    if params.temperature == 0.0 {
        return Ok(greatest as u32);
    }
    let logits = Logits { cpu, logits, max: logits[greatest], maxima };
    let filtered =
        params.top_p < 1.0 || params.min_p > 0.0 || (1..logits.logits.len()).contains(&params.top_k);
    Ok(if filtered { draw(&logits.kept(params), word) } else { logits.draw(rate(params.temperature), word) })
}

/// The logits with those of `history` penalised; `None` when that changes nothing.
fn penalise(logits: &[f32], history: &[u32], params: &SampleParams) -> Option<Vec<f32>> {
    if !params.penalises() || history.is_empty() {
        return None;
    }
    let mut history = history.to_vec();
    history.sort_unstable();
    let mut penalised = logits.to_vec();
    for same in history.chunk_by(|a, b| a == b) {
        let logit = &mut penalised[same[0] as usize];
        let less = (same.len() as f32).mul_add(params.frequency_penalty, params.presence_penalty);
        let penalty = params.repetition_penalty;
        // Fused as on a GPU, so that both draw the same.
        *logit = if *logit < 0.0 { logit.mul_add(penalty, -less) } else { *logit / penalty - less };
    }
    Some(penalised)
}

/// The integer of a weight of 1. Weights are integers, so that their sums do not depend on their
/// order, and every device samples the same. 2^24 of them have a sum below 2^64.
pub(crate) const ONE: f32 = (1u64 << 40) as f32;

/// The factor of the logits' distances from the greatest.
pub(crate) fn rate(temperature: f32) -> f32 {
    // Not infinite: the greatest has a distance of 0.
    temperature.recip().min(f32::MAX)
}

/// `top_p` in units of 2^-32.
pub(crate) fn share(top_p: f32) -> u32 {
    (f64::from(top_p) * 2f64.powi(32)) as u32
}

/// The `word` of 2^64 parts of `total`.
fn part(word: u64, total: u64) -> u64 {
    ((u128::from(word) * u128::from(total)) >> 64) as u64
}

/// An id and what its probability is proportional to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub id: u32,
    pub weight: u64,
}

/// The candidate at `word` of 2^64 parts of the way through all weights.
fn draw(candidates: &[Candidate], word: u64) -> u32 {
    let mut left = part(word, candidates.iter().map(|candidate| candidate.weight).sum());
    for candidate in candidates {
        if left < candidate.weight {
            return candidate.id;
        }
        left -= candidate.weight;
    }
    unreachable!("a part is less than the whole, which is not zero: the greatest is kept")
}

struct Logits<'a> {
    cpu: &'a Cpu,
    logits: &'a [f32],
    max: f32,
    /// The greatest of each [`BLOCK`].
    maxima: Vec<f32>,
}

impl Logits<'_> {
    /// The ids that pass the filters, in order, with their weights at the temperature.
    fn kept(&self, params: &SampleParams) -> Vec<Candidate> {
        let all = self.logits.len();
        let top_k = if params.top_k == 0 { all } else { params.top_k.min(all) };
        let floor = if params.min_p > 0.0 { self.max + params.min_p.ln() } else { f32::NEG_INFINITY };
        let mass = (params.top_p < 1.0).then(|| {
            let total: u64 = self.sums(1.0).iter().sum();
            let mass = (u128::from(total) * u128::from(share(params.top_p))) >> 32;
            (mass as u64).max(1)
        });
        // Few tokens hold most of the probability: sort a few, and more only when top-p is not
        // reached.
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
            let weights = self.weights(largest.iter().map(|&(logit, _)| logit), rate(params.temperature));
            let ids = largest.iter().map(|&(_, id)| id);
            return ids.zip(weights).map(|(id, weight)| Candidate { id, weight }).collect();
        }
    }

    /// The number of the `sorted` logits that top-p keeps; `None` when it keeps all of them and
    /// more may follow.
    fn nucleus(&self, sorted: &[(f32, u32)], mass: u64) -> Option<usize> {
        let (mut above, mut threshold) = (0, f32::NAN);
        let weights = self.weights(sorted.iter().map(|&(logit, _)| logit), 1.0);
        for (i, (&(logit, _), weight)) in sorted.iter().zip(weights).enumerate() {
            if above >= mass && logit != threshold {
                return Some(i);
            }
            if above < mass {
                threshold = logit;
            }
            above += weight;
        }
        None
    }

    /// The `count` largest finite logits that are at least `floor`, largest first, lower ids first
    /// where they tie.
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

    /// The sums of the weights of each [`BLOCK`].
    fn sums(&self, rate: f32) -> Vec<u64> {
        let mut sums = vec![u64::MAX; self.maxima.len()];
        self.cpu.for_each_rows(&mut sums, 1, 16 * BLOCK, |first, sums| {
            for (block, sum) in (first..).zip(sums) {
                *sum = self.block(block, rate).iter().sum();
            }
        });
        sums
    }

    /// The weights of a block, and zeros after the last one.
    fn block(&self, block: usize, rate: f32) -> [u64; BLOCK] {
        let logits = &self.logits[block * BLOCK..self.logits.len().min((block + 1) * BLOCK)];
        let mut weights = [0; BLOCK];
        self.cpu.isa().dispatch(Weights { logits, max: self.max, rate, weights: &mut weights });
        weights
    }

    /// `exp((logit - max) * rate)` of each logit, in units of `1 / ONE`.
    fn weights(&self, logits: impl Iterator<Item = f32>, rate: f32) -> Vec<u64> {
        let logits: Vec<f32> = logits.collect();
        let mut weights = vec![0; logits.len().next_multiple_of(BLOCK)];
        for (logits, weights) in logits.chunks(BLOCK).zip(weights.as_chunks_mut().0) {
            self.cpu.isa().dispatch(Weights { logits, max: self.max, rate, weights });
        }
        weights.truncate(logits.len());
        weights
    }

    /// Draws from all ids, in their order.
    fn draw(&self, rate: f32, word: u64) -> u32 {
        let sums = self.sums(rate);
        let mut left = part(word, sums.iter().sum());
        for (block, &sum) in sums.iter().enumerate() {
            if left < sum {
                let ids = (block * BLOCK) as u32..;
                let weights = ids.zip(self.block(block, rate));
                for (id, weight) in weights {
                    if left < weight {
                        return id;
                    }
                    left -= weight;
                }
            }
            left -= sum;
        }
        unreachable!("a part is less than the whole, which is not zero: the greatest has a weight of 1")
    }
}

struct Weights<'a> {
    logits: &'a [f32],
    max: f32,
    rate: f32,
    weights: &'a mut [u64; BLOCK],
}

impl Kernel for Weights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (max, rate) = (simd.splat(self.max), simd.splat(self.rate));
        let mut floats = [0.0; BLOCK];
        for (x, y) in self.logits.chunks(S::LANES).zip(floats.chunks_mut(S::LANES)) {
            let x = simd.load_partial(x, f32::NEG_INFINITY);
            simd.store(simd.mul(simd.exp(simd.mul(simd.sub(x, max), rate)), simd.splat(ONE)), y);
        }
        for (weight, float) in self.weights.iter_mut().zip(floats) {
            *weight = float as u64;
        }
    }
}
