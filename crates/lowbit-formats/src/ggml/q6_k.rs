use super::fit::{ZERO, search_symmetric};
use super::superblock::{Symmetric, SymmetricSearch};
use super::{F16, GgmlType, packing::pack_pairs};
use bytemuck::{Pod, Zeroable};

/// GGML `Q6_K`: `value = scale * scales[s] * (code - 32)`, 16 sub-blocks s of 16 values.
///
/// Source: `quantize_row_q6_K_ref` and `dequantize_row_q6_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q6_K;

/// 210 bytes, 256 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6_K {
    /// Byte 64 h + i holds the low four bits of code 128 h + i (low nibble) and of code 128 h + 64 + i (high).
    pub low: [u8; 128],
    /// Bits 2j of byte 32 h + i hold the high two bits of code 128 h + 32 j + i.
    pub high: [u8; 64],
    /// The sub-blocks' scales.
    pub scales: [i8; 16],
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
}

impl GgmlType for Q6_K {
    const NAME: &'static str = "Q6_K";
    const NUMBER: u32 = 14;
    type Block = BlockQ6_K;
    type Values = [f32; 256];

    #[inline(always)]
    fn decode_block(block: &BlockQ6_K, values: &mut [f32; 256]) {
        let scale = block.scale.get();
        let scales = block.scales.map(|code| scale * f32::from(code));
        for (half, values) in values.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let low = &block.low.as_chunks::<64>().0[half];
            let high = &block.high.as_chunks::<32>().0[half];
            for side in 0..2 {
                for i in side * 16..side * 16 + 16 {
                    for j in 0..4 {
                        let code = low[j % 2 * 32 + i] >> (j / 2 * 4) & 15 | (high[i] >> (2 * j) & 3) << 4;
                        values[j * 32 + i] = scales[half * 8 + j * 2 + side] * (i32::from(code) - 32) as f32;
                    }
                }
            }
        }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ6_K {
        let search = SymmetricSearch { half: 32, max_scale: 128, zero: ZERO, fit: search_symmetric };
        let Some(Symmetric { scale, scales, codes }) = search.encode(values) else {
            return BlockQ6_K::zeroed();
        };
        let mut low = [0; 128];
        for (half, codes) in low.as_chunks_mut::<64>().0.iter_mut().zip(codes.as_chunks::<128>().0) {
            *half = std::array::from_fn(|i| codes[i] & 15 | codes[i + 64] << 4);
        }
        BlockQ6_K { low, high: pack_pairs(&codes.map(|code| code >> 4)), scales, scale }
    }
}
