//! Packing of codes and scales.

/// Code j into the low nibble of byte j, code j + 16 into the high.
pub(super) fn pack_nibbles(codes: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| codes[i] | codes[i + 16] << 4)
}

/// Code 64 h + i into the low nibble of byte 32 h + i, code 64 h + 32 + i into the high.
pub(super) fn pack_halves(codes: &[u8; 256]) -> [u8; 128] {
    std::array::from_fn(|i| codes[i / 32 * 64 + i % 32] | codes[i / 32 * 64 + 32 + i % 32] << 4)
}

/// Code 128 h + 32 j + i, of two bits, into bits 2j of byte 32 h + i.
pub(super) fn pack_pairs(codes: &[u8; 256]) -> [u8; 64] {
    std::array::from_fn(|i| {
        let code = |j: usize| codes[i / 32 * 128 + j * 32 + i % 32];
        code(0) | code(1) << 2 | code(2) << 4 | code(3) << 6
    })
}

/// The 6-bit scales and minima of Q4_K's and Q5_K's eight sub-blocks, packed into 12 bytes:
///
/// ```text
/// bytes 0..4   scales 0..4 in bits 0..6; the high two bits of scales 4..8 in bits 6..8
/// bytes 4..8   minima 0..4 in bits 0..6; the high two bits of minima 4..8 in bits 6..8
/// bytes 8..12  the low four bits of scales 4..8 (low nibble) and of minima 4..8 (high nibble)
/// ```
#[inline(always)]
fn unpack_scales_and_minima(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut minima) = ([0; 8], [0; 8]);
    for i in 0..4 {
        scales[i] = packed[i] & 63;
        minima[i] = packed[i + 4] & 63;
        scales[i + 4] = packed[i + 8] & 15 | packed[i] >> 6 << 4;
        minima[i + 4] = packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
    }
    (scales, minima)
}

/// The scales and minima as they apply to codes: `scale` and `min` times those unpacked.
#[inline(always)]
pub(super) fn sub_scales(scale: f32, min: f32, packed: &[u8; 12]) -> ([f32; 8], [f32; 8]) {
    let (scales, minima) = unpack_scales_and_minima(packed);
    (scales.map(|code| scale * f32::from(code)), minima.map(|code| min * f32::from(code)))
}

/// The inverse of [`unpack_scales_and_minima`].
pub(super) fn pack_scales_and_minima(scales: &[u8; 8], minima: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for i in 0..4 {
        packed[i] = scales[i] | scales[i + 4] >> 4 << 6;
        packed[i + 4] = minima[i] | minima[i + 4] >> 4 << 6;
        packed[i + 8] = scales[i + 4] & 15 | (minima[i + 4] & 15) << 4;
    }
    packed
}
