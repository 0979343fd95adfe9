use super::fit::round_between_extremes;
use super::packing::{pack_5_bits, unpack_5_bits};
use super::{F16, GgmlType};
use crate::{BlockScales, Codes, FloatType, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q5_1`: `value = scale * code + min`, 32 values per block.
///
/// Source: `quantize_row_q5_1_ref` and `dequantize_row_q5_1`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q5_1;

/// 24 bytes, 32 values.
///
/// ```text
/// byte 0       2     4         8         24
///      +-------+-----+---------+---------+
///      | scale | min | high[4] | low[16] |
///      +-------+-----+---------+---------+
///       f16     f16
///
/// bit      7:4               3:0
/// low[j]   code j+16 [3:0]   code j [3:0]
/// high     bit j of the little-endian word: code j [4]
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    /// Multiplies every code.
    pub scale: F16,
    /// The value of code 0.
    pub min: F16,
    /// The codes' highest bits.
    pub high: [u8; 4],
    /// The codes' low four bits.
    pub low: [u8; 16],
}

impl GgmlType for Q5_1 {
    const NAME: &'static str = "Q5_1";
    const NUMBER: u32 = 7;
    const SCHEME: Scheme = Scheme {
        bits: 5,
        codes: Codes::Integer { zero: 0 },
        scales: Scales::Group { float: FloatType::F16, size: 32, biased: true },
    };
    type Block = BlockQ5_1;
    type Values = [f32; 32];
    type Codes = [u8; 32];

    #[inline(always)]
    fn for_each_code(block: &BlockQ5_1, mut each: impl FnMut(usize, usize, u32)) {
        unpack_5_bits(&block.low, block.high, |i, code| each(0, i, code));
    }

    #[inline(always)]
    fn scales(block: &BlockQ5_1) -> BlockScales {
        BlockScales { scale: block.scale.bits(), min: block.min.bits(), ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 32], scales: &BlockScales) -> BlockQ5_1 {
        let [scale, min] = [scales.scale, scales.min].map(F16::from_bits);
        let (low, high) = pack_5_bits(codes);
        BlockQ5_1 { scale, min, high, low }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ5_1 {
        let (scale, min, codes) = round_between_extremes(values, 31);
        Self::pack(&codes, &BlockScales::of(scale, min))
    }
}
