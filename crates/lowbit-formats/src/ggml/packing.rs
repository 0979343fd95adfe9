//! The bit layouts that several types share, each packed and unpacked.

/// Code j into the low nibble of byte j, code j + 16 into the high.
pub(super) fn pack_nibbles<const N: usize, const HALF: usize>(codes: &[u8; N]) -> [u8; HALF] {
    const { assert!(N == 2 * HALF) };
    std::array::from_fn(|i| codes[i] | codes[i + HALF] << 4)
}

/// The inverse of [`pack_nibbles`]: `each(i, code)` for every code i.
#[inline(always)]
pub(super) fn unpack_nibbles<const HALF: usize>(codes: &[u8; HALF], mut each: impl FnMut(usize, u8)) {
    for (i, &byte) in codes.iter().enumerate() {
        each(i, byte & 15);
        each(i + HALF, byte >> 4);
    }
}

/// The 5-bit codes of Q5_0 and Q5_1: the low four bits as [`pack_nibbles`], the fifth of code j to
/// bit j of a little-endian word.
pub(super) fn pack_5_bits(codes: &[u8; 32]) -> ([u8; 16], [u8; 4]) {
    let high = codes.iter().rfold(0u32, |high, code| high << 1 | u32::from(code >> 4));
    (pack_nibbles(&codes.map(|code| code & 15)), high.to_le_bytes())
}

/// The inverse of [`pack_5_bits`]: `each(i, code)` for every code i.
#[inline(always)]
pub(super) fn unpack_5_bits(low: &[u8; 16], high: [u8; 4], mut each: impl FnMut(usize, u32)) {
    let high = u32::from_le_bytes(high);
    // All codes first: it is faster.
    let mut codes = [0u32; 32];
    for i in 0..16 {
        codes[i] = u32::from(low[i] & 15) | (high >> i & 1) << 4;
        codes[i + 16] = u32::from(low[i] >> 4) | (high >> (i + 16) & 1) << 4;
    }
    for (i, &code) in codes.iter().enumerate() {
        each(i, code);
    }
}

/// Code 64 h + i into the low nibble of byte 32 h + i, code 64 h + 32 + i into the high.
pub(super) fn pack_halves(codes: &[u8; 256]) -> [u8; 128] {
    std::array::from_fn(|i| codes[i / 32 * 64 + i % 32] | codes[i / 32 * 64 + 32 + i % 32] << 4)
}

/// The inverse of [`pack_halves`]: `each(s, l, code)` for every code 32 s + l.
#[inline(always)]
pub(super) fn unpack_halves(codes: &[u8; 128], mut each: impl FnMut(usize, usize, u8)) {
    for (h, codes) in codes.as_chunks::<32>().0.iter().enumerate() {
        for (l, &byte) in codes.iter().enumerate() {
            each(2 * h, l, byte & 15);
            each(2 * h + 1, l, byte >> 4);
        }
    }
}

/// Code 128 h + 32 j + i, of two bits, into bits 2j of byte 32 h + i.
pub(super) fn pack_pairs(codes: &[u8; 256]) -> [u8; 64] {
    std::array::from_fn(|i| {
        let code = |j: usize| codes[i / 32 * 128 + j * 32 + i % 32];
        code(0) | code(1) << 2 | code(2) << 4 | code(3) << 6
    })
}

/// The inverse of [`pack_pairs`]: `each(h, j, l, code)` for every code 128 h + 32 j + l, 16 values
/// of l at a time, which are of one sub-block.
#[allow(clippy::needless_range_loop)] // An iterator over 16 of the 32 is not vectorised, which takes five times as long.
#[inline(always)]
pub(super) fn unpack_pairs(codes: &[u8; 64], mut each: impl FnMut(usize, usize, usize, u8)) {
    for (h, codes) in codes.as_chunks::<32>().0.iter().enumerate() {
        for side in 0..2 {
            for l in side * 16..side * 16 + 16 {
                for j in 0..4 {
                    each(h, j, l, codes[l] >> (2 * j) & 3);
                }
            }
        }
    }
}

/// The 6-bit scales and minima of Q4_K's and Q5_K's eight sub-blocks, the first 8 of 16 each, into
/// 12 bytes; [`super::BlockQ4_K`] has the diagram.
pub(super) fn pack_scales_and_minima(scales: &[i8; 16], minima: &[i8; 16]) -> [u8; 12] {
    let [scales, minima] = [scales, minima].map(|integers| integers.map(|integer| integer as u8));
    let mut packed = [0; 12];
    for i in 0..4 {
        packed[i] = scales[i] | scales[i + 4] >> 4 << 6;
        packed[i + 4] = minima[i] | minima[i + 4] >> 4 << 6;
        packed[i + 8] = scales[i + 4] & 15 | (minima[i + 4] & 15) << 4;
    }
    packed
}

/// The inverse of [`pack_scales_and_minima`].
#[inline(always)]
pub(super) fn unpack_scales_and_minima(packed: &[u8; 12]) -> ([i8; 16], [i8; 16]) {
    let (mut scales, mut minima) = ([0; 16], [0; 16]);
    for i in 0..4 {
        scales[i] = (packed[i] & 63) as i8;
        minima[i] = (packed[i + 4] & 63) as i8;
        scales[i + 4] = (packed[i + 8] & 15 | packed[i] >> 6 << 4) as i8;
        minima[i + 4] = (packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4) as i8;
    }
    (scales, minima)
}
