use super::fit::round_between_extremes;
use super::packing::{pack_nibbles, unpack_nibbles};
use super::{F16, GgmlType};
use crate::{BlockScales, Codes, FloatType, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q4_1`: `value = scale * code + min`, 32 values per block.
///
/// Source: `quantize_row_q4_1_ref` and `dequantize_row_q4_1`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q4_1;

/// 20 bytes, 32 values.
///
/// ```text
/// byte 0       2     4           20
///      +-------+-----+-----------+
///      | scale | min | codes[16] |
///      +-------+-----+-----------+
///       f16     f16
///
/// bit        7:4         3:0
/// codes[j]   code j+16   code j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    /// Multiplies every code.
    pub scale: F16,
    /// The value of code 0.
    pub min: F16,
    /// Packed codes.
    pub codes: [u8; 16],
}

impl GgmlType for Q4_1 {
    const NAME: &'static str = "Q4_1";
    const NUMBER: u32 = 3;
    const SCHEME: Scheme = Scheme {
        bits: 4,
        codes: Codes::Integer { zero: 0 },
        scales: Scales::Group { float: FloatType::F16, size: 32, biased: true },
    };
    type Block = BlockQ4_1;
    type Values = [f32; 32];
    type Codes = [u8; 32];

    #[inline(always)]
    fn for_each_code(block: &BlockQ4_1, mut each: impl FnMut(usize, usize, u32)) {
        unpack_nibbles(&block.codes, |i, code| each(0, i, code.into()));
    }

    #[inline(always)]
    fn scales(block: &BlockQ4_1) -> BlockScales {
        BlockScales { scale: block.scale.bits(), min: block.min.bits(), ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 32], scales: &BlockScales) -> BlockQ4_1 {
        let [scale, min] = [scales.scale, scales.min].map(F16::from_bits);
        BlockQ4_1 { scale, min, codes: pack_nibbles(codes) }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ4_1 {
        let (scale, min, codes) = round_between_extremes(values, 15);
        Self::pack(&codes, &BlockScales::of(scale, min))
    }
}
