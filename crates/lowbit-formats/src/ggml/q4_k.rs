use super::packing::{pack_halves, pack_scales_and_minima, sub_scales};
use super::superblock::{WithMinima, magnitude_plus_rms};
use super::{F16, GgmlType, fit::MinSearch};
use bytemuck::{Pod, Zeroable};

/// GGML `Q4_K`: `value = scale * scales[s] * code - min * minima[s]`, 8 sub-blocks s of 32 values.
///
/// Source: `quantize_row_q4_K_ref` and `dequantize_row_q4_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q4_K;

/// 144 bytes, 256 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_K {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Multiplies the sub-blocks' minima.
    pub min: F16,
    /// The sub-blocks' 6-bit scales and minima: bytes 0..4 hold scales 0..4 and, above them, the high two bits of
    /// scales 4..8; bytes 4..8 the same of the minima; bytes 8..12 the low four bits of scales 4..8 (low nibble) and
    /// of minima 4..8 (high).
    pub scales: [u8; 12],
    /// Byte 32 h + i holds code 64 h + i (low nibble) and code 64 h + 32 + i (high).
    pub codes: [u8; 128],
}

impl GgmlType for Q4_K {
    const NAME: &'static str = "Q4_K";
    const NUMBER: u32 = 12;
    type Block = BlockQ4_K;
    type Values = [f32; 256];

    #[inline(always)]
    fn decode_block(block: &BlockQ4_K, values: &mut [f32; 256]) {
        let (scales, minima) = sub_scales(block.scale.get(), block.min.get(), &block.scales);
        for (j, values) in values.as_chunks_mut::<64>().0.iter_mut().enumerate() {
            let codes = &block.codes.as_chunks::<32>().0[j];
            let (low, high) = values.split_at_mut(32);
            for i in 0..32 {
                low[i] = scales[2 * j] * f32::from(codes[i] & 15) - minima[2 * j];
                high[i] = scales[2 * j + 1] * f32::from(codes[i] >> 4) - minima[2 * j + 1];
            }
        }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ4_K {
        let search = MinSearch { max_code: 15, first: -1.0, grids: 21, loss: |error| error * error };
        let WithMinima { scale, min, scales, minima, codes } =
            WithMinima::<8>::encode(values, 63, &search, magnitude_plus_rms);
        let scales = pack_scales_and_minima(&scales, &minima);
        BlockQ4_K { scale, min, scales, codes: pack_halves(&codes) }
    }
}
