use super::packing::{pack_pairs, unpack_pairs};
use super::superblock::WithMinima;
use super::{F16, GgmlType, fit::MinSearch};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q2_K`: `value = scale * scales[s] * code - min * minima[s]`, 16 sub-blocks s of 16 values.
///
/// Source: `quantize_row_q2_K_ref` and `dequantize_row_q2_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q2_K;

/// 84 bytes, 256 values.
///
/// ```text
/// byte 0            16          80      82    84
///      +------------+-----------+-------+-----+
///      | scales[16] | codes[64] | scale | min |
///      +------------+-----------+-------+-----+
///                                f16     f16
///
/// bit         7:4     3:0
/// scales[s]   min s   scale s
///
/// bit            7:6              5:4              3:2              1:0
/// codes[32h+l]   code 128h+96+l   code 128h+64+l   code 128h+32+l   code 128h+l
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2_K {
    /// The sub-blocks' packed scales and minima.
    pub scales: [u8; 16],
    /// Packed codes.
    pub codes: [u8; 64],
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Multiplies the sub-blocks' minima.
    pub min: F16,
}

impl GgmlType for Q2_K {
    const NAME: &'static str = "Q2_K";
    const NUMBER: u32 = 10;
    const SCHEME: Scheme =
        Scheme { bits: 2, codes: Codes::Integer { zero: 0 }, scales: Scales::SuperWithMinima { size: 16 } };
    type Block = BlockQ2_K;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [0, 15];

    #[inline(always)]
    fn for_each_code(block: &BlockQ2_K, mut each: impl FnMut(usize, usize, u32)) {
        unpack_pairs(&block.codes, |h, j, l, code| {
            each(8 * h + 2 * j + l / 16, 128 * h + 32 * j + l, code.into());
        });
    }

    #[inline(always)]
    fn scales(block: &BlockQ2_K) -> BlockScales {
        BlockScales {
            scale: block.scale.bits(),
            min: block.min.bits(),
            sub_scales: block.scales.map(|packed| (packed & 15) as i8),
            sub_minima: block.scales.map(|packed| (packed >> 4) as i8),
        }
    }

    fn pack(codes: &[u8; 256], scales: &BlockScales) -> BlockQ2_K {
        let BlockScales { scale, min, sub_scales, sub_minima } = scales;
        let [scale, min] = [*scale, *min].map(F16::from_bits);
        let scales = std::array::from_fn(|s| sub_scales[s] as u8 | (sub_minima[s] as u8) << 4);
        BlockQ2_K { scales, codes: pack_pairs(codes), scale, min }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ2_K {
        let search = MinSearch { max_code: 3, first: -0.5, grids: 16, loss: f32::abs };
        let fitted = WithMinima::<16>::encode(values, 15, &search, |values: &[f32; 16]| values.map(f32::abs));
        Self::pack(&fitted.codes, &fitted.scales())
    }
}
