//! The scales of a GGML block that are nearest to given numbers. Learning rounds to them in each
//! step.

use crate::{BlockScales, E4M3, E8M0, Format, Minifloat, Scales};
use half::f16;

/// The largest number is tried as this many of the greatest integers of either sign.
const ENDS: i8 = 3;

impl Format {
    /// The block's scales whose [products](crate::Scheme::products) are nearest to `scales` and,
    /// where the format has them, `biases`: one number per group. Where nothing is nearer,
    /// `previous` is kept, so that numbers that have not moved keep their roundings.
    ///
    /// A plain f16 is rounded to nearest. For an f16 times integers a few f16s are tried: the
    /// previous one, those with which the largest number becomes one of the greatest integers, and
    /// for each of these the one with the least squared error for its integers. Biases that are
    /// subtracted cannot be above 0.
    ///
    /// # Panics
    /// When there are fewer numbers than the block has groups; for a format without blocks.
    pub fn nearest_scales(self, scales: &[f32], biases: &[f32], previous: &BlockScales) -> BlockScales {
        let range = self.sub_scales();
        match self.scheme().scales {
            Scales::Group { biased, .. } => BlockScales::of(scales[0], if biased { biases[0] } else { 0.0 }),
            Scales::E8M0 { .. } => {
                let distance = |code: u8| (E8M0::decode(code) - scales[0]).abs();
                let nearest = (0..u8::MAX).min_by(|&a, &b| distance(a).total_cmp(&distance(b)));
                BlockScales { scale: nearest.unwrap_or(0).into(), ..BlockScales::default() }
            }
            Scales::Super { size } => {
                let scales =
                    Factored::nearest(&scales[..256 / size], previous.scale, previous.sub_scales, range);
                BlockScales { scale: scales.factor, sub_scales: scales.integers, ..BlockScales::default() }
            }
            Scales::SuperWithMinima { size } => {
                let mut minima = [0.0; 16];
                minima.iter_mut().zip(&biases[..256 / size]).for_each(|(min, bias)| *min = -bias);
                let scales =
                    Factored::nearest(&scales[..256 / size], previous.scale, previous.sub_scales, range);
                let minima =
                    Factored::nearest(&minima[..256 / size], previous.min, previous.sub_minima, range);
                BlockScales {
                    scale: scales.factor,
                    min: minima.factor,
                    sub_scales: scales.integers,
                    sub_minima: minima.integers,
                }
            }
            Scales::E4M3 => {
                let mut nearest = *previous;
                let groups = self.block() / self.scheme().group_size().unwrap_or(1);
                for (code, &scale) in nearest.sub_scales[..groups].iter_mut().zip(scales) {
                    let distance = |code: i8| (E4M3::decode(code as u8) - scale).abs();
                    let nearer = (0..0x7f).min_by(|&a, &b| distance(a).total_cmp(&distance(b)));
                    *code = nearer.unwrap_or(*code);
                }
                nearest
            }
            Scales::One => panic!("{self} has no blocks"),
        }
    }
}

/// Numbers as the bits of an f16 times integers.
struct Factored {
    factor: u16,
    integers: [i8; 16],
    /// The sum of squares of what the products are off by.
    error: f64,
}

impl Factored {
    fn new(wanted: &[f32], factor: u16, integers: [i8; 16]) -> Self {
        let value = f16::from_bits(factor).to_f64();
        let errors =
            wanted.iter().zip(integers).map(|(&x, integer)| value * f64::from(integer) - f64::from(x));
        Self { factor, integers, error: errors.map(|error| error * error).sum() }
    }

    /// The best integers for a factor; `None` for one that is no number or 0.
    fn rounded(wanted: &[f32], factor: u16, [least, most]: [i8; 2]) -> Option<Self> {
        let value =
            Some(f16::from_bits(factor).to_f64()).filter(|value| value.is_finite() && *value != 0.0)?;
        let mut integers = [0; 16];
        for (integer, &x) in integers.iter_mut().zip(wanted) {
            let nearest = (f64::from(x) / value).round_ties_even();
            *integer = nearest.clamp(least.into(), most.into()) as i8;
        }
        Some(Self::new(wanted, factor, integers))
    }

    /// The factor of least squared error for these integers.
    fn refitted(&self, wanted: &[f32]) -> u16 {
        let pairs = || wanted.iter().zip(self.integers).map(|(&x, i)| (f64::from(x), f64::from(i)));
        let (xi, ii) = pairs().fold((0.0, 0.0), |(xi, ii), (x, i)| (xi + x * i, ii + i * i));
        // 0 / 0 is no number, and not tried.
        f16::from_f64(xi / ii).to_bits()
    }

    fn nearest(wanted: &[f32], factor: u16, integers: [i8; 16], range: [i8; 2]) -> Self {
        let mut best = Self::new(wanted, factor, integers);
        if best.error == 0.0 {
            return best;
        }
        let [least, most] = range;
        // Integers without a sign cannot be below 0.
        let size = |x: f32| if least == 0 { x } else { x.abs() };
        let largest =
            wanted.iter().fold(0.0, |largest, &x| if size(x) > size(largest) { x } else { largest });
        let ends = (0..ENDS).flat_map(|i| [most - i, if least == 0 { 0 } else { least + i }]);
        let factors = ends.map(|end| f16::from_f64(f64::from(largest) / f64::from(end)).to_bits());
        for factor in std::iter::once(factor).chain(factors) {
            let Some(rounded) = Self::rounded(wanted, factor, range) else { continue };
            let refitted = Self::rounded(wanted, rounded.refitted(wanted), range);
            for tried in std::iter::once(rounded).chain(refitted) {
                if tried.error < best.error {
                    best = tried;
                }
            }
        }
        best
    }
}
