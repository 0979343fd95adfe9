//! Loops over whole slices, tails included.
use super::Simd;

/// A function of `N` vectors, for [`map`].
pub trait Map<const N: usize> {
    /// One vector of results. Mark implementations `#[inline(always)]`.
    fn apply<S: Simd>(&self, simd: S, x: [S::V; N]) -> S::V;
}

/// `y[i] = f(x[0][i], .., x[N - 1][i])`.
///
/// # Panics
/// When the slices' lengths differ.
#[inline(always)]
pub fn map<S: Simd, const N: usize>(simd: S, f: &impl Map<N>, x: [&[f32]; N], y: &mut [f32]) {
    let whole = y.len() - y.len() % S::LANES;
    assert!(x.iter().all(|x| x.len() == y.len()), "slices of one length");
    let mut v = [simd.splat(0.0); N];
    for i in (0..whole).step_by(S::LANES) {
        for (v, x) in v.iter_mut().zip(x) {
            *v = simd.load(&x[i..]);
        }
        simd.store(f.apply(simd, v), &mut y[i..]);
    }
    if whole < y.len() {
        for (v, x) in v.iter_mut().zip(x) {
            *v = simd.load_partial(&x[whole..], 0.0);
        }
        simd.store_partial(f.apply(simd, v), &mut y[whole..]);
    }
}

/// Multiplies by one number.
pub struct Scale(pub f32);

/// A norm's factor: `1 / length`, and NaN for an infinite one. Zero would hide from everything
/// after it that a sum of squares overflowed.
#[inline(always)]
pub fn reciprocal(length: f32) -> f32 {
    if length == f32::INFINITY { f32::NAN } else { 1.0 / length }
}

impl Map<1> for Scale {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x]: [S::V; 1]) -> S::V {
        simd.mul(x, simd.splat(self.0))
    }
}

/// `sum a[i] b[i]`, in `4 LANES` partial sums.
///
/// # Panics
/// When `b` is shorter than `a`.
#[inline(always)]
pub fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let b = &b[..a.len()];
    let mut sums = [simd.splat(0.0); 4];
    let mut i = 0;
    while i + 4 * S::LANES <= a.len() {
        for (j, sum) in sums.iter_mut().enumerate() {
            let at = i + j * S::LANES;
            *sum = simd.mul_add(simd.load(&a[at..]), simd.load(&b[at..]), *sum);
        }
        i += 4 * S::LANES;
    }
    while i + S::LANES <= a.len() {
        sums[0] = simd.mul_add(simd.load(&a[i..]), simd.load(&b[i..]), sums[0]);
        i += S::LANES;
    }
    if i < a.len() {
        sums[1] = simd.mul_add(simd.load_partial(&a[i..], 0.0), simd.load_partial(&b[i..], 0.0), sums[1]);
    }
    simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])))
}

/// `sum a[i]`, in `LANES` partial sums.
#[inline(always)]
pub fn sum<S: Simd>(simd: S, a: &[f32]) -> f32 {
    let mut sums = simd.splat(0.0);
    for a in a.chunks(S::LANES) {
        let a = if a.len() == S::LANES { simd.load(a) } else { simd.load_partial(a, 0.0) };
        sums = simd.add(sums, a);
    }
    simd.sum(sums)
}
