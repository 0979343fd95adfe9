use super::fit::descend_symmetric;
use super::superblock::{Symmetric, SymmetricSearch};
use super::{F16, GgmlType, packing::pack_pairs};
use bytemuck::{Pod, Zeroable};

/// GGML `Q3_K`: `value = scale * (scales[s] - 32) * (code - 4)`, 16 sub-blocks s of 16 values.
///
/// Source: `quantize_row_q3_K_ref` and `dequantize_row_q3_K`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct Q3_K;

/// 110 bytes, 256 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3_K {
    /// Bit j of byte i is the third bit of code 32 j + i.
    pub high: [u8; 32],
    /// Bits 2j of byte 32 h + i hold the low two bits of code 128 h + 32 j + i.
    pub low: [u8; 64],
    /// The 6-bit scales: byte i < 8 holds the low four bits of scales i (low nibble) and i + 8 (high); bits 2j of
    /// byte 8 + i hold the high two bits of scale 4 j + i.
    pub scales: [u8; 12],
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
}

impl GgmlType for Q3_K {
    const NAME: &'static str = "Q3_K";
    const NUMBER: u32 = 11;
    type Block = BlockQ3_K;
    type Values = [f32; 256];

    #[inline(always)]
    fn decode_block(block: &BlockQ3_K, values: &mut [f32; 256]) {
        let scale = block.scale.get();
        let scales = unpack_scales(&block.scales).map(|code| scale * f32::from(code));
        for (half, values) in values.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let low = &block.low.as_chunks::<32>().0[half];
            for side in 0..2 {
                for i in side * 16..side * 16 + 16 {
                    for j in 0..4 {
                        let code = low[i] >> (2 * j) & 3 | (block.high[i] >> (4 * half + j) & 1) << 2;
                        values[j * 32 + i] = scales[half * 8 + j * 2 + side] * (i32::from(code) - 4) as f32;
                    }
                }
            }
        }
    }

    fn encode_block(values: &[f32; 256]) -> BlockQ3_K {
        let search =
            SymmetricSearch { half: 4, max_scale: 32, zero: f32::MIN_POSITIVE, fit: descend_symmetric };
        let Some(Symmetric { scale, scales, codes }) = search.encode(values) else {
            return BlockQ3_K::zeroed();
        };
        let mut block = BlockQ3_K {
            high: [0; 32],
            low: pack_pairs(&codes.map(|code| code & 3)),
            scales: pack_scales(&scales),
            scale,
        };
        for (i, code) in codes.iter().enumerate() {
            block.high[i % 32] |= (code >> 2) << (i / 32);
        }
        block
    }
}

/// The scales, less 32.
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
