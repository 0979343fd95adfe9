//! Codes as integers of x's type, which tensor cores multiply exactly.

use crate::gpu::decode::field;
use crate::gpu::layout::{Codes, Layout, RUN};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Bits that are 1 as bf16, twice: codes go into the mantissa. An argument for the reason that
/// [`INTEGERS`](crate::gpu::decode::INTEGERS) is one.
pub(super) const ONES: u32 = 0x3f80_3f80;

/// Codes of a layout, which [has integers](Codes::Integer), in a type of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Integers {
    pub layout: Layout,
    pub dtype: FloatType,
    /// How many places in the mantissa codes are taken to: products of each have sums of their own.
    pub places: usize,
}

impl Integers {
    /// With sums for one place.
    pub fn new(layout: Layout, dtype: FloatType) -> Self {
        Self { layout, dtype, places: 1 }
    }

    /// With sums for as many places as save shifts: as f16, two neighbours of up to 4 bits need one shift, and those of 4
    /// bits none.
    pub fn unshifted(layout: Layout, dtype: FloatType) -> Self {
        let places = if layout.bits <= 4 && dtype == FloatType::F16 { 2 } else { 1 };
        Self { layout, dtype, places }
    }

    /// The place of the two pairs that are multiplied in step `step`.
    pub fn place_of_step(self, step: usize) -> usize {
        step % self.places
    }

    /// Which pair of codes, in the order of their bits, comes `q`-th to the products: both pairs of a step have the same
    /// place.
    fn order(self, q: usize) -> usize {
        match (self.places, self.layout.bits) {
            (1, _) => q,
            // Of two words, so that codes that need no shift are neighbours in a step.
            (_, 4) => q / 8 * 8 + q % 2 * 4 + q / 2 % 4,
            _ => q / 4 * 4 + q % 2 * 2 + q / 2 % 2,
        }
    }

    /// How far apart the two codes are that are taken to the halves of a word together. Both lie in one group.
    pub fn distance(self) -> usize {
        match self.layout.bits {
            2 => 8,
            4 => 4,
            8 => 2,
            _ if self.layout.group() < RUN => 8,
            _ => 16,
        }
    }

    /// Words that hold as many codes each in their lower and in their upper halves, for twice [`Self::distance`] codes.
    fn words(self) -> usize {
        (self.distance() * self.layout.bits).div_ceil(16)
    }

    /// Words that hold `values` codes so.
    pub fn halves(self, values: usize) -> usize {
        values / (2 * self.distance()) * self.words()
    }

    /// The lowest bit of the first place in the mantissa. f16 holds codes as subnormals; bf16's products with those would be
    /// subnormal themselves.
    fn lowest_bit(self) -> usize {
        if self.dtype == FloatType::BF16 { 7 - self.layout.bits } else { 0 }
    }

    /// What products are multiplied with to make up for the codes' place.
    pub fn factor(self) -> f32 {
        match self.dtype {
            FloatType::BF16 => (1u32 << self.layout.bits) as f32,
            _ => (1u32 << 24) as f32,
        }
    }

    /// What the second place's products are multiplied with beside that.
    pub fn second(self) -> f32 {
        1.0 / (1u32 << self.layout.bits) as f32
    }

    /// What is subtracted from each code: its zero, and the one that bf16 adds.
    pub fn zero(self) -> f32 {
        let Codes::Integer { zero } = self.layout.codes else { unreachable!("see `supports`") };
        zero as f32 + if self.dtype == FloatType::BF16 { self.factor() } else { 0.0 }
    }

    /// The values that the `q`-th pair of codes stands for.
    pub fn pair(self, q: usize) -> (usize, usize) {
        let q = self.order(q);
        let distance = self.distance();
        let low = q / distance * 2 * distance + q % distance;
        (low, low + distance)
    }
}

/// Puts `values` codes, whose words begin at `from`, into [`Integers::halves`] from `to` on: those that belong together
/// at the same place of both halves.
#[cube]
pub(super) fn split(
    words: &Array<u32>,
    #[comptime] from: usize,
    halves: &mut Array<u32>,
    #[comptime] to: usize,
    #[comptime] values: usize,
    #[comptime] of: Integers,
) {
    if comptime!(of.distance() * of.layout.bits == 16) {
        #[unroll]
        for i in 0..comptime!(of.halves(values)) {
            halves[to + i] = words[from + i];
        }
    } else {
        let distance = comptime!(of.distance() * of.layout.bits);
        #[unroll]
        for i in 0..comptime!(of.halves(values)) {
            let (block, word) = comptime!((i / of.words(), i % of.words()));
            let bit = comptime!(block * 2 * distance + 16 * word);
            let bits = comptime!(usize::min(16, distance - 16 * word));
            let low = field(words, from, bit, bits);
            let high = field(words, from, comptime!(bit + distance), bits);
            halves[to + i] = (low & 0xffffu32) | (high << 16u32);
        }
    }
}

/// The `q`-th pair of the codes whose halves begin at `from`. `ones` is [`ONES`].
#[cube]
pub(super) fn integers(
    halves: &Array<u32>,
    #[comptime] from: usize,
    #[comptime] q: usize,
    ones: u32,
    #[comptime] of: Integers,
) -> u32 {
    let width = comptime!(of.layout.bits);
    let q = comptime!(of.order(q));
    let bit = comptime!(q % of.distance() * of.layout.bits);
    let place = comptime!(of.lowest_bit() + bit % (of.places * width));
    let at = comptime!(from + q / of.distance() * of.words() + bit / 16);
    // The bits that are in the first word.
    let here = comptime!(usize::min(width, 16 - bit % 16));
    let mut bits = moved(halves[at], comptime!(bit % 16), here, place);
    if comptime!(here < width) {
        bits |= moved(halves[at + 1], 0usize, comptime!(width - here), comptime!(place + here));
    }
    if comptime!(of.dtype == FloatType::BF16) { bits | ones } else { bits }
}

/// `width` bits of both halves, from bit `from` to bit `to`.
#[cube]
fn moved(halves: u32, #[comptime] from: usize, #[comptime] width: usize, #[comptime] to: usize) -> u32 {
    let mask = comptime!((((1u32 << width) - 1) << to) * 0x1_0001);
    if comptime!(from > to) {
        (halves >> comptime!((from - to) as u32)) & mask
    } else if comptime!(from < to) {
        (halves << comptime!((to - from) as u32)) & mask
    } else {
        halves & mask
    }
}
