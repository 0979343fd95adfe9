use super::packing::{pack_halves, pack_scales_and_minima, unpack_halves, unpack_scales_and_minima};
use super::superblock::{WithMinima, magnitude_plus_rms};
use super::{F16, GgmlType, fit::MinSearch};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q4_K`: `value = scale * scales[s] * code - min * minima[s]`, 8 sub-blocks s of 32 values.
///
/// Source: `quantize_row_q4_K_ref` and `dequantize_row_q4_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q4_K;

/// 144 bytes, 256 values.
///
/// ```text
/// byte 0       2     4            16           144
///      +-------+-----+------------+------------+
///      | scale | min | scales[12] | codes[128] |
///      +-------+-----+------------+------------+
///       f16     f16
///
/// bit           7:6               5:0
/// scales[s]     scale s+4 [5:4]   scale s   s = 0..4
/// scales[4+s]   min s+4 [5:4]     min s     s = 0..4
///
/// bit            7:4             3:0
/// scales[8+s]    min s+4 [3:0]   scale s+4 [3:0]   s = 0..4
/// codes[32h+l]   code 64h+32+l   code 64h+l
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_K {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Multiplies the sub-blocks' minima.
    pub min: F16,
    /// The sub-blocks' packed 6-bit scales and minima.
    pub scales: [u8; 12],
    /// Packed codes.
    pub codes: [u8; 128],
}

impl GgmlType for Q4_K {
    const NAME: &'static str = "Q4_K";
    const NUMBER: u32 = 12;
    const SCHEME: Scheme =
        Scheme { bits: 4, codes: Codes::Integer { zero: 0 }, scales: Scales::SuperWithMinima { size: 32 } };
    type Block = BlockQ4_K;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [0, 63];

    #[inline(always)]
    fn for_each_code(block: &BlockQ4_K, mut each: impl FnMut(usize, usize, u32)) {
        unpack_halves(&block.codes, |s, l, code| each(s, 32 * s + l, code.into()));
    }

    #[inline(always)]
    fn scales(block: &BlockQ4_K) -> BlockScales {
        let (sub_scales, sub_minima) = unpack_scales_and_minima(&block.scales);
        BlockScales { scale: block.scale.bits(), min: block.min.bits(), sub_scales, sub_minima }
    }

    fn pack(codes: &[u8; 256], scales: &BlockScales) -> BlockQ4_K {
        let [scale, min] = [scales.scale, scales.min].map(F16::from_bits);
        let scales = pack_scales_and_minima(&scales.sub_scales, &scales.sub_minima);
        BlockQ4_K { scale, min, scales, codes: pack_halves(codes) }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ4_K {
        let search = MinSearch { max_code: 15, first: -1.0, grids: 21, loss: |error| error * error };
        let fitted = WithMinima::<8>::encode(values, 63, &search, magnitude_plus_rms);
        Self::pack(&fitted.codes, &fitted.scales())
    }
}
