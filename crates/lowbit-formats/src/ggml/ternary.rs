use super::fit::{largest, reciprocal, truncate};
use super::packing::{pack_pairs, unpack_pairs};
use super::{F16, GgmlType};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// Codes of one scale, which kernels see as superblocks whose integers are all 1.
const SCHEME: Scheme =
    Scheme { bits: 2, codes: Codes::Integer { zero: 1 }, scales: Scales::Super { size: 32 } };

const INTEGERS: [i8; 16] = {
    let (mut integers, mut s) = ([0; 16], 0);
    while s < 8 {
        integers[s] = 1;
        s += 1;
    }
    integers
};

/// The scales of a block, whose integers are all 1.
fn scales_of(scale: F16) -> BlockScales {
    BlockScales { scale: scale.bits(), sub_scales: INTEGERS, ..BlockScales::default() }
}

/// The scale, the greatest magnitude, and the codes of values rounded to -1, 0 or 1 times it.
fn round(values: &[f32; 256]) -> (BlockScales, [u8; 256]) {
    let scale = largest(values).abs();
    let inverse = reciprocal(scale);
    let codes = values.map(|value| (truncate((value * inverse).round()) + 1) as u8);
    (scales_of(F16::new(scale)), codes)
}

/// GGML `TQ2_0`: `value = scale * (code - 1)`, 256 values per block.
///
/// Source: `quantize_row_tq2_0_ref` and `dequantize_row_tq2_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct TQ2_0;

/// 66 bytes, 256 values.
///
/// ```text
/// byte 0           64      66
///      +-----------+-------+
///      | codes[64] | scale |
///      +-----------+-------+
///                   f16
///
/// bit             7:6                5:4               3:2               1:0
/// codes[32h+i]    code 128h+96+i     code 128h+64+i    code 128h+32+i    code 128h+i
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTQ2_0 {
    /// Packed codes.
    pub codes: [u8; 64],
    /// Multiplies every code.
    pub scale: F16,
}

impl GgmlType for TQ2_0 {
    const NAME: &'static str = "TQ2_0";
    const NUMBER: u32 = 35;
    const SCHEME: Scheme = SCHEME;
    type Block = BlockTQ2_0;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 1];

    #[inline(always)]
    fn for_each_code(block: &BlockTQ2_0, mut each: impl FnMut(usize, usize, u32)) {
        unpack_pairs(&block.codes, |h, j, l, code| each(4 * h + j, 128 * h + 32 * j + l, code.into()));
    }

    #[inline(always)]
    fn scales(block: &BlockTQ2_0) -> BlockScales {
        scales_of(block.scale)
    }

    fn pack(codes: &[u8; 256], scales: &BlockScales) -> BlockTQ2_0 {
        BlockTQ2_0 { codes: pack_pairs(codes), scale: F16::from_bits(scales.scale) }
    }

    fn encode_block(values: &[f32; 256]) -> BlockTQ2_0 {
        let (scales, codes) = round(values);
        Self::pack(&codes, &scales)
    }
}

/// GGML `TQ1_0`: `value = scale * (code - 1)`, 256 values per block, five to a byte.
///
/// Source: `quantize_row_tq1_0_ref` and `dequantize_row_tq1_0`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct TQ1_0;

/// 54 bytes, 256 values.
///
/// ```text
/// byte 0          48         52      54
///      +----------+----------+-------+
///      | fives[48]| fours[4] | scale |
///      +----------+----------+-------+
///                             f16
///
/// fives[i], i < 32     codes i, 32+i, 64+i, 96+i, 128+i
/// fives[32+i]          codes 160+i, 176+i, 192+i, 208+i, 224+i
/// fours[i]             codes 240+i, 244+i, 248+i, 252+i, and 0
/// ```
///
/// A byte is `ceil(256 / 243 * number)`, where the codes are the number's digits to base 3, the
/// first one the highest.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTQ1_0 {
    /// Five codes to a byte.
    pub fives: [u8; 48],
    /// Four codes to a byte.
    pub fours: [u8; 4],
    /// Multiplies every code.
    pub scale: F16,
}

/// Runs of bytes whose digits are this far apart: the first value, the bytes, and their digits.
const RUNS: [(usize, usize, usize); 3] = [(0, 32, 5), (160, 16, 5), (240, 4, 4)];

impl GgmlType for TQ1_0 {
    const NAME: &'static str = "TQ1_0";
    const NUMBER: u32 = 34;
    const SCHEME: Scheme = SCHEME;
    type Block = BlockTQ1_0;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [1, 1];

    #[inline(always)]
    fn for_each_code(block: &BlockTQ1_0, mut each: impl FnMut(usize, usize, u32)) {
        let mut bytes = block.fives.iter().chain(&block.fours);
        for (first, count, digits) in RUNS {
            for (i, &byte) in bytes.by_ref().take(count).enumerate() {
                let mut rest = byte;
                for digit in 0..digits {
                    let value = first + digit * count + i;
                    // The fraction times 3: its integer part is the digit.
                    each(value / 32, value, (u32::from(rest) * 3) >> 8);
                    rest = rest.wrapping_mul(3);
                }
            }
        }
    }

    #[inline(always)]
    fn scales(block: &BlockTQ1_0) -> BlockScales {
        scales_of(block.scale)
    }

    fn pack(codes: &[u8; 256], scales: &BlockScales) -> BlockTQ1_0 {
        let mut block = BlockTQ1_0 { scale: F16::from_bits(scales.scale), ..BlockTQ1_0::zeroed() };
        let mut bytes = block.fives.iter_mut().chain(&mut block.fours);
        for (first, count, digits) in RUNS {
            for (i, byte) in bytes.by_ref().take(count).enumerate() {
                let digit = |digit: usize| if digit < digits { codes[first + digit * count + i] } else { 0 };
                let number = (0..5).fold(0, |number, at| number * 3 + u32::from(digit(at)));
                *byte = (number * 256).div_ceil(243) as u8;
            }
        }
        block
    }

    fn encode_block(values: &[f32; 256]) -> BlockTQ1_0 {
        let (scales, codes) = round(values);
        Self::pack(&codes, &scales)
    }
}
