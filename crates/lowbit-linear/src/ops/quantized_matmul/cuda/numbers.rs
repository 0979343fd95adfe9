//! Codes as numbers of x's type, which tensor cores multiply exactly: integers, small floats, and
//! entries of a codebook.

use crate::gpu::cuda::ptx::{permute, subtract, subtract_halves};
use crate::gpu::decode::factor;
use crate::gpu::layout::{Codes, Layout, RUN};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{Codebook, FloatType};

/// Bits that are 1 as bf16, twice: codes go into the mantissa. An argument for the reason that
/// [`INTEGERS`](crate::gpu::decode::INTEGERS) is one.
pub(super) const ONES: u32 = 0x3f80_3f80;

/// A codebook's entries without signs, of which none of the first half is above 0: byte j of word
/// i is entry `4 i + j`.
fn magnitudes(codebook: Codebook) -> [u32; 4] {
    let mut words = [0; 4];
    for (code, entry) in codebook.entries().into_iter().enumerate() {
        words[code / 4] |= u32::from(entry.unsigned_abs()) << (8 * (code % 4));
    }
    words
}

/// Codes of a layout in a type of 16 bits that [has them](Numbers::exist).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Numbers {
    pub layout: Layout,
    pub dtype: FloatType,
    /// The number of places in the mantissa that codes are taken to: products of each have sums of
    /// their own.
    pub places: usize,
}

impl Numbers {
    /// True if `dtype` has every number that codes stand for. Small floats are shifted into f16,
    /// whose subnormals are theirs; in bf16 their products would be subnormal themselves.
    pub fn exist(layout: Layout, dtype: FloatType) -> bool {
        match layout.codes {
            Codes::Integer { .. } => dtype != FloatType::F32,
            Codes::E2M1 | Codes::E4M3 | Codes::Codebook(_) => dtype == FloatType::F16,
            Codes::Float(_) => false,
        }
    }

    /// With sums for one place.
    pub fn new(layout: Layout, dtype: FloatType) -> Self {
        Self { layout, dtype, places: 1 }
    }

    /// With sums for as many places as save shifts: as f16, two neighbours of up to 5 bits need one
    /// shift, and those of 4 bits none.
    pub fn unshifted(layout: Layout, dtype: FloatType) -> Self {
        let integer = matches!(layout.codes, Codes::Integer { .. });
        let places = if integer && layout.bits <= 5 && dtype == FloatType::F16 { 2 } else { 1 };
        Self { layout, dtype, places }
    }

    /// The codebook whose entries codes are.
    fn codebook(self) -> Option<Codebook> {
        match self.layout.codes {
            Codes::Codebook(codebook) => Some(codebook),
            _ => None,
        }
    }

    /// The place of the two pairs that are multiplied in step `step`.
    pub fn place_of_step(self, step: usize) -> usize {
        step % self.places
    }

    /// The pair of codes, in the order of their bits, that comes `q`-th to the products: both pairs
    /// of a step have the same place.
    fn order(self, q: usize) -> usize {
        match (self.places, self.layout.bits) {
            (1, _) => q,
            // Of two words, so that codes that need no shift are neighbours in a step.
            (_, 4) => q / 8 * 8 + q % 2 * 4 + q / 2 % 4,
            _ => q / 4 * 4 + q % 2 * 2 + q / 2 % 2,
        }
    }

    /// The distance of the two codes that are taken to the halves of a word together. Both lie in
    /// one group.
    pub fn distance(self) -> usize {
        match self.layout.bits {
            _ if matches!(self.layout.codes, Codes::Codebook(_)) => 2,
            2 => 8,
            4 => 4,
            8 => 2,
            _ if self.layout.group() < RUN => 8,
            _ => 16,
        }
    }

    /// Words that hold as many codes each in their lower and in their upper halves, for twice
    /// [`Self::distance`] codes. Small floats of 4 bits and entries of a codebook take a byte each.
    fn words(self) -> usize {
        match self.layout.codes {
            Codes::E2M1 => 2,
            Codes::Codebook(_) => 1,
            _ => (self.distance() * self.layout.bits).div_ceil(16),
        }
    }

