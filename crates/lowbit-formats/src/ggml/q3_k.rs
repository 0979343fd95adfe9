use super::fit::descend_symmetric;
use super::packing::{pack_pairs, unpack_pairs};
use super::superblock::SymmetricSearch;
use super::{F16, GgmlType};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q3_K`: `value = scale * (scales[s] - 32) * (code - 4)`, 16 sub-blocks s of 16 values.
///
/// Source: `quantize_row_q3_K_ref` and `dequantize_row_q3_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q3_K;

/// 110 bytes, 256 values.
///
/// ```text
/// byte 0          32        96           108     110
///      +----------+---------+------------+-------+
///      | high[32] | low[64] | scales[12] | scale |
///      +----------+---------+------------+-------+
///                                         f16
///
/// bit          7:6                    5:4                    3:2                    1:0
/// low[32h+l]   code 128h+96+l [1:0]   code 128h+64+l [1:0]   code 128h+32+l [1:0]   code 128h+l [1:0]
/// high[l]      bit j: code 32j+l [2]
///
/// bit         7:4               3:0
/// scales[s]   scale s+8 [3:0]   scale s [3:0]   s = 0..8
///
/// bit           7:6                5:4               3:2               1:0
/// scales[8+s]   scale s+12 [5:4]   scale s+8 [5:4]   scale s+4 [5:4]   scale s [5:4]   s = 0..4
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3_K {
    /// The codes' highest bits.
    pub high: [u8; 32],
    /// The codes' low two bits.
    pub low: [u8; 64],
    /// The sub-blocks' packed 6-bit scales, 32 added.
    pub scales: [u8; 12],
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
}

impl GgmlType for Q3_K {
    const NAME: &'static str = "Q3_K";
    const NUMBER: u32 = 11;
    const SCHEME: Scheme =
        Scheme { bits: 3, codes: Codes::Integer { zero: 4 }, scales: Scales::Super { size: 16 } };
    type Block = BlockQ3_K;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [-32, 31];

    #[inline(always)]
    fn for_each_code(block: &BlockQ3_K, mut each: impl FnMut(usize, usize, u32)) {
        unpack_pairs(&block.low, |h, j, l, low| {
            let code = low | (block.high[l] >> (4 * h + j) & 1) << 2;
            each(8 * h + 2 * j + l / 16, 128 * h + 32 * j + l, code.into());
        });
    }

    #[inline(always)]
    fn scales(block: &BlockQ3_K) -> BlockScales {
        BlockScales {
            scale: block.scale.bits(),
            sub_scales: unpack_scales(&block.scales),
            ..BlockScales::default()
        }
    }

    fn pack(codes: &[u8; 256], scales: &BlockScales) -> BlockQ3_K {
        let mut block = BlockQ3_K {
            high: [0; 32],
            low: pack_pairs(&codes.map(|code| code & 3)),
            scales: pack_scales(&scales.sub_scales),
            scale: F16::from_bits(scales.scale),
        };
        for (i, code) in codes.iter().enumerate() {
            block.high[i % 32] |= (code >> 2) << (i / 32);
        }
        block
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ3_K {
        let search =
            SymmetricSearch { half: 4, max_scale: 32, zero: f32::MIN_POSITIVE, fit: descend_symmetric };
        search.encode(values).map_or(BlockQ3_K::zeroed(), |fit| Self::pack(&fit.codes, &fit.scales()))
    }
}

/// The sub-blocks' scales, less 32.
#[inline(always)]
fn unpack_scales(packed: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|s| {
        let low = packed[s % 8] >> (s / 8 * 4) & 15;
        let high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    })
}

/// The inverse of [`unpack_scales`].
fn pack_scales(scales: &[i8; 16]) -> [u8; 12] {
    let mut packed = [0; 12];
    for (s, &scale) in scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        packed[s % 8] |= (scale & 15) << (s / 8 * 4);
        packed[8 + s % 4] |= scale >> 4 << (s / 4 * 2);
    }
    packed
}
