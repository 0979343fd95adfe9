//! Functions that processors have no instruction for. None of them branches, so that loops over one
//! number at a time are vectorised inside a [`super::Kernel`] too.

use super::{Lanes, Simd};

/// The functions on vectors.
pub trait Math: Simd {
    /// `e^x`, within 1 ulp; 0 below -103.98, infinity above 88.73, NaN for NaN.
    ///
    /// `x = n ln 2 + r` with `|r| <= ln(2)/2` and ln 2 in two parts (Cody and Waite); `e^r` by a
    /// polynomial.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        // Adding 1.5 * 2^23 rounds to a whole number: the sum's last place is 1.
        const ROUND: f32 = 12_582_912.0;
        // The first part has 9 bits, so that its product with n is exact.
        const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
        // r^2 times these, highest power first: (e^r - 1 - r) / r^2 on |r| <= ln(2)/2, minimax in
        // e^r's relative error (3.1e-9).
        const FIT: [f32; 5] = [1.381_459_9e-3, 8.368_717e-3, 4.166_839e-2, 1.666_652_1e-1, 4.999_999_4e-1];
        let x = self.min(self.splat(89.0), self.max(self.splat(-104.0), x));
        let n = self
            .sub(self.mul_add(x, self.splat(std::f32::consts::LOG2_E), self.splat(ROUND)), self.splat(ROUND));
        let r = self.mul_add(n, self.splat(-LN_2[0]), x);
        let r = self.mul_add(n, self.splat(-LN_2[1]), r);
        let mut fit = self.splat(FIT[0]);
        for c in &FIT[1..] {
            fit = self.mul_add(fit, r, self.splat(*c));
        }
        let power = self.add(self.mul_add(self.mul(r, r), fit, r), self.splat(1.0));
        self.scale_exp2(power, n)
    }

    /// `2^x` for x up to 0, with a relative error of at most `1.02e-4`, and less than `2^-125` for
    /// x below -126: for what is rounded to bf16. NaN for NaN.
    #[inline(always)]
    fn exp2_for_bf16(self, x: Self::V) -> Self::V {
        // Adding 1.5 * 2^23 rounds to a whole number: the sum's last place is 1.
        const ROUND: f32 = 12_582_912.0;
        // 2^r on |r| <= 1/2, highest power first: minimax in the relative error, and 1 at 0.
        const FIT: [f32; 4] = [0.055_008_95, 0.242_211_01, 0.693_282_9, 1.0];
        let x = self.max(self.splat(-140.0), x);
        let n = self.sub(self.add(x, self.splat(ROUND)), self.splat(ROUND));
        let r = self.sub(x, n);
        let mut power = self.splat(FIT[0]);
        for c in &FIT[1..] {
            power = self.mul_add(power, r, self.splat(*c));
        }
        self.scale_exp2(power, n)
    }

    /// `1 / (1 + e^-x)`, within 2.5 ulp.
    #[inline(always)]
    fn sigmoid(self, x: Self::V) -> Self::V {
        // e^-|x| does not overflow, and keeps the digits of small results.
        let zero = self.splat(0.0);
        let e = self.exp(self.min(x, self.sub(zero, x)));
        let numerator = self.select_lt(x, zero, e, self.splat(1.0));
        self.div(numerator, self.add(self.splat(1.0), e))
    }

    /// `x / (1 + e^-x)`, within 3.5 ulp of the result or of 2^-119: x scales up what a subnormal
    /// sigmoid has lost.
    #[inline(always)]
    fn silu(self, x: Self::V) -> Self::V {
        self.mul(x, self.sigmoid(x))
    }

    /// `tanh(x)`, within 4 ulp; NaN for NaN.
    #[inline(always)]
    fn tanh(self, x: Self::V) -> Self::V {
        let (zero, one) = (self.splat(0.0), self.splat(1.0));
        let minus = self.sub(zero, x);
        let magnitude = self.max(minus, x);
        let e = self.exp(self.mul(magnitude, self.splat(-2.0)));
        let large = self.div(self.sub(one, e), self.add(one, e));
        let large = self.select_lt(x, zero, self.sub(zero, large), large);
        let square = self.mul(x, x);
        let mut series = self.splat(TANH_SERIES[0]);
        for c in &TANH_SERIES[1..] {
            series = self.mul_add(series, square, self.splat(*c));
        }
        let small = self.mul_add(self.mul(series, square), x, x);
        self.select_lt(magnitude, self.splat(TANH_SMALL), small, large)
    }
}

/// `(tanh(x) - x) / x^3` below [`TANH_SMALL`], by powers of x^2, highest first: the series of tanh.
pub(crate) const TANH_SERIES: [f32; 4] = [62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0];
/// The series is short of less than f32's rounding up to here, and beyond it `1 - e^-2x` keeps its
/// digits.
pub(crate) const TANH_SMALL: f32 = 0.25;

/// The relative error of [`Math::exp2_for_bf16`].
pub const EXP2_ERROR: f64 = 1.02e-4;

impl<S: Simd> Math for S {}

/// [`Math::exp`] of one number.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    Lanes::<1>.exp([x])[0]
}

/// [`Math::sigmoid`] of one number.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    Lanes::<1>.sigmoid([x])[0]
}

