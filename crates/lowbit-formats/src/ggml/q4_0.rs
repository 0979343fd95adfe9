use super::fit::round_symmetric;
use super::packing::{pack_nibbles, unpack_nibbles};
use super::{F16, GgmlType};
use crate::{BlockScales, Codes, FloatType, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q4_0`: `value = scale * (code - 8)`, 32 values per block.
///
/// Source: `quantize_row_q4_0_ref` and `dequantize_row_q4_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q4_0;

/// 18 bytes, 32 values.
///
/// ```text
/// byte 0       2           18
///      +-------+-----------+
///      | scale | codes[16] |
///      +-------+-----------+
///       f16
///
/// bit        7:4         3:0
/// codes[j]   code j+16   code j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Multiplies every code.
    pub scale: F16,
    /// Packed codes.
    pub codes: [u8; 16],
}

impl GgmlType for Q4_0 {
    const NAME: &'static str = "Q4_0";
    const NUMBER: u32 = 2;
    const SCHEME: Scheme = Scheme {
        bits: 4,
        codes: Codes::Integer { zero: 8 },
        scales: Scales::Group { float: FloatType::F16, size: 32, biased: false },
    };
    type Block = BlockQ4_0;
    type Values = [f32; 32];
    type Codes = [u8; 32];

    #[inline(always)]
    fn for_each_code(block: &BlockQ4_0, mut each: impl FnMut(usize, usize, u32)) {
        unpack_nibbles(&block.codes, |i, code| each(0, i, code.into()));
    }

    #[inline(always)]
    fn scales(block: &BlockQ4_0) -> BlockScales {
        BlockScales { scale: block.scale.bits(), ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 32], scales: &BlockScales) -> BlockQ4_0 {
        BlockQ4_0 { scale: F16::from_bits(scales.scale), codes: pack_nibbles(codes) }
    }

    fn encode_block(values: &[f32; 32]) -> BlockQ4_0 {
        let (scale, codes) = round_symmetric(values, 8);
        Self::pack(&codes, &BlockScales::of(scale, 0.0))
    }
}
