use super::fit::round_between_extremes;
use super::q5_0::{pack, unpack};
use super::{F16, GgmlType};
use bytemuck::{Pod, Zeroable};

/// GGML `Q5_1`: `value = scale * code + min`, 32 values a block.
///
/// Source: `quantize_row_q5_1_ref` and `dequantize_row_q5_1`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q5_1;

/// 24 bytes, 32 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    /// Multiplies every code.
    pub scale: F16,
    /// The value of code 0.
    pub min: F16,
    /// Bit j of the little-endian word is the fifth bit of code j.
    pub high: [u8; 4],
    /// Byte j holds the low four bits of code j (low nibble) and of code j + 16 (high).
    pub low: [u8; 16],
}

impl GgmlType for Q5_1 {
    const NAME: &'static str = "Q5_1";
    const NUMBER: u32 = 7;
    type Block = BlockQ5_1;
    type Values = [f32; 32];

    #[inline(always)]
    fn decode_block(block: &BlockQ5_1, values: &mut [f32; 32]) {
        let (scale, min) = (block.scale.get(), block.min.get());
        let codes = unpack(&block.low, block.high);
        for (y, code) in values.iter_mut().zip(codes) {
            *y = code as f32 * scale + min;
        }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ5_1 {
        let (scale, min, codes) = round_between_extremes(values, 31);
        let (low, high) = pack(&codes);
        BlockQ5_1 { scale: F16::new(scale), min: F16::new(min), high, low }
    }
}
