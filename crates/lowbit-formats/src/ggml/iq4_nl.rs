use super::codebook::{self, CODEBOOK, nearest};
use super::fit::largest_above_zero;
use super::{F16, GgmlType, packing::pack_nibbles};
use bytemuck::{Pod, Zeroable};

/// GGML `IQ4_NL`: `value = scale * CODEBOOK[code]`, 32 values a block.
///
/// Source: `quantize_row_iq4_nl_ref` and `dequantize_row_iq4_nl`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ4_NL;

/// 18 bytes, 32 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ4_NL {
    /// Multiplies every code's value.
    pub scale: F16,
    /// Byte j holds code j (low nibble) and code j + 16 (high).
    pub codes: [u8; 16],
}

impl GgmlType for IQ4_NL {
    const NAME: &'static str = "IQ4_NL";
    const NUMBER: u32 = 20;
    type Block = BlockIQ4_NL;
    type Values = [f32; 32];

    #[inline(always)]
    fn decode_block(block: &BlockIQ4_NL, values: &mut [f32; 32]) {
        *values = codebook::decode(block.scale.get(), &block.codes);
    }

    /// Blocks that count as zero get the code nearest to it; ggml leaves theirs undefined.
    fn encode_block(values: &[f32; 32]) -> BlockIQ4_NL {
        // The value of largest magnitude is coded as the codebook's first.
        let inverse = largest_above_zero(values).map(|largest| 1.0 / (largest / CODEBOOK[0]));
        let scale = codebook::fit(values, inverse);
        let inverse = inverse.unwrap_or(0.0);
        let codes = values.map(|value| nearest(inverse * value));
        BlockIQ4_NL { scale: F16::new(scale), codes: pack_nibbles(&codes) }
    }
}
