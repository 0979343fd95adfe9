use super::fit::round_symmetric;
use super::{F16, GgmlType, packing::pack_nibbles};
use bytemuck::{Pod, Zeroable};

/// GGML `Q5_0`: `value = scale * (code - 16)`, 32 values a block.
///
/// Source: `quantize_row_q5_0_ref` and `dequantize_row_q5_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q5_0;

/// 22 bytes, 32 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    /// Multiplies every code.
    pub scale: F16,
    /// Bit j of the little-endian word is the fifth bit of code j.
    pub high: [u8; 4],
    /// Byte j holds the low four bits of code j (low nibble) and of code j + 16 (high).
    pub low: [u8; 16],
}

impl GgmlType for Q5_0 {
    const NAME: &'static str = "Q5_0";
    const NUMBER: u32 = 6;
    type Block = BlockQ5_0;
    type Values = [f32; 32];

    #[inline(always)]
    fn decode_block(block: &BlockQ5_0, values: &mut [f32; 32]) {
        let scale = block.scale.get();
        let codes = unpack(&block.low, block.high);
        for (y, code) in values.iter_mut().zip(codes) {
            *y = (code as i32 - 16) as f32 * scale;
        }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ5_0 {
        let (scale, codes) = round_symmetric(values, 16);
        let (low, high) = pack(&codes);
        BlockQ5_0 { scale: F16::new(scale), high, low }
    }
}

/// The 5-bit codes of Q5_0 and Q5_1.
#[inline(always)]
pub(super) fn unpack(low: &[u8; 16], high: [u8; 4]) -> [u32; 32] {
    let high = u32::from_le_bytes(high);
    let mut codes = [0; 32];
    for i in 0..16 {
        codes[i] = u32::from(low[i] & 15) | (high >> i & 1) << 4;
        codes[i + 16] = u32::from(low[i] >> 4) | (high >> (i + 16) & 1) << 4;
    }
    codes
}

/// The inverse of [`unpack`].
pub(super) fn pack(codes: &[u8; 32]) -> ([u8; 16], [u8; 4]) {
    let high = codes.iter().rfold(0u32, |high, code| high << 1 | u32::from(code >> 4));
    (pack_nibbles(&codes.map(|code| code & 15)), high.to_le_bytes())
}
