use super::packing::{pack_halves, pack_scales_and_minima, unpack_halves, unpack_scales_and_minima};
use super::superblock::{WithMinima, magnitude_plus_rms};
use super::{F16, GgmlType, fit::MinSearch};
use crate::{BlockScales, Codes, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `Q5_K`: `value = scale * scales[s] * code - min * minima[s]`, 8 sub-blocks s of 32 values.
///
/// Source: `quantize_row_q5_K_ref` and `dequantize_row_q5_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q5_K;

/// 176 bytes, 256 values.
///
/// ```text
/// byte 0       2     4            16         48         176
///      +-------+-----+------------+----------+----------+
///      | scale | min | scales[12] | high[32] | low[128] |
///      +-------+-----+------------+----------+----------+
///       f16     f16
///
/// bit           7:6               5:0
/// scales[s]     scale s+4 [5:4]   scale s   s = 0..4
/// scales[4+s]   min s+4 [5:4]     min s     s = 0..4
///
/// bit           7:4                   3:0
/// scales[8+s]   min s+4 [3:0]         scale s+4 [3:0]    s = 0..4
/// low[32h+l]    code 64h+32+l [3:0]   code 64h+l [3:0]
/// high[l]       bit j: code 32j+l [4]
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_K {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Multiplies the sub-blocks' minima.
    pub min: F16,
    /// The sub-blocks' packed 6-bit scales and minima.
    pub scales: [u8; 12],
    /// The codes' highest bits.
    pub high: [u8; 32],
    /// The codes' low four bits.
    pub low: [u8; 128],
}

impl GgmlType for Q5_K {
    const NAME: &'static str = "Q5_K";
    const NUMBER: u32 = 13;
    const SCHEME: Scheme =
        Scheme { bits: 5, codes: Codes::Integer { zero: 0 }, scales: Scales::SuperWithMinima { size: 32 } };
    type Block = BlockQ5_K;
    type Values = [f32; 256];
    type Codes = [u8; 256];
    const SUB_SCALES: [i8; 2] = [0, 63];

    #[inline(always)]
    fn for_each_code(block: &BlockQ5_K, mut each: impl FnMut(usize, usize, u32)) {
        unpack_halves(&block.low, |s, l, low| {
            each(s, 32 * s + l, u32::from(low | (block.high[l] >> s & 1) << 4));
        });
    }

    #[inline(always)]
    fn scales(block: &BlockQ5_K) -> BlockScales {
        let (sub_scales, sub_minima) = unpack_scales_and_minima(&block.scales);
        BlockScales { scale: block.scale.bits(), min: block.min.bits(), sub_scales, sub_minima }
    }

    fn pack(codes: &[u8; 256], scales: &BlockScales) -> BlockQ5_K {
        let [scale, min] = [scales.scale, scales.min].map(F16::from_bits);
        let scales = pack_scales_and_minima(&scales.sub_scales, &scales.sub_minima);
        let mut high = [0; 32];
        for (i, code) in codes.iter().enumerate() {
            high[i % 32] |= (code >> 4) << (i / 32);
        }
        BlockQ5_K { scale, min, scales, high, low: pack_halves(&codes.map(|code| code & 15)) }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ5_K {
        let search = MinSearch { max_code: 31, first: -0.5, grids: 16, loss: |error| error * error };
        let fitted = WithMinima::<8>::encode(values, 63, &search, magnitude_plus_rms);
        Self::pack(&fitted.codes, &fitted.scales())
    }
}
