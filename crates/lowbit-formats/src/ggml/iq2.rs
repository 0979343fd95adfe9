use super::grid_2_3::{IQ2_S as GRID_S, IQ2_XS as GRID_XS, IQ2_XXS as GRID_XXS};
use super::iq::{eight_magnitudes, even_signs, odd, odd_nibbles};
use super::{Codebook, F16, GgmlType};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// Codes of [`Codebook::Iq2`], an integer per `size` values.
const fn scheme(size: usize) -> Scheme {
    Scheme { bits: 4, codes: Codes::Codebook(Codebook::Iq2), scales: Scales::Super { size } }
}

/// GGML `IQ2_XXS`: `value = scale * (2 * scales[s] + 1) * CODEBOOK[code]`, 8 sub-blocks s of 32
/// values. It is read, and not written: llama.cpp chooses its points with an importance matrix.
///
/// Source: `dequantize_row_iq2_xxs`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ2_XXS;

/// 66 bytes, 256 values.
///
/// ```text
/// byte 0       2            66
///      +-------+------------+
///      | scale | points[64] |
///      +-------+------------+
///       f16
///
/// bytes 8s to 8s + 3 of points    the points of values 32s, 32s+8, 32s+16, 32s+24
/// bytes 8s + 4 to 8s + 7          little-endian word: bits 31:28 scale s, 7i+6:7i signs of point i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ2_XXS {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Points, their signs, and the sub-blocks' scales.
    pub points: [u8; 64],
}

impl BlockIQ2_XXS {
    /// The points of each sub-block, and the word behind them.
    #[inline(always)]
    fn sub_blocks(&self) -> impl Iterator<Item = ([u8; 4], u32)> + '_ {
        self.points
            .as_chunks::<8>()
            .0
            .iter()
            .map(|&[a, b, c, d, e, f, g, h]| ([a, b, c, d], u32::from_le_bytes([e, f, g, h])))
    }
}

impl GgmlType for IQ2_XXS {
    const NAME: &'static str = "IQ2_XXS";
    const NUMBER: u32 = 16;
    const SCHEME: Scheme = scheme(32);
    const ENCODES: bool = false;
    type Block = BlockIQ2_XXS;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 31];

    #[inline(always)]
    fn for_each_code(block: &BlockIQ2_XXS, mut each: impl FnMut(usize, usize, u32)) {
        for (s, (points, word)) in block.sub_blocks().enumerate() {
            for (i, point) in points.into_iter().enumerate() {
                let signs = even_signs(word >> (7 * i));
                eight_magnitudes(GRID_XXS[usize::from(point)], signs, |j, code| {
                    each(s, 32 * s + 8 * i + j, code);
                });
            }
        }
    }

    #[inline(always)]
    fn scales(block: &BlockIQ2_XXS) -> BlockScales {
        let mut sub_scales = [0; 16];
        for (sub_scale, (_, word)) in sub_scales.iter_mut().zip(block.sub_blocks()) {
            *sub_scale = odd((word >> 28) as u8);
        }
        BlockScales { scale: block.scale.bits(), sub_scales, ..BlockScales::default() }
    }
}

/// GGML `IQ2_XS`: `value = scale * (2 * scales[s] + 1) * CODEBOOK[code]`, 16 sub-blocks s of 16
/// values. It is read, and not written: llama.cpp chooses its points with an importance matrix.
///
/// Source: `dequantize_row_iq2_xs`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ2_XS;

/// 74 bytes, 256 values.
///
/// ```text
/// byte 0       2            66          74
///      +-------+------------+-----------+
///      | scale | points[64] | scales[8] |
///      +-------+------------+-----------+
///       f16
///
/// bytes 2i, 2i+1 of points    little-endian: bits 15:9 signs of values 8i to 8i+7, 8:0 their point
/// bit                         7:4          3:0
/// scales[i]                   scale 2i+1   scale 2i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ2_XS {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Points and their signs.
    pub points: [u8; 64],
    /// The sub-blocks' scales.
    pub scales: [u8; 8],
}

impl GgmlType for IQ2_XS {
    const NAME: &'static str = "IQ2_XS";
    const NUMBER: u32 = 17;
    const SCHEME: Scheme = scheme(16);
    const ENCODES: bool = false;
    type Block = BlockIQ2_XS;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 31];

    #[inline(always)]
    fn for_each_code(block: &BlockIQ2_XS, mut each: impl FnMut(usize, usize, u32)) {
        for (i, &pair) in block.points.as_chunks().0.iter().enumerate() {
            let word = u16::from_le_bytes(pair);
            let signs = even_signs(u32::from(word >> 9));
            eight_magnitudes(GRID_XS[usize::from(word & 511)], signs, |j, code| {
                each(i / 2, 8 * i + j, code);
            });
        }
    }

    #[inline(always)]
    fn scales(block: &BlockIQ2_XS) -> BlockScales {
        let sub_scales = odd_nibbles(&block.scales);
        BlockScales { scale: block.scale.bits(), sub_scales, ..BlockScales::default() }
    }
}

/// GGML `IQ2_S`: `value = scale * (2 * scales[s] + 1) * CODEBOOK[code]`, 16 sub-blocks s of 16
/// values. It is read, and not written: llama.cpp chooses its points with an importance matrix.
///
/// Source: `dequantize_row_iq2_s`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ2_S;

/// 82 bytes, 256 values.
///
/// ```text
/// byte 0       2                34          66              74          82
///      +-------+----------------+-----------+---------------+-----------+
///      | scale | points_low[32] | signs[32] | points_high[8]| scales[8] |
///      +-------+----------------+-----------+---------------+-----------+
///       f16
///
/// bit                7:6                  5:4                  3:2                  1:0
/// points_high[s]     point 4s+3 [9:8]     point 4s+2 [9:8]     point 4s+1 [9:8]     point 4s [9:8]
///
/// points_low[i]      point i [7:0], of values 8i to 8i+7; their signs are the bits of signs[i]
/// bit                7:4          3:0
/// scales[i]          scale 2i+1   scale 2i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ2_S {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// The low eight bits of the points.
    pub points_low: [u8; 32],
    /// A bit per value, set where it is negative.
    pub signs: [u8; 32],
    /// The high two bits of the points.
    pub points_high: [u8; 8],
    /// The sub-blocks' scales.
    pub scales: [u8; 8],
}

impl GgmlType for IQ2_S {
    const NAME: &'static str = "IQ2_S";
    const NUMBER: u32 = 22;
    const SCHEME: Scheme = scheme(16);
    const ENCODES: bool = false;
    type Block = BlockIQ2_S;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 31];

    #[inline(always)]
    fn for_each_code(block: &BlockIQ2_S, mut each: impl FnMut(usize, usize, u32)) {
        for (i, (&low, &signs)) in block.points_low.iter().zip(&block.signs).enumerate() {
            let high = usize::from(block.points_high[i / 4] >> (i % 4 * 2) & 3);
            eight_magnitudes(GRID_S[usize::from(low) | high << 8], signs, |j, code| {
                each(i / 2, 8 * i + j, code);
            });
        }
    }

    #[inline(always)]
    fn scales(block: &BlockIQ2_S) -> BlockScales {
        let sub_scales = odd_nibbles(&block.scales);
        BlockScales { scale: block.scale.bits(), sub_scales, ..BlockScales::default() }
    }
}
