use super::superblock::WithMinima;
use super::{F16, GgmlType, fit::MinSearch, packing::pack_pairs};
use bytemuck::{Pod, Zeroable};

/// GGML `Q2_K`: `value = scale * scales[s] * code - min * minima[s]`, 16 sub-blocks s of 16 values.
///
/// Source: `quantize_row_q2_K_ref` and `dequantize_row_q2_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q2_K;

/// 84 bytes, 256 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2_K {
    /// Byte s holds sub-block s's scale (low nibble) and minimum (high).
    pub scales: [u8; 16],
    /// Bits 2j of byte 32 h + i hold code 128 h + 32 j + i.
    pub codes: [u8; 64],
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Multiplies the sub-blocks' minima.
    pub min: F16,
}

impl GgmlType for Q2_K {
    const NAME: &'static str = "Q2_K";
    const NUMBER: u32 = 10;
    type Block = BlockQ2_K;
    type Values = [f32; 256];

    #[inline(always)]
    fn decode_block(block: &BlockQ2_K, values: &mut [f32; 256]) {
        let (scale, min) = (block.scale.get(), block.min.get());
        let scales = block.scales.map(|packed| scale * f32::from(packed & 15));
        let minima = block.scales.map(|packed| min * f32::from(packed >> 4));
        for (half, values) in values.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let codes = &block.codes.as_chunks::<32>().0[half];
            for side in 0..2 {
                for i in side * 16..side * 16 + 16 {
                    for j in 0..4 {
                        let s = half * 8 + j * 2 + side;
                        values[j * 32 + i] = scales[s] * f32::from(codes[i] >> (2 * j) & 3) - minima[s];
                    }
                }
            }
        }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ2_K {
        let search = MinSearch { max_code: 3, first: -0.5, grids: 16, loss: f32::abs };
        let WithMinima { scale, min, scales, minima, codes } =
            WithMinima::<16>::encode(values, 15, &search, |values: &[f32; 16]| values.map(f32::abs));
        let scales = std::array::from_fn(|s| scales[s] | minima[s] << 4);
        BlockQ2_K { scales, codes: pack_pairs(&codes), scale, min }
    }
}