    /// The bytes of the codes' words that make the `i`-th of these: pairs are whole bytes apart.
    fn gathered(self, i: usize) -> Gathered {
        let distance = self.distance() * self.layout.bits;
        let (block, bit) = (i / self.words(), i % self.words() * 16);
        // There may be less than a half left.
        let second = usize::from(distance - bit > 8);
        let low = (block * 2 * distance + bit) / 8;
        let high = low + distance / 8;
        let words = (low / 4, (high + second) / 4);
        let bytes = [low, low + second, high, high + second].iter().rfold(0, |bytes, &byte| {
            let of_last = if byte / 4 == words.0 { 0 } else { 4 };
            bytes << 4 | (of_last + byte % 4) as u32
        });
        Gathered { words, bytes }
    }

    /// Words that hold `values` codes so.
    pub fn halves(self, values: usize) -> usize {
        values / (2 * self.distance()) * self.words()
    }

    /// The lowest bit of the first place in the mantissa. f16 holds codes as subnormals; bf16's
    /// products with those would be subnormal themselves.
    fn lowest_bit(self) -> usize {
        if self.dtype == FloatType::BF16 { 7 - self.layout.bits } else { 0 }
    }

    /// The factor of products that makes up for the codes' place.
    pub fn factor(self) -> f32 {
        match (self.layout.codes, self.dtype) {
            (Codes::E2M1 | Codes::Codebook(_), _) => factor(self.layout),
            // The exponent of f16 is biased by 15, that of e4m3 by 7.
            (Codes::E4M3, _) => 256.0,
            (_, FloatType::BF16) => (1u32 << self.layout.bits) as f32,
            _ => (1u32 << 24) as f32,
        }
    }

    /// The second place's factor beside that.
    pub fn second(self) -> f32 {
        1.0 / (1u32 << self.layout.bits) as f32
    }

    /// The number that is subtracted from each code: its zero, and the one that bf16 adds.
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

/// Two words, and which of their bytes make another one, as [`permute`] takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gathered {
    words: (usize, usize),
    bytes: u32,
}

/// Puts `values` codes, whose words begin at `from`, into [`Numbers::halves`] from `to` on: those
/// that belong together at the same place of both halves. `ones` is [`ONES`].
#[cube]
pub(super) fn split(
    words: &Array<u32>,
    #[comptime] from: usize,
    halves: &mut Array<u32>,
    #[comptime] to: usize,
    #[comptime] values: usize,
    ones: u32,
    #[comptime] of: Numbers,
) {
    if comptime!(of.codebook().is_some()) {
        let codebook = comptime!(of.codebook().unwrap_or(Codebook::Iq4));
        #[unroll]
        for i in 0..comptime!(values / 8) {
            let codes = words[comptime!(from + i)];
            let others = codes ^ 0x8888_8888u32;
            halves[comptime!(to + 2 * i)] = entries(codes, others, ones, codebook);
            halves[comptime!(to + 2 * i + 1)] = entries(codes >> 16u32, others >> 16u32, ones, codebook);
        }
    } else if comptime!(of.layout.codes == Codes::E2M1) {
        #[unroll]
        for i in 0..comptime!(values / 8) {
            let codes = words[comptime!(from + i)];
            halves[comptime!(to + 2 * i)] = upper_bytes(codes << 4u32, codes << 1u32);
            halves[comptime!(to + 2 * i + 1)] = upper_bytes(codes, codes >> 3u32);
        }
    } else if comptime!(of.distance() * of.layout.bits == 16) {
        #[unroll]
        for i in 0..comptime!(of.halves(values)) {
            halves[to + i] = words[from + i];
        }
    } else {
        #[unroll]
        for i in 0..comptime!(of.halves(values)) {
            let (first, last) = comptime!((from + of.gathered(i).words.0, from + of.gathered(i).words.1));
            halves[to + i] = permute(words[first], words[last], comptime!(of.gathered(i).bytes).runtime());
        }
    }
}

