//! Codes as numbers of x's type, which tensor cores multiply exactly: integers, small floats, and entries of a codebook.

use crate::gpu::cuda::ptx::{permute, subtract_halves};
use crate::gpu::decode::{CODEBOOK, factor, field};
use crate::gpu::layout::{Codes, Layout, RUN};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Bits that are 1 as bf16, twice: codes go into the mantissa. An argument for the reason that
/// [`INTEGERS`](crate::gpu::decode::INTEGERS) is one.
pub(super) const ONES: u32 = 0x3f80_3f80;

/// Codes of a layout in a type of 16 bits that [has them](Integers::exist).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Integers {
    pub layout: Layout,
    pub dtype: FloatType,
    /// How many places in the mantissa codes are taken to: products of each have sums of their own.
    pub places: usize,
}

impl Integers {
    /// Whether `dtype` has every number that codes stand for. Small floats are shifted into f16, whose subnormals are theirs; in bf16
    /// their products would be subnormal themselves.
    pub fn exist(layout: Layout, dtype: FloatType) -> bool {
        match layout.codes {
            Codes::Integer { .. } => dtype != FloatType::F32,
            Codes::E2M1 | Codes::E4M3 | Codes::Codebook => dtype == FloatType::F16,
            Codes::Float(_) => false,
        }
    }

    /// With sums for one place.
    pub fn new(layout: Layout, dtype: FloatType) -> Self {
        Self { layout, dtype, places: 1 }
    }

    /// With sums for as many places as save shifts: as f16, two neighbours of up to 4 bits need one shift, and those of 4
    /// bits none.
    pub fn unshifted(layout: Layout, dtype: FloatType) -> Self {
        let integer = matches!(layout.codes, Codes::Integer { .. });
        let places = if integer && layout.bits <= 4 && dtype == FloatType::F16 { 2 } else { 1 };
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

    /// Words that hold as many codes each in their lower and in their upper halves, for twice [`Self::distance`] codes. Entries of a
    /// codebook take a byte each, those of the lower codes in one word and those of the upper ones in the next.
    fn words(self) -> usize {
        match self.layout.codes {
            Codes::Codebook => 2,
            _ => (self.distance() * self.layout.bits).div_ceil(16),
        }
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
        match (self.layout.codes, self.dtype) {
            (Codes::E2M1 | Codes::Codebook, _) => factor(self.layout),
            // The exponent of f16 is biased by 15, that of e4m3 by 7.
            (Codes::E4M3, _) => 256.0,
            (_, FloatType::BF16) => (1u32 << self.layout.bits) as f32,
            _ => (1u32 << 24) as f32,
        }
    }

    /// What the second place's products are multiplied with beside that.
    pub fn second(self) -> f32 {
        1.0 / (1u32 << self.layout.bits) as f32
    }

    /// What is subtracted from each code: its zero, and the one that bf16 adds.
    pub fn zero(self) -> f32 {
        let Codes::Integer { zero } = self.layout.codes else { return 0.0 };
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
    if comptime!(of.layout.codes == Codes::Codebook) {
        #[unroll]
        for i in 0..comptime!(values / 8) {
            halves[comptime!(to + 2 * i)] = entries(words[comptime!(from + i)]);
            halves[comptime!(to + 2 * i + 1)] = entries(words[comptime!(from + i)] >> 16u32);
        }
    } else if comptime!(of.distance() * of.layout.bits == 16) {
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

/// The codebook's entries, 128 added, of the lowest four codes of a word.
#[cube]
fn entries(codes: u32) -> u32 {
    let low = permute(comptime!(CODEBOOK[0]).runtime(), comptime!(CODEBOOK[1]).runtime(), codes & 0x7777u32);
    let high = permute(comptime!(CODEBOOK[2]).runtime(), comptime!(CODEBOOK[3]).runtime(), codes & 0x7777u32);
    // Of each byte, that of `high` where the code has its uppermost bit.
    permute(low, high, ((codes & 0x8888u32) >> 1u32) | 0x3210u32)
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
    let at = comptime!(from + q / of.distance() * of.words() + bit / 16);
    match comptime!(of.layout.codes) {
        Codes::Integer { .. } => {
            let place = comptime!(of.lowest_bit() + bit % (of.places * width));
            // The bits that are in the first word.
            let here = comptime!(usize::min(width, 16 - bit % 16));
            let mut bits = moved(halves[at], comptime!(bit % 16), here, place);
            if comptime!(here < width) {
                bits |= moved(halves[at + 1], 0usize, comptime!(width - here), comptime!(place + here));
            }
            if comptime!(of.dtype == FloatType::BF16) { bits | ones } else { bits }
        }
        Codes::E2M1 => {
            moved(halves[at], comptime!(bit % 16), 3usize, 9usize)
                | moved(halves[at], comptime!(bit % 16 + 3), 1usize, 15usize)
        }
        Codes::E4M3 => {
            let sign = moved(halves[at], comptime!(bit % 16 + 7), 1usize, 15usize);
            let magnitude = moved(halves[at], comptime!(bit % 16), 7usize, 7usize);
            // The one that is NaN carries into f16's uppermost bit of the exponent, and is NaN with it.
            sign | magnitude | ((magnitude + 0x0080_0080u32) & 0x4000_4000u32)
        }
        // 1024 is added by the exponent, and the entries have 128.
        _ => {
            let bytes =
                permute(halves[at], halves[at + 1], comptime!(0x0400 + 0x0101 * (q as u32 % 4)).runtime());
            subtract_halves((bytes & 0x00ff_00ffu32) | 0x6400_6400u32, 0x6480_6480u32.runtime())
        }
    }
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
