use super::GgmlType;
use super::packing::{pack_nibbles, unpack_nibbles};
use crate::{BlockScales, Codes, E4M3, Minifloat, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `NVFP4`: `value = e4m3(scale) * e2m1(code)`, 64 values per block, 16 per scale. The float
/// that multiplies a whole matrix is a tensor of its own in GGUF files.
///
/// Source: `quantize_row_nvfp4_ref` and `dequantize_row_nvfp4`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct NVFP4;

/// 36 bytes, 64 values.
///
/// ```text
/// byte 0           4           36
///      +-----------+-----------+
///      | scales[4] | codes[32] |
///      +-----------+-----------+
///       e4m3 without its sign
///
/// bit            7:4               3:0
/// codes[8s+j]    code 16s+j+8      code 16s+j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockNVFP4 {
    /// One per 16 values. The sign's bit counts for nothing, and 127 as 0, as ggml decodes them.
    /// 255, which nothing writes and ggml reads as 480, is NaN.
    pub scales: [u8; 4],
    /// Packed codes.
    pub codes: [[u8; 8]; 4],
}

/// Values that share a scale.
const GROUP: usize = 16;

impl GgmlType for NVFP4 {
    const NAME: &'static str = "NVFP4";
    const NUMBER: u32 = 40;
    const SCHEME: Scheme = Scheme { bits: 4, codes: Codes::E2M1, scales: Scales::E4M3 };
    const SUB_SCALES: [i8; 2] = [0, 0x7f];
    type Block = BlockNVFP4;
    type Values = [f32; 64];
    type Codes = [u8; 64];

    #[inline(always)]
    fn for_each_code(block: &BlockNVFP4, mut each: impl FnMut(usize, usize, u32)) {
        for (s, codes) in block.codes.iter().enumerate() {
            unpack_nibbles(codes, |i, code| each(s, s * GROUP + i, code.into()));
        }
    }

    /// The sub-blocks' integers are the codes of e4m3.
    #[inline(always)]
    fn scales(block: &BlockNVFP4) -> BlockScales {
        let mut scales = BlockScales::default();
        for (out, &scale) in scales.sub_scales.iter_mut().zip(&block.scales) {
            *out = if scale == 0x7f { 0 } else { scale & 0x7f } as i8;
        }
        scales
    }

    #[inline(always)]
    fn decode_block(block: &BlockNVFP4, values: &mut [f32; 64]) {
        let scales = Self::scales(block).sub_scales.map(|scale| E4M3::decode(scale as u8));
        Self::for_each_code(block, |s, i, code| values[i] = E2M1_VALUES[code as usize] * scales[s]);
    }

    fn pack(codes: &[u8; 64], scales: &BlockScales) -> BlockNVFP4 {
        let mut block = BlockNVFP4 { scales: [0; 4], codes: [[0; 8]; 4] };
        let groups = block.codes.iter_mut().zip(codes.as_chunks::<GROUP>().0);
        groups.for_each(|(packed, codes)| *packed = pack_nibbles(codes));
        block.scales.iter_mut().zip(scales.sub_scales).for_each(|(out, scale)| *out = scale as u8);
        block
    }

    fn encode_block(values: &[f32; 64]) -> BlockNVFP4 {
        let (mut codes, mut scales) = ([0; 64], BlockScales::default());
        let groups = values.as_chunks::<GROUP>().0.iter().zip(codes.as_chunks_mut::<GROUP>().0);
        for ((values, codes), sub_scale) in groups.zip(&mut scales.sub_scales) {
            let largest = values.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
            let scale = scale_code(largest / E2M1_VALUES[7]);
            *sub_scale = scale as i8;
            *codes = values.map(|value| nearest(value, E4M3::decode(scale)));
        }
        Self::pack(&codes, &scales)
    }
}

/// The e2m1 codes' values. Code 8 is 0, not -0: ggml's table is of integers.
const E2M1_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The code whose value times `scale` is nearest to `value`; of two that are equally near the
/// smaller magnitude. Zero is code 0.
fn nearest(value: f32, scale: f32) -> u8 {
    let (mut best, mut least) = (0, value.abs());
    for (code, magnitude) in (1..8).zip(&E2M1_VALUES[1..]) {
        let error = (magnitude * scale - value.abs()).abs();
        if error < least {
            (best, least) = (code, error);
        }
    }
    if value < 0.0 && best > 0 { best | 8 } else { best }
}

/// The code of a scale as ggml rounds it: halves go up, and from 256 on it is 448.
fn scale_code(scale: f32) -> u8 {
    if scale < 1.0 / 64.0 {
        return ((scale * 512.0 + 0.5) as u8).min(7);
    }
    // Rounds away the 20 dropped bits, then changes the exponent's bias.
    match (scale.to_bits() + (1 << 19) - (120 << 23)) >> 20 {
        code @ ..0x78 => code as u8,
        _ => 0x7e,
    }
}