/// A codebook's entries, 128 added, of the lowest four of `codes`. `others` are the codes with
/// their uppermost bits flipped.
#[cube]
fn entries(codes: u32, others: u32, ones: u32, #[comptime] codebook: Codebook) -> u32 {
    // If a code has its uppermost bit, its byte is the uppermost bit of the entry that the other
    // bits name: 0.
    let below = permute(
        kept(comptime!(magnitudes(codebook)[0]), ones),
        kept(comptime!(magnitudes(codebook)[1]), ones),
        codes,
    );
    let above = permute(
        kept(comptime!(magnitudes(codebook)[2]), ones),
        kept(comptime!(magnitudes(codebook)[3]), ones),
        others,
    );
    // No byte borrows from the next.
    (above + 0x8080_8080u32) - below
}

/// A constant in a register that keeps it: a literal would be loaded again for every use.
#[cube]
fn kept(#[comptime] value: u32, ones: u32) -> u32 {
    ones ^ comptime!(value ^ ONES)
}

/// The upper bytes of four codes of e2m1 as f16, where a word has their signs in its bytes'
/// uppermost bits, and another one the rest one place above the lowest.
#[cube]
fn upper_bytes(signs: u32, magnitudes: u32) -> u32 {
    (signs & 0x8080_8080u32) | (magnitudes & 0x0e0e_0e0eu32)
}

/// The `q`-th pair of the codes whose halves begin at `from`. `ones` is [`ONES`].
#[cube]
pub(super) fn numbers(
    halves: &Array<u32>,
    #[comptime] from: usize,
    #[comptime] q: usize,
    ones: u32,
    #[comptime] of: Numbers,
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
            let bytes = halves[comptime!(from + q / 4 * 2 + q % 2)];
            let upper = bytes & 0xff00_ff00u32;
            // Additions and multiplications have a pipe of their own, which masks leave idle.
            if comptime!(q % 4 >= 2) { upper } else { subtract(bytes, upper) << 8u32 }
        }
        Codes::E4M3 => {
            let sign = moved(halves[at], comptime!(bit % 16 + 7), 1usize, 15usize);
            let magnitude = moved(halves[at], comptime!(bit % 16), 7usize, 7usize);
            // The one that is NaN carries into f16's uppermost bit of the exponent, and is NaN with
            // it.
            sign | magnitude | ((magnitude + 0x0080_0080u32) & 0x4000_4000u32)
        }
        // 1024 is added by the exponent, and the entries have 128.
        _ => {
            let entries = halves[comptime!(from + q / 2)];
            let which = comptime!(0x4240u32 + 0x0101 * (q as u32 % 2)).runtime();
            subtract_halves(permute(entries, kept(0x6464_6464u32, ones), which), 0x6480_6480u32.runtime())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::layout::Scales;

    /// The result of [`permute`].
    fn permuted(low: u32, high: u32, which: u32) -> u32 {
        let bytes = (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
        u32::from_le_bytes(std::array::from_fn(|i| bytes[(which >> (4 * i) & 7) as usize]))
    }

    /// Codes that are gathered lie where their pair says, those of each half one after the other.
    #[test]
    fn gathered_codes_are_pairs() {
        const VALUES: usize = 64;
        for (bits, size) in [(3, 16), (3, 32), (5, 32), (6, 16), (6, 32)] {
            let layout = Layout { bits, codes: Codes::Integer { zero: 0 }, scales: Scales::Super { size } };
            let of = Numbers::new(layout, FloatType::F16);
            let mut random = numcheck::Random::new(bits as u64);
            let words: Vec<u32> = (0..VALUES / 32 * bits).map(|_| random.bits() as u32).collect();
            let bit_of = |i: usize| words[i / 32] >> (i % 32) & 1;
            let halves: Vec<u32> = (0..of.halves(VALUES))
                .map(|i| {
                    let Gathered { words: (first, last), bytes } = of.gathered(i);
                    permuted(words[first], words[last], bytes)
                })
                .collect();
            for q in 0..VALUES / 2 {
                let (low, high) = of.pair(q);
                for bit in 0..bits {
                    let at = q % of.distance() * bits + bit;
                    let half = halves[q / of.distance() * of.words() + at / 16] >> (at % 16);
                    let want = (bit_of(low * bits + bit), bit_of(high * bits + bit));
                    assert_eq!(
                        (half & 1, half >> 16 & 1),
                        want,
                        "{bits} bits in groups of {size}, pair {q}, bit {bit}"
                    );
                }
            }
        }
    }
}
