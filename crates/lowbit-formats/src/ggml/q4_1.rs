use super::fit::round_between_extremes;
use super::{F16, GgmlType, packing::pack_nibbles};
use bytemuck::{Pod, Zeroable};

/// GGML `Q4_1`: `value = scale * code + min`, 32 values a block.
///
/// Source: `quantize_row_q4_1_ref` and `dequantize_row_q4_1`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q4_1;

/// 20 bytes, 32 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    /// Multiplies every code.
    pub scale: F16,
    /// The value of code 0.
    pub min: F16,
    /// Byte j holds code j (low nibble) and code j + 16 (high).
    pub codes: [u8; 16],
}

impl GgmlType for Q4_1 {
    const NAME: &'static str = "Q4_1";
    const NUMBER: u32 = 3;
    type Block = BlockQ4_1;
    type Values = [f32; 32];

    #[inline(always)]
    fn decode_block(block: &BlockQ4_1, values: &mut [f32; 32]) {
        let (scale, min) = (block.scale.get(), block.min.get());
        let (low, high) = values.split_at_mut(16);
        for (i, &byte) in block.codes.iter().enumerate() {
            low[i] = f32::from(byte & 15) * scale + min;
            high[i] = f32::from(byte >> 4) * scale + min;
        }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ4_1 {
        let (scale, min, codes) = round_between_extremes(values, 15);
        BlockQ4_1 { scale: F16::new(scale), min: F16::new(min), codes: pack_nibbles(&codes) }
    }
}
