use super::codebook::{self, CODEBOOK, nearest};
use super::fit::{largest, largest_above_zero, nearest_int, reciprocal};
use super::{F16, GgmlType, packing::pack_nibbles};
use crate::codec::vectorise_within_runs;
use bytemuck::{Pod, Zeroable};

/// GGML `IQ4_XS`: `value = scale * (scales[s] - 32) * CODEBOOK[code]`, 8 sub-blocks s of 32 values.
///
/// Source: `quantize_row_iq4_xs_ref` and `dequantize_row_iq4_xs`, ggml `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ4_XS;

/// 136 bytes, 256 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ4_XS {
    /// Multiplies the sub-blocks' scales.
    pub scale: F16,
    /// Bits 2s of the little-endian word are the high two bits of scale s.
    pub scales_high: [u8; 2],
    /// Byte i holds the low four bits of scales 2i (low nibble) and 2i + 1 (high).
    pub scales_low: [u8; 4],
    /// Byte 16 s + j holds code 32 s + j (low nibble) and code 32 s + j + 16 (high).
    pub codes: [u8; 128],
}

impl GgmlType for IQ4_XS {
    const NAME: &'static str = "IQ4_XS";
    const NUMBER: u32 = 23;
    type Block = BlockIQ4_XS;
    type Values = [f32; 256];

    #[inline(always)]
    fn decode_block(block: &BlockIQ4_XS, values: &mut [f32; 256]) {
        let scale = block.scale.get();
        let scales_high = u16::from_le_bytes(block.scales_high);
        let scales: [f32; 8] = std::array::from_fn(|s| {
            let low = block.scales_low[s / 2] >> (s % 2 * 4) & 15;
            let high = (scales_high >> (2 * s) & 3) as u8;
            scale * (i32::from(low | high << 4) - 32) as f32
        });
        for (s, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            vectorise_within_runs();
            *values = codebook::decode(scales[s], &block.codes.as_chunks().0[s]);
        }
    }

    fn encode_block(values: &[f32; 256]) -> BlockIQ4_XS {
        let values = values.as_chunks::<32>().0;
        let fits: [f32; 8] = std::array::from_fn(|s| fit_sub_block(&values[s]));
        let scale = -largest(&fits) / 32.0;
        let mut block = BlockIQ4_XS { scale: F16::new(scale), ..BlockIQ4_XS::zeroed() };
        let inverse = reciprocal(scale);
        let mut scales_high = 0;
        for (s, codes) in block.codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let sub_scale = nearest_int(inverse * fits[s]).clamp(-32, 31);
            // Not with the scale as f16 rounds it.
            let inverse = reciprocal(scale * sub_scale as f32);
            *codes = pack_nibbles(&values[s].map(|value| nearest(inverse * value)));
            let sub_scale = (sub_scale + 32) as u8;
            block.scales_low[s / 2] |= (sub_scale & 15) << (s % 2 * 4);
            scales_high |= u16::from(sub_scale >> 4) << (2 * s);
        }
        block.scales_high = scales_high.to_le_bytes();
        block
    }
}

/// Tries the grid on which the value of largest magnitude is the mirror image of the codebook's first, and 15 about
/// the one on which it is the first itself.
fn fit_sub_block(values: &[f32; 32]) -> f32 {
    let Some(largest) = largest_above_zero(values) else { return 0.0 };
    let first = CODEBOOK[0];
    let mirrored = 1.0 / (-largest / first);
    codebook::fit(
        values,
        std::iter::once(mirrored).chain((-7i8..=7).map(|step| (f32::from(step) + first) / largest)),
    )
}
