use super::fit::{largest, reciprocal};
use super::{F16, GgmlType};
use crate::{BlockScales, Codes, FloatType, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q2_0`: `value = scale * (code - 1)`, 64 values per block.
///
/// Source: `quantize_row_q2_0_ref` and `dequantize_row_q2_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q2_0;

/// 18 bytes, 64 values.
///
/// ```text
/// byte 0       2           18
///      +-------+-----------+
///      | scale | codes[16] |
///      +-------+-----------+
///       f16
///
/// bit         7:6         5:4         3:2         1:0
/// codes[i]    code 4i+3   code 4i+2   code 4i+1   code 4i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2_0 {
    /// Multiplies every code.
    pub scale: F16,
    /// Packed codes.
    pub codes: [u8; 16],
}

impl GgmlType for Q2_0 {
    const NAME: &'static str = "Q2_0";
    const NUMBER: u32 = 42;
    const SCHEME: Scheme = Scheme {
        bits: 2,
        codes: Codes::Integer { zero: 1 },
        scales: Scales::Group { float: FloatType::F16, size: 64, biased: false },
    };
    type Block = BlockQ2_0;
    type Values = [f32; 64];
    type Codes = [u8; 64];

    #[inline(always)]
    fn for_each_code(block: &BlockQ2_0, mut each: impl FnMut(usize, usize, u32)) {
        for (i, &byte) in block.codes.iter().enumerate() {
            for j in 0..4 {
                each(0, 4 * i + j, u32::from(byte >> (2 * j) & 3));
            }
        }
    }

    #[inline(always)]
    fn scales(block: &BlockQ2_0) -> BlockScales {
        BlockScales { scale: block.scale.bits(), ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 64], scales: &BlockScales) -> BlockQ2_0 {
        let four = |codes: &[u8]| codes.iter().rfold(0, |packed, code| packed << 2 | code);
        let codes = std::array::from_fn(|i| four(&codes[4 * i..][..4]));
        BlockQ2_0 { scale: F16::from_bits(scales.scale), codes }
    }

    /// The scale is the greatest magnitude: code 3 is read, and not written.
    fn encode_block(values: &[f32; 64]) -> BlockQ2_0 {
        let scale = largest(values).abs();
        let inverse = reciprocal(scale);
        // The reciprocal of a subnormal is infinite: x86's integer of that is the least one.
        let codes = values.map(|value| match (value * inverse).round() {
            quotient if quotient.is_finite() => (quotient as i32 + 1).clamp(0, 3) as u8,
            _ => 0,
        });
        Self::pack(&codes, &BlockScales::of(scale, 0.0))
    }
}
