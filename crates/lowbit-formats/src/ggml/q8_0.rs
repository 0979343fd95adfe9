use super::{F16, GgmlType, fit::round_to_signed};
use crate::{BlockScales, Codes, FloatType, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q8_0`: `value = scale * code`, 32 values per block.
///
/// Source: `quantize_row_q8_0_ref` and `dequantize_row_q8_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q8_0;

/// 34 bytes, 32 values.
///
/// ```text
/// byte 0       2           34
///      +-------+-----------+
///      | scale | codes[32] |
///      +-------+-----------+
///       f16     i8
/// ```
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
    const SCHEME: Scheme = Scheme {
        bits: 8,
        codes: Codes::Integer { zero: 128 },
        scales: Scales::Group { float: FloatType::F16, size: 32, biased: false },
    };
    type Block = BlockQ8_0;
    type Values = [f32; 32];
    type Codes = [u8; 32];

    /// The scheme's codes have no sign: 128 is added.
    #[inline(always)]
    fn for_each_code(block: &BlockQ8_0, mut each: impl FnMut(usize, usize, u32)) {
        for (i, &code) in block.codes.iter().enumerate() {
            each(0, i, u32::from(code as u8 ^ 0x80));
        }
    }

    #[inline(always)]
    fn scales(block: &BlockQ8_0) -> BlockScales {
        BlockScales { scale: block.scale.bits(), ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 32], scales: &BlockScales) -> BlockQ8_0 {
        BlockQ8_0 { scale: F16::from_bits(scales.scale), codes: codes.map(|code| (code ^ 0x80) as i8) }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ8_0 {
        let (scale, codes) = round_to_signed(values, 127);
        BlockQ8_0 { scale: F16::new(scale), codes }
    }
}
