use crate::Cpu;
use crate::ops::distillation_loss::cpu::{Softmax, softmax};
use crate::simd::{Kernel, Simd, math::Math};
use std::cmp::Ordering;

/// The operands, as the module says.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub student: &'a [f32],
    pub ids: &'a [u32],
    pub ln_p: &'a [f32],
    pub ln_rest: &'a [f32],
    pub dkl: &'a [f32],
    pub temperature: f32,
    /// V and K.
    pub sizes: [usize; 2],
}

impl Rows<'_> {
    /// `dlogits` is not empty.
    pub fn run(&self, cpu: &Cpu, kl: &mut [f32], dlogits: &mut [f32]) {
        let [vocabulary, k] = self.sizes;
        let rows = kl.iter_mut().zip(dlogits.chunks_exact_mut(vocabulary)).enumerate().collect();
        cpu.for_each(rows, |(row, (kl, dlogits))| {
            let known = row * k..(row + 1) * k;
            *kl = cpu.isa().dispatch(Token {
                student: &self.student[row * vocabulary..][..vocabulary],
                ids: &self.ids[known.clone()],
                ln_p: &self.ln_p[known],
                ln_rest: self.ln_rest[row],
                inverse: 1.0 / self.temperature,
                weight: self.dkl[row] / self.temperature,
                dlogits,
            });
        });
    }
}

/// One token; returns its divergence.
struct Token<'a> {
    student: &'a [f32],
    ids: &'a [u32],
    ln_p: &'a [f32],
    ln_rest: f32,
    /// 1 / temperature.
    inverse: f32,
    /// The factor of q - p.
    weight: f32,
    dlogits: &'a mut [f32],
}

impl Kernel for Token<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let Self { student, ids, ln_p, ln_rest, inverse, weight, dlogits } = self;
        // The logits of the rest.
        dlogits.copy_from_slice(student);
        ids.iter().for_each(|&id| dlogits[id as usize] = f32::NEG_INFINITY);
        let known: Vec<f32> = ids.iter().map(|&id| student[id as usize]).collect();
        let [rest, known_sum] = [softmax(simd, dlogits, inverse), softmax(simd, &known, inverse)];
        let ln_all = ln_sum(rest, known_sum);
        let ln_q_rest = ln(rest) - ln_all;
        let p_rest = f64::from(ln_rest).exp();
        let mut kl = product(p_rest, f64::from(ln_rest) - ln_q_rest);
        // Of each token's share of the rest. Without a rest there are no shares.
        let of_rest = match rest.sum {
            0.0 => 0.0,
            sum => weight * (ln_q_rest.exp() - p_rest) as f32 / sum,
        };
        for dlogits in dlogits.chunks_mut(S::LANES) {
            let share = simd.exp(rest.exponents(simd, dlogits, inverse));
            simd.store_partial(simd.mul(simd.splat(of_rest), share), dlogits);
        }
        for ((&id, &x), &ln_p) in ids.iter().zip(&known).zip(ln_p) {
            let (ln_q, ln_p) = (f64::from(x * inverse) - ln_all, f64::from(ln_p));
            let p = ln_p.exp();
            kl += product(p, ln_p - ln_q);
            dlogits[id as usize] = weight * (ln_q.exp() - p) as f32;
        }
        kl as f32
    }
}

/// `p * difference`, and 0 where p is 0: not 0 times infinity.
fn product(p: f64, difference: f64) -> f64 {
    if p == 0.0 { 0.0 } else { p * difference }
}

/// The logarithm of a sum of exponentials.
fn ln(Softmax { max, sum }: Softmax) -> f64 {
    f64::from(max) + f64::from(sum).ln()
}

/// The logarithm of both sums together.
fn ln_sum(a: Softmax, b: Softmax) -> f64 {
    let (a, b) = (ln(a), ln(b));
    // A NaN is not lost: it is in the other exponential. -inf minus itself would be one.
    let max = if a < b { b } else { a };
    let max = if max == f64::NEG_INFINITY { 0.0 } else { max };
    max + ((a - max).exp() + (b - max).exp()).ln()
}

/// The targets of one token.
pub(super) struct Kept<'a> {
    pub ids: &'a mut [u32],
    pub ln_p: &'a mut [f32],
    pub ln_rest: &'a mut f32,
}

/// Keeps the greatest logits of each token.
pub(super) fn keep(cpu: &Cpu, logits: &[f32], inverse: f32, rows: Vec<Kept<'_>>) {
    let vocabulary = logits.len() / rows.len().max(1);
    let rows = rows.into_iter().zip(logits.chunks_exact(vocabulary.max(1))).collect();
    cpu.for_each(rows, |(kept, logits): (Kept<'_>, &[f32])| {
        greatest(logits, kept.ids);
        cpu.isa().dispatch(Keep { logits, inverse, kept });
    });
}

struct Keep<'a> {
    logits: &'a [f32],
    inverse: f32,
    /// The ids are there.
    kept: Kept<'a>,
}

impl Kernel for Keep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { logits, inverse, kept: Kept { ids, ln_p, ln_rest } } = self;
        let mut others = logits.to_vec();
        ids.iter().for_each(|&id| others[id as usize] = f32::NEG_INFINITY);
        for (ln_p, &id) in ln_p.iter_mut().zip(&*ids) {
            *ln_p = logits[id as usize];
        }
        let [rest, known] = [softmax(simd, &others, inverse), softmax(simd, ln_p, inverse)];
        let ln_all = ln_sum(rest, known);
        ln_p.iter_mut().for_each(|x| *x = (f64::from(*x * inverse) - ln_all) as f32);
        *ln_rest = (ln(rest) - ln_all) as f32;
    }
}

/// The ids of the greatest logits, in rising order.
fn greatest(logits: &[f32], ids: &mut [u32]) {
    let k = ids.len();
    // Greatest first, the lowest id where several tie. The place of a NaN does not matter: the sums
    // have it.
    let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let cut = |found: &mut Vec<(f32, u32)>| {
        found.select_nth_unstable_by(k - 1, order);
        found.truncate(k);
        found[k - 1].0
    };
    // Of those that were not greater than k others so far, twice as many as are wanted.
    let (mut found, mut least) = (Vec::with_capacity(2 * k), f32::NEG_INFINITY);
    for (id, &x) in logits.iter().enumerate() {
        // A later one that ties has a higher id.
        if found.len() < k || x.partial_cmp(&least) != Some(Ordering::Less) && x != least {
            // -0 ties with 0.
            found.push((x + 0.0, id as u32));
            if found.len() == 2 * k {
                least = cut(&mut found);
            }
        }
    }
    cut(&mut found);
    ids.iter_mut().zip(found).for_each(|(id, (_, of))| *id = of);
    ids.sort_unstable();
}
