//! The meaning of a format's codes and scales, independent of how a file packs them. Code that
//! repacks weights (the upload to a GPU) needs this and [`Unpacked`], and no match on formats.

use crate::{Codebook, E2M1, E4M3, E8M0, FloatType, Minifloat};
use half::f16;

/// The longest [`Codec::RUN`](crate::Codec::RUN): a buffer of this many values holds a run of any
/// format.
pub const MAX_RUN: usize = 256;

/// Values per superblock.
const SUPERBLOCK: usize = 256;

/// A format's quantisation scheme: `value = code * scale + bias`, where a code's value and a
/// group's scale and bias are stored as these fields say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// Bits per code.
    pub bits: usize,
    /// The meaning of codes.
    pub codes: Codes,
    /// Their scales.
    pub scales: Scales,
}

impl Scheme {
    /// Values that share a scale; `None` for formats without scales.
    pub fn group_size(&self) -> Option<usize> {
        match self.scales {
            Scales::One => None,
            Scales::E8M0 { .. } => Some(32),
            Scales::E4M3 => Some(16),
            Scales::Group { size, .. } | Scales::Super { size } | Scales::SuperWithMinima { size } => {
                Some(size)
            }
        }
    }

    /// True if groups have a bias.
    pub fn biased(&self) -> bool {
        matches!(self.scales, Scales::Group { biased: true, .. } | Scales::SuperWithMinima { .. })
    }

    /// Bytes of the codes, the scales and the biases of `values` values of a row when blocks are
    /// taken apart, as GPUs and panels have them: a biased sub-block of 16 has its scale and
    /// minimum in one byte. `values` is a whole number of groups and of superblocks.
    pub fn bytes(&self, values: usize) -> [usize; 3] {
        let groups = self.group_size().map_or(0, |size| values / size);
        let superblocks = values / SUPERBLOCK;
        let [scales, biases] = match self.scales {
            Scales::One => [0, 0],
            Scales::E8M0 { .. } | Scales::E4M3 => [groups, 0],
            Scales::Group { float, biased: false, .. } => [groups * float.size(), 0],
            Scales::Group { float, biased: true, .. } => [groups * float.size(); 2],
            Scales::Super { .. } => [groups, superblocks * 2],
            Scales::SuperWithMinima { size: 16 } => [groups, superblocks * 4],
            Scales::SuperWithMinima { .. } => [groups * 2, superblocks * 4],
        };
        [values / 8 * self.bits, scales, biases]
    }

    /// The value of each code before it is scaled; 0 for bytes that are not codes. `None` for plain
    /// floats, whose codes are the values.
    pub fn code_values(&self) -> Option<[f32; 256]> {
        let mut values = [0.0; 256];
        for (code, value) in (0..=u8::MAX).zip(&mut values).take(1 << self.bits.min(8)) {
            *value = match self.codes {
                Codes::Integer { zero } => f32::from(code) - zero as f32,
                Codes::E2M1 => E2M1::decode(code),
                Codes::E4M3 => E4M3::decode(code),
                Codes::Codebook(codebook) => codebook.values()[usize::from(code)],
                Codes::Float(_) => return None,
            };
        }
        Some(values)
    }

    /// The scale and bias of each of a block's groups, as decoding computes them in f32. Unused
    /// groups are zero, and so are biases in a scheme without them.
    pub fn products(&self, block: &BlockScales) -> Products {
        let (scale, min) = (f16::from_bits(block.scale).to_f32(), f16::from_bits(block.min).to_f32());
        let mut products = Products::default();
        let Products { scales, biases } = &mut products;
        match self.scales {
            Scales::One => {}
            Scales::E4M3 => *scales = block.sub_scales.map(|code| E4M3::decode(code as u8)),
            Scales::E8M0 { .. } => scales[0] = E8M0::decode(block.scale as u8),
            Scales::Group { biased, .. } => (scales[0], biases[0]) = (scale, if biased { min } else { 0.0 }),
            Scales::Super { size } | Scales::SuperWithMinima { size } => {
                for s in 0..256 / size {
                    scales[s] = scale * f32::from(block.sub_scales[s]);
                    // Not -0: what is subtracted is no more than 0 there.
                    biases[s] = 0.0 - min * f32::from(block.sub_minima[s]);
                }
            }
        }
        products
    }

    /// Appends a row's codes, one byte each, to a stream: the inverse of [`Self::unpack_stream`].
    ///
    /// # Panics
    /// When the number of codes is not a multiple of eight, or codes have more than 8 bits.
    pub fn pack_stream(&self, codes: &[u8], stream: &mut Vec<u8>) {
        let (eights, rest) = codes.as_chunks::<8>();
        assert!(rest.is_empty() && self.bits <= 8, "eight codes fill a number of bytes");
        for codes in eights {
            let packed = codes.iter().rfold(0u64, |packed, &code| packed << self.bits | u64::from(code));
            stream.extend(&packed.to_le_bytes()[..self.bits]);
        }
    }

