use super::fit::{ZERO, search_symmetric};
use super::packing::{pack_pairs, unpack_pairs};
use super::superblock::SymmetricSearch;
use super::{F16, GgmlType};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q6_K`: `value = scale * scales[s] * (code - 32)`, 16 sub-blocks s of 16 values.
///
/// Source: `quantize_row_q6_K_ref` and `dequantize_row_q6_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q6_K;

/// 210 bytes, 256 values.
///
/// ```text
/// byte 0          128        192          208     210
///      +----------+----------+------------+-------+
///      | low[128] | high[64] | scales[16] | scale |
///      +----------+----------+------------+-------+
///                             i8           f16
///
/// bit          7:4                    3:0
/// low[64h+l]   code 128h+64+l [3:0]   code 128h+l [3:0]   l = 0..64
///
/// bit           7:6                    5:4                    3:2                    1:0
/// high[32h+l]   code 128h+96+l [5:4]   code 128h+64+l [5:4]   code 128h+32+l [5:4]   code 128h+l [5:4]
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6_K {
    /// The codes' low four bits.
    pub low: [u8; 128],
    /// The codes' high two bits.
    pub high: [u8; 64],
    /// The sub-blocks' scales.
    pub scales: [i8; 16],
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
}

impl GgmlType for Q6_K {
    const NAME: &'static str = "Q6_K";
    const NUMBER: u32 = 14;
    const SCHEME: Scheme =
        Scheme { bits: 6, codes: Codes::Integer { zero: 32 }, scales: Scales::Super { size: 16 } };
    type Block = BlockQ6_K;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [-128, 127];

    #[inline(always)]
    fn for_each_code(block: &BlockQ6_K, mut each: impl FnMut(usize, usize, u32)) {
        unpack_pairs(&block.high, |h, j, l, high| {
            let low = block.low.as_chunks::<64>().0[h][j % 2 * 32 + l] >> (j / 2 * 4) & 15;
            each(8 * h + 2 * j + l / 16, 128 * h + 32 * j + l, u32::from(low | high << 4));
        });
    }

    #[inline(always)]
    fn scales(block: &BlockQ6_K) -> BlockScales {
        BlockScales { scale: block.scale.bits(), sub_scales: block.scales, ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 256], scales: &BlockScales) -> BlockQ6_K {
        let mut low = [0; 128];
        for (half, codes) in low.as_chunks_mut::<64>().0.iter_mut().zip(codes.as_chunks::<128>().0) {
            *half = std::array::from_fn(|i| codes[i] & 15 | codes[i + 64] << 4);
        }
        let (high, scale) = (pack_pairs(&codes.map(|code| code >> 4)), F16::from_bits(scales.scale));
        BlockQ6_K { low, high, scales: scales.sub_scales, scale }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ6_K {
        let search = SymmetricSearch { half: 32, max_scale: 128, zero: ZERO, fit: search_symmetric };
        search.encode(values).map_or(BlockQ6_K::zeroed(), |fit| Self::pack(&fit.codes, &fit.scales()))
    }
}
