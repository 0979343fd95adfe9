//! Rows of x as products read them.

use super::super::panels::{heights, tallest};
use super::UNIT;
use crate::Cpu;
use crate::buffer::Buffer;
use crate::panels::{CHUNK, SPAN};
use std::sync::Arc;

/// x `[m, k]`, each row by a power of two of its own, zeros added up to whole spans. Rows lie in
/// tiles, as [`heights`] cuts them: `[tile][k][row of the tile]`. A value that is not finite is
/// NaN.
pub(in super::super) struct Activations {
    values: Buffer,
    /// Values per row, with padding.
    k: usize,
    /// Of each row.
    scalings: Vec<Scaling>,
}

/// The values of a few rows of x, a chunk of them, `[k][height]`, and the rows' scalings.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    pub height: usize,
    pub values: &'a [f32],
    pub scalings: &'a [Scaling],
}

/// The only row, by [`UNIT`] besides: it meets codes as [`Simd::e4m3`](crate::simd::Simd::e4m3)
/// has them.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub values: &'a [f32],
    pub scaling: Scaling,
}

/// The power of two by which a row is multiplied, so that its greatest magnitude is about 2^-10,
/// and 2^110 by [`UNIT`]: its products with codes, and with 2^-120 of one, are normal numbers, and
/// with scales from 2^-100 on, too. (Scales are below 2^100.) Values of x below 2^-107 of the
/// greatest lose places.
#[derive(Clone, Copy, Default)]
pub(super) struct Scaling {
    /// The exponent of the row's greatest magnitude, from -127 to 128.
    exponent: i32,
}

impl Scaling {
    fn new(x: &[f32]) -> Self {
        let greatest = x.iter().fold(0, |greatest, x| (x.to_bits() & i32::MAX as u32).max(greatest));
        Self { exponent: (greatest >> 23) as i32 - 127 }
    }

    /// The factors of x, to be multiplied one after the other: the power need not be an f32.
    fn factors(self) -> [f32; 2] {
        halves(-10 - self.exponent)
    }

    /// The factors of sums of products with codes and halves of scales, to be multiplied one after
    /// the other.
    pub fn back(self) -> [f32; 2] {
        halves(11 + self.exponent)
    }
}

/// Two powers of two whose product is `2^exponent`.
fn halves(exponent: i32) -> [f32; 2] {
    [exponent / 2, exponent - exponent / 2].map(power)
}

/// `2^exponent`, a normal number.
fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

impl Activations {
    pub fn new(cpu: &Arc<Cpu>, x: &[f32], m: usize, k: usize) -> Self {
        let (tallest, padded) = (tallest(cpu.isa().registers()), k.next_multiple_of(SPAN));
        let values = Buffer::any(m * padded * size_of::<f32>(), cpu).expect("memory for x");
        let mut all = Self { values, k: padded, scalings: vec![Scaling::default(); m] };
        if k == 0 {
            return all;
        }
        let unit = if m == 1 { UNIT } else { 1.0 };
        let mut values: &mut [f32] = &mut bytemuck::cast_slice_mut(all.values.bytes_mut())[..m * padded];
        let mut scalings = &mut all.scalings[..];
        let tile = |(row, height): (usize, usize)| {
            let values = values.split_off_mut(..height * padded).expect("values of a tile");
            (row, height, values, scalings.split_off_mut(..height).expect("rows of a tile"))
        };
        let tiles: Vec<_> = heights(0..m, tallest).map(tile).collect();
        cpu.for_each_of(m * k / VALUES, tiles, |(row, height, out, scalings)| {
            let rows = x[row * k..][..height * k].chunks_exact(k).zip(scalings);
            for (r, (x, scaling)) in rows.enumerate() {
                *scaling = Scaling::new(x);
                let ([a, b], out) = (scaling.factors(), out[r..].iter_mut().step_by(height));
                let number = |x: f32| if x.is_finite() { x } else { f32::NAN };
                let x = x.iter().map(|&x| number(x) * a * b * unit).chain(std::iter::repeat(0.0));
                out.zip(x).for_each(|(out, x)| *out = x);
            }
        });
        all
    }

    /// The row, if there is but one.
    pub(super) fn only_row(&self) -> Option<Row<'_>> {
        let &[scaling] = &self.scalings[..] else { return None };
        Some(Row { values: &bytemuck::cast_slice(self.values.bytes())[..self.k], scaling })
    }

    /// The rows of one of [`heights`], its first one and how many there are: the chunk that starts
    /// with value `k`.
    #[inline(always)]
    pub(super) fn tile(&self, (row, height): (usize, usize), k: usize) -> Tile<'_> {
        let (values, len): (&[f32], _) = (bytemuck::cast_slice(self.values.bytes()), CHUNK.min(self.k - k));
        let values = &values[row * self.k + k * height..][..len * height];
        Tile { height, values, scalings: &self.scalings[row..][..height] }
    }
}

/// Values that a thread copies in a nanosecond, about.
const VALUES: usize = 2;
