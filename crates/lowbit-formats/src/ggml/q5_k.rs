use super::packing::{pack_halves, pack_scales_and_minima, sub_scales};
use super::superblock::{WithMinima, magnitude_plus_rms};
use super::{F16, GgmlType, fit::MinSearch};
use bytemuck::{Pod, Zeroable};

/// GGML `Q5_K`: `value = scale * scales[s] * code - min * minima[s]`, 8 sub-blocks s of 32 values.
///
/// Source: `quantize_row_q5_K_ref` and `dequantize_row_q5_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q5_K;

/// 176 bytes, 256 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_K {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Multiplies the sub-blocks' minima.
    pub min: F16,
    /// The sub-blocks' 6-bit scales and minima, as in [`super::BlockQ4_K`].
    pub scales: [u8; 12],
    /// Bit j of byte i is the fifth bit of code 32 j + i.
    pub high: [u8; 32],
    /// Byte 32 h + i holds the low four bits of code 64 h + i (low nibble) and of code 64 h + 32 + i (high).
    pub low: [u8; 128],
}

impl GgmlType for Q5_K {
    const NAME: &'static str = "Q5_K";
    const NUMBER: u32 = 13;
    type Block = BlockQ5_K;
    type Values = [f32; 256];

    #[inline(always)]
    fn decode_block(block: &BlockQ5_K, values: &mut [f32; 256]) {
        let (scales, minima) = sub_scales(block.scale.get(), block.min.get(), &block.scales);
        for (j, values) in values.as_chunks_mut::<64>().0.iter_mut().enumerate() {
            let codes = &block.low.as_chunks::<32>().0[j];
            let (low, high) = values.split_at_mut(32);
            for i in 0..32 {
                let fifth = block.high[i] >> (2 * j);
                let codes = (codes[i] & 15 | (fifth & 1) << 4, codes[i] >> 4 | (fifth >> 1 & 1) << 4);
                low[i] = scales[2 * j] * f32::from(codes.0) - minima[2 * j];
                high[i] = scales[2 * j + 1] * f32::from(codes.1) - minima[2 * j + 1];
            }
        }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ5_K {
        let search = MinSearch { max_code: 31, first: -0.5, grids: 16, loss: |error| error * error };
        let WithMinima { scale, min, scales, minima, codes } =
            WithMinima::<8>::encode(values, 63, &search, magnitude_plus_rms);
        let scales = pack_scales_and_minima(&scales, &minima);
        let mut high = [0; 32];
        for (i, code) in codes.iter().enumerate() {
            high[i % 32] |= (code >> 4) << (i / 32);
        }
        BlockQ5_K { scale, min, scales, high, low: pack_halves(&codes.map(|code| code & 15)) }
    }
}
