use super::grid_1::IQ1 as GRID;
use super::iq::{eight_thirds, odd};
use super::{Codebook, F16, GgmlType};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// Codes of [`Codebook::Iq1`], an integer per `size` values.
const fn scheme(size: usize) -> Scheme {
    Scheme { bits: 4, codes: Codes::Codebook(Codebook::Iq1), scales: Scales::Super { size } }
}

/// GGML `IQ1_S`: `value = scale * (2 * scales[s] + 1) * CODEBOOK[code]`, 8 sub-blocks s of 32
/// values. It is read, and not written: llama.cpp chooses its points with an importance matrix.
///
/// Source: `dequantize_row_iq1_s`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ1_S;

/// 50 bytes, 256 values.
///
/// ```text
/// byte 0       2                34          50
///      +-------+----------------+-----------+
///      | scale | points_low[32] | words[16] |
///      +-------+----------------+-----------+
///       f16
///
/// points_low[i]           point i [7:0], of values 8i to 8i+7
/// bytes 2s, 2s+1 of words little-endian: bit 15 set where an eighth is subtracted,
///                         14:12 scale s, 3i+2:3i point 4s+i [10:8]
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ1_S {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// The low eight bits of the points.
    pub points_low: [u8; 32],
    /// Their high bits, and the sub-blocks' scales and shifts.
    pub words: [u8; 16],
}

impl BlockIQ1_S {
    /// The word of each sub-block.
    #[inline(always)]
    fn words(&self) -> impl Iterator<Item = u16> + '_ {
        self.words.as_chunks().0.iter().map(|&bytes| u16::from_le_bytes(bytes))
    }
}

impl GgmlType for IQ1_S {
    const NAME: &'static str = "IQ1_S";
    const NUMBER: u32 = 19;
    const SCHEME: Scheme = scheme(32);
    const ENCODES: bool = false;
    type Block = BlockIQ1_S;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 15];

    #[inline(always)]
    fn for_each_code(block: &BlockIQ1_S, mut each: impl FnMut(usize, usize, u32)) {
        for (s, (word, low)) in block.words().zip(block.points_low.as_chunks::<4>().0).enumerate() {
            for (i, &low) in low.iter().enumerate() {
                let point = GRID[usize::from(low) | usize::from(word >> (3 * i) & 7) << 8];
                eight_thirds(point, word & 0x8000 != 0, |j, code| each(s, 32 * s + 8 * i + j, code));
            }
        }
    }

    #[inline(always)]
    fn scales(block: &BlockIQ1_S) -> BlockScales {
        let mut sub_scales = [0; 16];
        for (sub_scale, word) in sub_scales.iter_mut().zip(block.words()) {
            *sub_scale = odd((word >> 12 & 7) as u8);
        }
        BlockScales { scale: block.scale.bits(), sub_scales, ..BlockScales::default() }
    }
}

/// GGML `IQ1_M`: `value = scale * (2 * scales[s] + 1) * CODEBOOK[code]`, 16 sub-blocks s of 16
/// values. It is read, and not written: llama.cpp chooses its points with an importance matrix.
///
/// Source: `dequantize_row_iq1_m`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ1_M;

/// 56 bytes, 256 values.
///
/// ```text
/// byte 0                32                48          56
///      +----------------+-----------------+-----------+
///      | points_low[32] | points_high[16] | scales[8] |
///      +----------------+-----------------+-----------+
///
/// points_low[i]                    point i [7:0], of values 8i to 8i+7
/// bit               7            6:4                  3          2:0
/// points_high[i]    below 2i+1   point 2i+1 [10:8]    below 2i   point 2i [10:8]
///
/// below i is set where an eighth is subtracted from the values of point i
///
/// bytes 2w and 2w + 1 of scales    little-endian: bits 15:12 scale [4w+3:4w], 3i+2:3i scale 4w+i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ1_M {
    /// The low eight bits of the points.
    pub points_low: [u8; 32],
    /// Their high bits and shifts.
    pub points_high: [u8; 16],
    /// The sub-blocks' scales, and the f16 that multiplies them.
    pub scales: [u8; 8],
}

impl GgmlType for IQ1_M {
    const NAME: &'static str = "IQ1_M";
    const NUMBER: u32 = 29;
    const SCHEME: Scheme = scheme(16);
    const ENCODES: bool = false;
    type Block = BlockIQ1_M;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 15];

    #[inline(always)]
    fn for_each_code(block: &BlockIQ1_M, mut each: impl FnMut(usize, usize, u32)) {
        for (i, &low) in block.points_low.iter().enumerate() {
            let high = block.points_high[i / 2] >> (i % 2 * 4);
            let point = GRID[usize::from(low) | usize::from(high & 7) << 8];
            eight_thirds(point, high & 8 != 0, |j, code| each(i / 2, 8 * i + j, code));
        }
    }

    #[inline(always)]
    fn scales(block: &BlockIQ1_M) -> BlockScales {
        let (mut scale, mut sub_scales) = (0, [0; 16]);
        for (w, &bytes) in block.scales.as_chunks().0.iter().enumerate() {
            let word = u16::from_le_bytes(bytes);
            scale |= word >> 12 << (4 * w);
            for i in 0..4 {
                sub_scales[4 * w + i] = odd((word >> (3 * i) & 7) as u8);
            }
        }
        BlockScales { scale, sub_scales, ..BlockScales::default() }
    }
}