    /// Unpacks a row's stream of codes, least significant bits first, to one byte per code. Formats
    /// without [`Codec::UNPACK`](crate::Codec::UNPACK) have such a stream as their first component.
    ///
    /// # Panics
    /// When `codes` is shorter than the stream's number of codes, or codes have more than 8 bits.
    #[inline(always)]
    pub fn unpack_stream(&self, stream: &[u8], codes: &mut [u8]) {
        match self.bits {
            1 => unpack_words::<1>(stream, codes),
            2 => unpack_bytes::<2, 4>(stream, codes),
            3 => unpack_words::<3>(stream, codes),
            4 => unpack_bytes::<4, 2>(stream, codes),
            5 => unpack_words::<5>(stream, codes),
            6 => unpack_words::<6>(stream, codes),
            7 => unpack_words::<7>(stream, codes),
            8 => codes[..stream.len()].copy_from_slice(stream),
            bits => panic!("codes of {bits} bits"),
        }
    }
}

/// Each byte is `PER_BYTE` codes.
#[inline(always)]
fn unpack_bytes<const BITS: usize, const PER_BYTE: usize>(stream: &[u8], codes: &mut [u8]) {
    let codes = &mut codes.as_chunks_mut::<PER_BYTE>().0[..stream.len()];
    for (codes, packed) in codes.iter_mut().zip(stream) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = packed >> (i * BITS) & (0xff >> (8 - BITS));
        }
    }
}

/// Eight codes fill `BITS` bytes.
#[inline(always)]
fn unpack_words<const BITS: usize>(stream: &[u8], codes: &mut [u8]) {
    let stream = stream.as_chunks::<BITS>().0;
    let codes = &mut codes.as_chunks_mut::<8>().0[..stream.len()];
    for (codes, packed) in codes.iter_mut().zip(stream) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(packed);
        let word = u64::from_le_bytes(word);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (word >> (i * BITS)) as u8 & (0xff >> (8 - BITS));
        }
    }
}

/// The meaning of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// `code - zero`.
    Integer {
        /// The code of value 0.
        zero: u32,
    },
    /// e2m1, see [`crate::E2M1`].
    E2M1,
    /// Entries of a codebook.
    Codebook(Codebook),
    /// e4m3, see [`crate::E4M3`].
    E4M3,
    /// The bits of a float.
    Float(FloatType),
}

/// The scales of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// None.
    One,
    /// A float per group and, if biased, a second one, which is added.
    Group {
        /// The type of both.
        float: FloatType,
        /// Values per group.
        size: usize,
        /// True if there is a bias.
        biased: bool,
    },
    /// `2^(code - 127)` per 32 values.
    E8M0 {
        /// True if code 255 means infinity; otherwise it is `2^128`.
        infinite: bool,
    },
    /// e4m3 per 16 values.
    E4M3,
    /// A signed integer per sub-block, times an f16 per superblock of 256 values.
    Super {
        /// Values per sub-block.
        size: usize,
    },
    /// Per sub-block `scale * sub_scale` multiplies and `min * sub_minimum` is subtracted; the f16s
    /// `scale` and `min` are per superblock of 256 values.
    SuperWithMinima {
        /// Values per sub-block.
        size: usize,
    },
}

/// A GGML block, unpacked into the parts that its [`Scheme`] names. Fields that the scheme does not
/// have are zero.
#[derive(Clone, Copy, Debug)]
pub struct Unpacked {
    /// One code per value, in the order of the values; a block of 32 leaves the rest unchanged.
    pub codes: [u8; MAX_RUN],
    /// Their scales.
    pub scales: BlockScales,
}

impl Default for Unpacked {
    fn default() -> Self {
        Self { codes: [0; MAX_RUN], scales: BlockScales::default() }
    }
}

/// The scales and biases of a block's groups, with all factors multiplied out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Products {
    pub scales: [f32; 16],
    pub biases: [f32; 16],
}

/// A GGML block's scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockScales {
    /// The block's scale: the bits of an f16, or with [`Scales::E8M0`] the e8m0 code.
    pub scale: u16,
    /// The bits of an f16: a biased group's bias, or the factor of `sub_minima`.
    pub min: u16,
    /// One integer per sub-block, with [`Scales::E4M3`] its e4m3 code; a superblock of 8 sub-blocks
    /// has the first 8.
    pub sub_scales: [i8; 16],
    /// One integer per sub-block.
    pub sub_minima: [i8; 16],
}

impl BlockScales {
    /// For a block without sub-blocks: its scale and its bias (or 0), rounded to f16.
    pub fn of(scale: f32, min: f32) -> Self {
        let [scale, min] = [scale, min].map(|x| f16::from_f32(x).to_bits());
        Self { scale, min, ..Self::default() }
    }
}
