use super::grid_2_3::{IQ3_S as GRID_S, IQ3_XXS as GRID_XXS};
use super::iq::{even_signs, four_magnitudes, odd};
use super::{Codebook, F16, GgmlType};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// Codes of a codebook, an integer per 32 values.
const fn scheme(codebook: Codebook) -> Scheme {
    Scheme { bits: 4, codes: Codes::Codebook(codebook), scales: Scales::Super { size: 32 } }
}

/// GGML `IQ3_XXS`: `value = scale * (2 * scales[s] + 1) * CODEBOOK[code]`, 8 sub-blocks s of 32
/// values. It is read, and not written: llama.cpp chooses its points with an importance matrix.
///
/// Source: `dequantize_row_iq3_xxs`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ3_XXS;

/// 98 bytes, 256 values.
///
/// ```text
/// byte 0       2            66          98
///      +-------+------------+-----------+
///      | scale | points[64] | words[32] |
///      +-------+------------+-----------+
///       f16
///
/// points[i]                 the point of values 4i to 4i+3
/// bytes 4s to 4s+3 of words little-endian: bits 31:28 scale s,
///                           7i+6:7i signs of values 32s+8i to 32s+8i+7
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ3_XXS {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Points of four values.
    pub points: [u8; 64],
    /// Signs, and the sub-blocks' scales.
    pub words: [u8; 32],
}

impl BlockIQ3_XXS {
    /// The word of each sub-block.
    #[inline(always)]
    fn words(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes))
    }
}

impl GgmlType for IQ3_XXS {
    const NAME: &'static str = "IQ3_XXS";
    const NUMBER: u32 = 18;
    const SCHEME: Scheme = scheme(Codebook::Iq3Xxs);
    const ENCODES: bool = false;
    type Block = BlockIQ3_XXS;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 31];

    #[inline(always)]
    fn for_each_code(block: &BlockIQ3_XXS, mut each: impl FnMut(usize, usize, u32)) {
        for (s, (word, points)) in block.words().zip(block.points.as_chunks::<8>().0).enumerate() {
            for (i, &point) in points.iter().enumerate() {
                let signs = even_signs(word >> (7 * (i / 2))) >> (i % 2 * 4);
                four_magnitudes(GRID_XXS[usize::from(point)], signs, |j, code| {
                    each(s, 32 * s + 4 * i + j, code);
                });
            }
        }
    }

    #[inline(always)]
    fn scales(block: &BlockIQ3_XXS) -> BlockScales {
        let mut sub_scales = [0; 16];
        for (sub_scale, word) in sub_scales.iter_mut().zip(block.words()) {
            *sub_scale = odd((word >> 28) as u8);
        }
        BlockScales { scale: block.scale.bits(), sub_scales, ..BlockScales::default() }
    }
}

/// GGML `IQ3_S`: `value = scale * (2 * scales[s] + 1) * CODEBOOK[code]`, 8 sub-blocks s of 32
/// values. It is read, and not written: llama.cpp chooses its points with an importance matrix.
///
/// Source: `dequantize_row_iq3_s`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ3_S;

/// 110 bytes, 256 values.
///
/// ```text
/// byte 0       2                66               74          106         110
///      +-------+----------------+----------------+-----------+-----------+
///      | scale | points_low[64] | points_high[8] | signs[32] | scales[4] |
///      +-------+----------------+----------------+-----------+-----------+
///       f16
///
/// points_low[i]      point i [7:0], of values 4i to 4i+3
/// points_high[s]     bit j is point 8s+j [8]
/// signs[i]           bit j is set where value 8i+j is negative
/// bit                7:4          3:0
/// scales[i]          scale 2i+1   scale 2i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ3_S {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// The low eight bits of the points.
    pub points_low: [u8; 64],
    /// Their ninth bits.
    pub points_high: [u8; 8],
    /// A bit per value.
    pub signs: [u8; 32],
    /// The sub-blocks' scales.
    pub scales: [u8; 4],
}

impl GgmlType for IQ3_S {
    const NAME: &'static str = "IQ3_S";
    const NUMBER: u32 = 21;
    const SCHEME: Scheme = scheme(Codebook::Iq3S);
    const ENCODES: bool = false;
    type Block = BlockIQ3_S;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 31];

    #[inline(always)]
    fn for_each_code(block: &BlockIQ3_S, mut each: impl FnMut(usize, usize, u32)) {
        for (i, &low) in block.points_low.iter().enumerate() {
            let high = usize::from(block.points_high[i / 8] >> (i % 8) & 1);
            let signs = block.signs[i / 2] >> (i % 2 * 4);
            four_magnitudes(GRID_S[usize::from(low) | high << 8], signs, |j, code| {
                each(i / 8, 4 * i + j, code);
            });
        }
    }

    #[inline(always)]
    fn scales(block: &BlockIQ3_S) -> BlockScales {
        let mut sub_scales = [0; 16];
        for (s, sub_scale) in sub_scales[..8].iter_mut().enumerate() {
            *sub_scale = odd(block.scales[s / 2] >> (s % 2 * 4) & 15);
        }
        BlockScales { scale: block.scale.bits(), sub_scales, ..BlockScales::default() }
    }
}
