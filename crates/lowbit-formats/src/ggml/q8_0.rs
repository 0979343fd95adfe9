use super::{F16, GgmlType, fit::round_to_signed};
use bytemuck::{Pod, Zeroable};

/// GGML `Q8_0`: `value = scale * code`, 32 values a block.
///
/// Source: `quantize_row_q8_0_ref` and `dequantize_row_q8_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q8_0;

/// 34 bytes, 32 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Multiplies every code.
    pub scale: F16,
    /// In order.
    pub codes: [i8; 32],
}

impl GgmlType for Q8_0 {
    const NAME: &'static str = "Q8_0";
    const NUMBER: u32 = 8;
    type Block = BlockQ8_0;
    type Values = [f32; 32];

    #[inline(always)]
    fn decode_block(block: &BlockQ8_0, values: &mut [f32; 32]) {
        let scale = block.scale.get();
        for (y, &code) in values.iter_mut().zip(&block.codes) {
            *y = f32::from(code) * scale;
        }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ8_0 {
        let (scale, codes) = round_to_signed(values, 127);
        BlockQ8_0 { scale: F16::new(scale), codes }
    }
}
