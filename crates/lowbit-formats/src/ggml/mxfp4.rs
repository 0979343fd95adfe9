use super::GgmlType;
use super::fit::largest;
use super::packing::{pack_nibbles, unpack_nibbles};
use crate::{BlockScales, Codes, E2M1, E8M0, Minifloat, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `MXFP4`: `value = 2^(scale - 127) * e2m1(code)`, 32 values per block.
///
/// Source: `quantize_row_mxfp4_ref` and `dequantize_row_mxfp4`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct MXFP4;

/// 17 bytes, 32 values.
///
/// ```text
/// byte 0       1           17
///      +-------+-----------+
///      | scale | codes[16] |
///      +-------+-----------+
///       e8m0
///
/// bit        7:4         3:0
/// codes[j]   code j+16   code j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockMXFP4 {
    /// e8m0; 255 counts as 2^128, as ggml decodes it.
    pub scale: u8,
    /// Packed codes.
    pub codes: [u8; 16],
}

impl GgmlType for MXFP4 {
    const NAME: &'static str = "MXFP4";
    const NUMBER: u32 = 39;
    const SCHEME: Scheme = Scheme { bits: 4, codes: Codes::E2M1, scales: Scales::E8M0 { infinite: false } };
    type Block = BlockMXFP4;
    type Values = [f32; 32];
    type Codes = [u8; 32];

    #[inline(always)]
    fn for_each_code(block: &BlockMXFP4, mut each: impl FnMut(usize, usize, u32)) {
        unpack_nibbles(&block.codes, |i, code| each(0, i, code.into()));
    }

    #[inline(always)]
    fn scales(block: &BlockMXFP4) -> BlockScales {
        BlockScales { scale: block.scale.into(), ..BlockScales::default() }
    }

    /// As ggml does it: twice the code times half the scale.
    #[inline(always)]
    fn decode_block(block: &BlockMXFP4, values: &mut [f32; 32]) {
        let scale = half_scale(block.scale);
        Self::for_each_code(block, |_, i, code| values[i] = TWICE_E2M1[code as usize] * scale);
    }

    fn pack(codes: &[u8; 32], scales: &BlockScales) -> BlockMXFP4 {
        BlockMXFP4 { scale: scales.scale as u8, codes: pack_nibbles(codes) }
    }

    /// (Where the scale would be below 2^-127, ggml lets its byte wrap around; here it is 2^-127.)
    fn encode_block(values: &[f32; 32]) -> BlockMXFP4 {
        let scale = scale_code(largest(values).abs());
        let codes = values.map(|value| E2M1::encode(value / E8M0::decode(scale)));
        BlockMXFP4 { scale, codes: pack_nibbles(&codes) }
    }
}

/// `2^(code - 128)`: half the scale, so that doubled codes stay integers.
#[inline(always)]
fn half_scale(code: u8) -> f32 {
    // 2^-128 and 2^-127 are subnormal.
    f32::from_bits(if code < 2 { 1 << (21 + code) } else { u32::from(code - 1) << 23 })
}

/// Twice the e2m1 codes' values. Code 8 is 0, not -0: ggml's table is of integers.
const TWICE_E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// The code of `2^(floor(log2(largest)) - 2)`, which makes the largest code's value 6 of 4 to 8.
fn scale_code(largest: f32) -> u8 {
    // The logarithm is rounded to f32 before its integer part is taken: just below a power of two
    // it may reach it.
    let exponent = (f64::from(largest).log2() as f32).floor() - 2.0;
    if largest == 0.0 { 0 } else { (exponent + 127.0).clamp(0.0, 255.0) as u8 }
}
