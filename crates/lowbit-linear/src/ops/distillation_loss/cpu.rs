use crate::Cpu;
use crate::simd::{Kernel, Simd, math::Math};

/// Terms of a sum in f32; beyond that sums are f64.
pub(in crate::ops) const CHUNK: usize = 1024;

/// The operands, as the module says.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub student: &'a [f32],
    pub teacher: &'a [f32],
    pub dkl: &'a [f32],
    pub temperature: f32,
    pub vocabulary: usize,
}

impl Rows<'_> {
    pub fn run(&self, cpu: &Cpu, kl: &mut [f32], dlogits: &mut [f32]) {
        if self.vocabulary == 0 {
            return;
        }
        let rows = kl.iter_mut().zip(dlogits.chunks_exact_mut(self.vocabulary)).enumerate().collect();
        cpu.for_each(rows, |(row, (kl, dlogits))| {
            let at = row * self.vocabulary..(row + 1) * self.vocabulary;
            let (student, teacher) = (&self.student[at.clone()], &self.teacher[at]);
            let (inverse, weight) = (1.0 / self.temperature, self.dkl[row] / self.temperature);
            *kl = cpu.isa().dispatch(Token { student, teacher, inverse, weight, dlogits });
        });
    }
}

/// One token; returns its divergence.
struct Token<'a> {
    student: &'a [f32],
    teacher: &'a [f32],
    /// 1 / temperature.
    inverse: f32,
    /// The factor of q - p.
    weight: f32,
    dlogits: &'a mut [f32],
}

/// The numbers that make a softmax of logits: `e^(x * inverse - max) / sum`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Softmax {
    pub max: f32,
    pub sum: f32,
}

impl Kernel for Token<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let Self { student, teacher, inverse, weight, dlogits } = self;
        let [of_student, of_teacher] = [softmax(simd, student, inverse), softmax(simd, teacher, inverse)];
        let (ln_student, ln_teacher) = (of_student.sum.ln(), of_teacher.sum.ln());
        let mut kl = 0.0;
        let chunks = student.chunks(CHUNK).zip(teacher.chunks(CHUNK)).zip(dlogits.chunks_mut(CHUNK));
        for ((student, teacher), dlogits) in chunks {
            let mut sum = simd.splat(0.0);
            let vectors = student.chunks(S::LANES).zip(teacher.chunks(S::LANES));
            for ((student, teacher), dlogits) in vectors.zip(dlogits.chunks_mut(S::LANES)) {
                let z = of_student.exponents(simd, student, inverse);
                let u = of_teacher.exponents(simd, teacher, inverse);
                let q = simd.mul(simd.exp(z), simd.splat(1.0 / of_student.sum));
                let p = simd.mul(simd.exp(u), simd.splat(1.0 / of_teacher.sum));
                simd.store_partial(simd.mul(simd.splat(weight), simd.sub(q, p)), dlogits);
                let difference =
                    simd.sub(simd.sub(u, simd.splat(ln_teacher)), simd.sub(z, simd.splat(ln_student)));
                // Not 0 times infinity. A NaN is not below anything, and stays.
                let none = simd.splat(f32::MIN_POSITIVE);
                sum = simd.add(sum, simd.select_lt(p, none, simd.splat(0.0), simd.mul(p, difference)));
            }
            kl += f64::from(simd.sum(sum));
        }
        kl as f32
    }
}

impl Softmax {
    /// `x * inverse - max` of up to a vector of logits, -inf in other lanes.
    #[inline(always)]
    pub fn exponents<S: Simd>(self, simd: S, x: &[f32], inverse: f32) -> S::V {
        let x = if x.len() == S::LANES { simd.load(x) } else { simd.load_partial(x, f32::NEG_INFINITY) };
        simd.sub(simd.mul(x, simd.splat(inverse)), simd.splat(self.max))
    }
}

/// Of a row whose logits are all -inf, or which has none, the sum is 0.
#[inline(always)]
pub(in crate::ops) fn softmax<S: Simd>(simd: S, x: &[f32], inverse: f32) -> Softmax {
    let mut max = simd.splat(f32::NEG_INFINITY);
    for x in x.chunks(S::LANES) {
        let x = if x.len() == S::LANES { simd.load(x) } else { simd.load_partial(x, f32::NEG_INFINITY) };
        max = simd.max(x, max);
    }
    // A NaN does not reach the greatest, but the sum. -inf minus itself would be one.
    let max = simd.max_lane(max) * inverse;
    let mut softmax = Softmax { max: if max == f32::NEG_INFINITY { 0.0 } else { max }, sum: 0.0 };
    let mut total = 0.0;
    for x in x.chunks(CHUNK) {
        let mut sum = simd.splat(0.0);
        for x in x.chunks(S::LANES) {
            sum = simd.add(sum, simd.exp(softmax.exponents(simd, x, inverse)));
        }
        total += f64::from(simd.sum(sum));
    }
    softmax.sum = total as f32;
    softmax
}