/// [`Math::silu`] of one number.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    Lanes::<1>.silu([x])[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, Kernel};

    type Function = fn(f64) -> f64;

    /// Applies all four functions to as many numbers as there are lanes.
    struct All<'a>(&'a [f32], [&'a mut Vec<f32>; 4]);

    impl Kernel for All<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let [e, s, l, t] = self.1;
            for (i, x) in self.0.chunks(S::LANES).enumerate() {
                let (at, x) = (i * S::LANES, simd.load_partial(x, 0.0));
                simd.store(simd.exp(x), &mut e[at..]);
                simd.store(simd.sigmoid(x), &mut s[at..]);
                simd.store(simd.silu(x), &mut l[at..]);
                simd.store(simd.tanh(x), &mut t[at..]);
            }
        }
    }

    /// The functions of `x` by every instruction set, and one number at a time.
    fn all(x: &[f32]) -> Vec<(String, [Vec<f32>; 4])> {
        let with = |run: &dyn Fn(All)| {
            let mut y = [(); 4].map(|()| vec![f32::NAN; x.len().next_multiple_of(16)]);
            let [e, s, l, t] = &mut y;
            run(All(x, [e, s, l, t]));
            y.map(|y| y[..x.len()].to_vec())
        };
        let isas = Isa::all().into_iter().map(|isa| (format!("{isa:?}"), with(&|all| isa.dispatch(all))));
        isas.chain([("Scalar".into(), with(&|all| all.run(Lanes::<1>)))]).collect()
    }

    /// The distance between `got` and `want` in units of the last place of `want`, or of `2^least`
    /// if that is more.
    fn ulps(got: f32, want: f64, least: f64) -> f64 {
        let exponent = want.abs().log2().floor().max(least);
        (f64::from(got) - want).abs() / (exponent - 23.0).exp2()
    }

    #[test]
    fn errors_over_the_whole_range() {
        // Every 613th float of either sign (a prime: all low bits come up), where the results are
        // finite.
        let step = 613usize;
        let x: Vec<f32> = (0..1u32 << 31).step_by(step).map(f32::from_bits).filter(|x| *x < 120.0).collect();
        let x: Vec<f32> = x.iter().copied().chain(x.iter().map(|x| -x)).collect();
        let contracts: [(Function, f64, f64); 4] = [
            (f64::exp, 1.0, -126.0),
            (|x| 1.0 / (1.0 + (-x).exp()), 2.5, -126.0),
            (|x| x / (1.0 + (-x).exp()), 3.5, -119.0),
            (f64::tanh, 4.0, -126.0),
        ];
        for (isa, y) in all(&x) {
            for (got, (exact, bound, least)) in y.iter().zip(contracts) {
                let mut worst = (0.0, 0.0);
                for (&x, &got) in x.iter().zip(got) {
                    let want = exact(f64::from(x));
                    if want > f64::from(f32::MAX) * (1.0 + f64::from(f32::EPSILON) / 4.0) {
                        assert_eq!(got, f32::INFINITY, "{isa} at {x}");
                        continue;
                    }
                    let error = ulps(got, want, least);
                    assert!(!error.is_nan(), "{isa} at {x}");
                    worst = if error > worst.0 { (error, x) } else { worst };
                }
                assert!(worst.0 <= bound, "{isa}: {} ulp at {}", worst.0, worst.1);
            }
        }
    }

    /// [`Math::exp2_for_bf16`].
    struct Exp2<'a>(&'a [f32], &'a mut [f32]);

    impl Kernel for Exp2<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            for (x, y) in self.0.chunks(S::LANES).zip(self.1.chunks_mut(S::LANES)) {
                simd.store_partial(simd.exp2_for_bf16(simd.load_partial(x, 0.0)), y);
            }
        }
    }

    #[test]
    fn powers_of_two_for_bf16() {
        let x: Vec<f32> =
            (0..150_000).map(|i| i as f32 * -0.001).chain([f32::NEG_INFINITY, f32::NAN]).collect();
        let check = |isa: &str, run: &dyn Fn(Exp2)| {
            let mut y = vec![f32::NAN; x.len()];
            run(Exp2(&x, &mut y));
            for (&x, y) in x.iter().zip(y) {
                let (y, want) = (f64::from(y), f64::from(x).exp2());
                let right = match x {
                    _ if x.is_nan() => y.is_nan(),
                    _ if x < -126.0 => (0.0..(-125f64).exp2()).contains(&y),
                    _ => (y - want).abs() <= EXP2_ERROR * want,
                };
                assert!(right, "{isa}: 2^{x} is {want}, not {y}");
            }
        };
        Isa::all().into_iter().for_each(|isa| check(isa.name(), &|exp2| isa.dispatch(exp2)));
        check("Scalar", &|exp2| exp2.run(Lanes::<1>));
    }

    #[test]
    fn infinities_and_nan() {
        for (isa, [e, s, l, t]) in all(&[f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0]) {
            assert_eq!(e, [f32::INFINITY, 0.0, 1.0, 1.0], "{isa}");
            assert_eq!(s, [1.0, 0.0, 0.5, 0.5], "{isa}");
            assert_eq!(l[0], f32::INFINITY, "{isa}");
            assert_eq!(t, [1.0, -1.0, 0.0, 0.0], "{isa}");
        }
        for (isa, y) in all(&[f32::NAN; 17]) {
            assert!(y.iter().flatten().all(|y| y.is_nan()), "{isa}");
        }
    }
}
