//! Shared by IQ1, IQ2 and IQ3: codes that name points of a grid, of which each value is a code of
//! a [`Codebook`](super::Codebook).

/// The code of `index` with a positive value; eight below it is the negative one.
const POSITIVE: u32 = 8;

/// `each(j, code)` for the eight values of a point of IQ2, negative where a bit of `signs` is set.
#[inline(always)]
pub(super) fn eight_magnitudes(point: u16, signs: u8, mut each: impl FnMut(usize, u32)) {
    for j in 0..8 {
        each(j, signed(u32::from(point) >> (2 * j) & 3, signs >> j));
    }
}

/// `each(j, code)` for the four values of a point of IQ3, negative where a bit of `signs` is set.
#[inline(always)]
pub(super) fn four_magnitudes(point: u16, signs: u8, mut each: impl FnMut(usize, u32)) {
    for j in 0..4 {
        each(j, signed(u32::from(point) >> (3 * j) & 7, signs >> j));
    }
}

/// The code of a magnitude, negative if the lowest bit of `sign` is set.
#[inline(always)]
fn signed(index: u32, sign: u8) -> u32 {
    index + if sign & 1 == 0 { POSITIVE } else { 0 }
}

/// `each(j, code)` for the eight values of a point of IQ1, with an eighth subtracted if `below`,
/// else added.
#[inline(always)]
pub(super) fn eight_thirds(point: u16, below: bool, mut each: impl FnMut(usize, u32)) {
    /// The codes of -1, 0 and 1: with an eighth added, and subtracted.
    const CODES: [[u32; 3]; 2] = [[1, 8, 10], [0, 2, 9]];
    for j in 0..8 {
        each(j, CODES[usize::from(below)][usize::from(point >> (2 * j) & 3).min(2)]);
    }
}

/// Eight signs of which seven are stored: their number is even (ggml `ksigns_iq2xs`).
#[inline(always)]
pub(super) fn even_signs(stored: u32) -> u8 {
    let stored = (stored & 127) as u8;
    stored | (stored.count_ones() as u8 & 1) << 7
}

/// Odd integers `2 * code + 1` of sub-blocks, from codes of four bits or fewer.
#[inline(always)]
pub(super) fn odd(code: u8) -> i8 {
    (2 * code + 1) as i8
}

/// Odd integers of 16 sub-blocks of 16 values, whose codes are the nibbles of eight bytes, the low
/// ones first.
#[inline(always)]
pub(super) fn odd_nibbles(packed: &[u8; 8]) -> [i8; 16] {
    std::array::from_fn(|s| odd(packed[s / 2] >> (s % 2 * 4) & 15))
}
