use super::codebook::{self, nearest};
use super::fit::reciprocal;
use super::packing::{pack_nibbles, unpack_nibbles};
use super::{Codebook, F16, GgmlType};
use crate::{BlockScales, Codes, FloatType, Scales, Scheme};
use bytemuck::{Pod, Zeroable};

/// GGML `IQ4_NL`: `value = scale * CODEBOOK[code]`, 32 values per block.
///
/// Source: `quantize_iq4_nl` without an importance matrix and `dequantize_row_iq4_nl`, ggml
/// `src/ggml-quants.c`.
#[derive(Clone, Copy, Debug)]
pub struct IQ4_NL;

/// 18 bytes, 32 values.
///
/// ```text
/// byte 0       2           18
///      +-------+-----------+
///      | scale | codes[16] |
///      +-------+-----------+
///       f16
///
/// bit        7:4         3:0
/// codes[j]   code j+16   code j
/// ```
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ4_NL {
    /// Multiplies every code's value.
    pub scale: F16,
    /// Packed codes.
    pub codes: [u8; 16],
}

impl GgmlType for IQ4_NL {
    const NAME: &'static str = "IQ4_NL";
    const NUMBER: u32 = 20;
    const SCHEME: Scheme = Scheme {
        bits: 4,
        codes: Codes::Codebook(Codebook::Iq4),
        scales: Scales::Group { float: FloatType::F16, size: 32, biased: false },
    };
    type Block = BlockIQ4_NL;
    type Values = [f32; 32];
    type Codes = [u8; 32];

    #[inline(always)]
    fn for_each_code(block: &BlockIQ4_NL, mut each: impl FnMut(usize, usize, u32)) {
        unpack_nibbles(&block.codes, |i, code| each(0, i, code.into()));
    }

    #[inline(always)]
    fn scales(block: &BlockIQ4_NL) -> BlockScales {
        BlockScales { scale: block.scale.bits(), ..BlockScales::default() }
    }

    fn pack(codes: &[u8; 32], scales: &BlockScales) -> BlockIQ4_NL {
        BlockIQ4_NL { scale: F16::from_bits(scales.scale), codes: pack_nibbles(codes) }
    }

    /// As `llama-quantize` does it, not `quantize_row_iq4_nl_ref`, which tries one grid alone and
    /// loses more.
    fn encode_block(values: &[f32; 32]) -> BlockIQ4_NL {
        let scale = codebook::fit(values);
        // Not with the scale as f16 rounds it.
        let inverse = reciprocal(scale);
        let codes = values.map(|value| nearest(inverse * value));
        Self::pack(&codes, &BlockScales::of(scale, 0.0))
    }
}
