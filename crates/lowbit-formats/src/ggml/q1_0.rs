use super::{F16, GgmlType};
use crate::{BlockScales, Codes, FloatType, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q1_0`: `value = scale * (code - 1)`, 128 values per block; codes are 0 or 2, so that a
/// value is the scale or its negative.
///
/// Source: `quantize_row_q1_0_ref` and `dequantize_row_q1_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q1_0;

/// 18 bytes, 128 values.
///
/// ```text
/// byte 0       2           18
///      +-------+-----------+
///      | scale | signs[16] |
///      +-------+-----------+
///       f16
///
/// signs[i]    bit j is set where value 8i+j is positive
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ1_0 {
    /// The magnitude of every value.
    pub scale: F16,
    /// A bit per value.
    pub signs: [u8; 16],
}

impl GgmlType for Q1_0 {
    const NAME: &'static str = "Q1_0";
    const NUMBER: u32 = 41;
    const SCHEME: Scheme = Scheme {
        bits: 2,
        codes: Codes::Integer { zero: 1 },
        scales: Scales::Group { float: FloatType::F16, size: 128, biased: false },
    };
    type Block = BlockQ1_0;
    type Values = [f32; 128];
    type Codes = [u8; 128];

    #[inline(always)]
    fn for_each_code(block: &BlockQ1_0, mut each: impl FnMut(usize, usize, u32)) {
        for (i, &signs) in block.signs.iter().enumerate() {
            for j in 0..8 {
                each(0, 8 * i + j, u32::from(signs >> j & 1) * 2);
            }
        }
    }

    #[inline(always)]
    fn scales(block: &BlockQ1_0) -> BlockScales {
        BlockScales { scale: block.scale.bits(), ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 128], scales: &BlockScales) -> BlockQ1_0 {
        let eight = |codes: &[u8]| codes.iter().rfold(0, |signs, code| signs << 1 | code >> 1);
        let signs = std::array::from_fn(|i| eight(&codes[8 * i..][..8]));
        BlockQ1_0 { scale: F16::from_bits(scales.scale), signs }
    }

    /// The scale is the mean magnitude.
    fn encode_block(values: &[f32; 128]) -> BlockQ1_0 {
        let scale = values.iter().fold(0.0, |sum, value| sum + value.abs()) / 128.0;
        let codes = values.map(|value| if value >= 0.0 { 2 } else { 0 });
        Self::pack(&codes, &BlockScales::of(scale, 0.0))
    }
}
