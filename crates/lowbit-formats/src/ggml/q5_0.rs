use super::fit::round_symmetric;
use super::packing::{pack_5_bits, unpack_5_bits};
use super::{F16, GgmlType};
use crate::{BlockScales, Codes, FloatType, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q5_0`: `value = scale * (code - 16)`, 32 values per block.
///
/// Source: `quantize_row_q5_0_ref` and `dequantize_row_q5_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q5_0;

/// 22 bytes, 32 values.
///
/// ```text
/// byte 0       2         6         22
///      +-------+---------+---------+
///      | scale | high[4] | low[16] |
///      +-------+---------+---------+
///       f16
///
/// bit      7:4               3:0
/// low[j]   code j+16 [3:0]   code j [3:0]
/// high     bit j of the little-endian word: code j [4]
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    /// Multiplies every code.
    pub scale: F16,
    /// The codes' highest bits.
    pub high: [u8; 4],
    /// The codes' low four bits.
    pub low: [u8; 16],
}

impl GgmlType for Q5_0 {
    const NAME: &'static str = "Q5_0";
    const NUMBER: u32 = 6;
    const SCHEME: Scheme = Scheme {
        bits: 5,
        codes: Codes::Integer { zero: 16 },
        scales: Scales::Group { float: FloatType::F16, size: 32, biased: false },
    };
    type Block = BlockQ5_0;
    type Values = [f32; 32];
    type Codes = [u8; 32];

    #[inline(always)]
    fn for_each_code(block: &BlockQ5_0, mut each: impl FnMut(usize, usize, u32)) {
        unpack_5_bits(&block.low, block.high, |i, code| each(0, i, code));
    }

    #[inline(always)]
    fn scales(block: &BlockQ5_0) -> BlockScales {
        BlockScales { scale: block.scale.bits(), ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 32], scales: &BlockScales) -> BlockQ5_0 {
        let (low, high) = pack_5_bits(codes);
        BlockQ5_0 { scale: F16::from_bits(scales.scale), high, low }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ5_0 {
        let (scale, codes) = round_symmetric(values, 16);
        Self::pack(&codes, &BlockScales::of(scale, 0.0))
    }
}
