use super::fit::round_symmetric;
use super::{F16, GgmlType, packing::pack_nibbles};
use bytemuck::{Pod, Zeroable};

/// GGML `Q4_0`: `value = scale * (code - 8)`, 32 values a block.
///
/// Source: `quantize_row_q4_0_ref` and `dequantize_row_q4_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q4_0;

/// 18 bytes, 32 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Multiplies every code.
    pub scale: F16,
    /// Byte j holds code j (low nibble) and code j + 16 (high).
    pub codes: [u8; 16],
}

impl GgmlType for Q4_0 {
    const NAME: &'static str = "Q4_0";
    const NUMBER: u32 = 2;
    type Block = BlockQ4_0;
    type Values = [f32; 32];

    #[inline(always)]
    fn decode_block(block: &BlockQ4_0, values: &mut [f32; 32]) {
        let scale = block.scale.get();
        let (low, high) = values.split_at_mut(16);
        for (i, &byte) in block.codes.iter().enumerate() {
            low[i] = (i32::from(byte & 15) - 8) as f32 * scale;
            high[i] = (i32::from(byte >> 4) - 8) as f32 * scale;
        }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ4_0 {
        let (scale, codes) = round_symmetric(values, 8);
        BlockQ4_0 { scale: F16::new(scale), codes: pack_nibbles(&codes) }
    }
}
