//! What a format's codes and scales mean, however a file packs them. Code that repacks weights (the upload to a GPU)
//! needs this and [`Unpacked`], and no match on formats.

use crate::{CODEBOOK, E2M1, E4M3, E8M0, FloatType, MAX_RUN, Minifloat};
use half::f16;

/// A format's quantisation scheme: `value = code * scale + bias`, where a code's value and a group's scale and bias
/// are stored as these fields say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// Bits per code.
    pub bits: usize,
    /// What codes mean.
    pub codes: Codes,
    /// What multiplies them.
    pub scales: Scales,
}

impl Scheme {
    /// Values that share a scale; none where nothing multiplies the codes.
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

    /// Whether something is added to a group's scaled codes.
    pub fn biased(&self) -> bool {
        matches!(self.scales, Scales::Group { biased: true, .. } | Scales::SuperWithMinima { .. })
    }

    /// What each code stands for before it is scaled, by code; 0 for bytes that are no code. `None` for plain floats, whose
    /// codes are the values.
    pub fn code_values(&self) -> Option<[f32; 256]> {
        let mut values = [0.0; 256];
        for (code, value) in (0..=u8::MAX).zip(&mut values).take(1 << self.bits.min(8)) {
            *value = match self.codes {
                Codes::Integer { zero } => f32::from(code) - zero as f32,
                Codes::E2M1 => E2M1::decode(code),
                Codes::E4M3 => E4M3::decode(code),
                Codes::Codebook => CODEBOOK[usize::from(code)].into(),
                Codes::Float(_) => return None,
            };
        }
        Some(values)
    }

    /// What multiplies the codes of each of a block's groups, and what is added, as decoding computes them in f32. Groups that the
    /// block does not have are zero, and so are biases of a scheme without.
    pub fn products(&self, block: &BlockScales) -> Products {
        let (scale, min) = (f16::from_bits(block.scale).to_f32(), f16::from_bits(block.min).to_f32());
        let mut products = Products::default();
        let Products { scales, biases } = &mut products;
        match self.scales {
            Scales::One | Scales::E4M3 => {}
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

    /// Appends a row's codes, one byte each, to a stream as [`Self::unpack_stream`] takes it apart.
    ///
    /// # Panics
    /// When the codes are no multiple of eight, or have more than 8 bits.
    pub fn pack_stream(&self, codes: &[u8], stream: &mut Vec<u8>) {
        let (eights, rest) = codes.as_chunks::<8>();
        assert!(rest.is_empty() && self.bits <= 8, "eight codes fill a number of bytes");
        for codes in eights {
            let packed = codes.iter().rfold(0u64, |packed, &code| packed << self.bits | u64::from(code));
            stream.extend(&packed.to_le_bytes()[..self.bits]);
        }
    }

    /// Takes a row's stream of codes apart, one byte per code, least significant bits first: the first component of formats
    /// without [`Codec::UNPACK`](crate::Codec::UNPACK).
    ///
    /// # Panics
    /// When `codes` has room for fewer than the stream has, or codes have more than 8 bits.
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

/// What codes mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// `code - zero`.
    Integer {
        /// The code of value 0.
        zero: u32,
    },
    /// e2m1, see [`crate::E2M1`].
    E2M1,
    /// [`crate::CODEBOOK`].
    Codebook,
    /// e4m3, see [`crate::E4M3`].
    E4M3,
    /// The bits of a float.
    Float(FloatType),
}

/// What multiplies codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// Nothing.
    One,
    /// A float per group and, if biased, another one that is added.
    Group {
        /// The type of both.
        float: FloatType,
        /// Values per group.
        size: usize,
        /// Whether there is a bias.
        biased: bool,
    },
    /// `2^(code - 127)` per 32 values.
    E8M0 {
        /// Whether code 255 means infinity; otherwise it is `2^128`.
        infinite: bool,
    },
    /// e4m3 per 16 values.
    E4M3,
    /// A signed integer per sub-block, times an f16 per superblock of 256 values.
    Super {
        /// Values per sub-block.
        size: usize,
    },
    /// `scale * sub_scale` per sub-block, and `min * sub_minimum` that is subtracted; the f16s `scale` and `min` per
    /// superblock of 256 values.
    SuperWithMinima {
        /// Values per sub-block.
        size: usize,
    },
}

/// A GGML block taken apart into what its [`Scheme`] names. Fields that the scheme does not have are zero.
#[derive(Clone, Copy, Debug)]
pub struct Unpacked {
    /// One code per value, in the order of the values; a block of 32 leaves the rest as it was.
    pub codes: [u8; MAX_RUN],
    /// What multiplies them.
    pub scales: BlockScales,
}

impl Default for Unpacked {
    fn default() -> Self {
        Self { codes: [0; MAX_RUN], scales: BlockScales::default() }
    }
}

/// What multiplies the codes of a block's groups, and what is added to them, with all factors in one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Products {
    pub scales: [f32; 16],
    pub biases: [f32; 16],
}

/// A GGML block's scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockScales {
    /// The block's scale, the bits of an f16; with [`Scales::E8M0`] the code.
    pub scale: u16,
    /// The bits of the f16 that is a biased group's bias, or that multiplies `sub_minima`.
    pub min: u16,
    /// One integer per sub-block; a superblock of 8 sub-blocks has the first 8.
    pub sub_scales: [i8; 16],
    /// One integer per sub-block.
    pub sub_minima: [i8; 16],
}

impl BlockScales {
    /// Of a block without sub-blocks: its scale, and what is added or 0, rounded to f16.
    pub fn of(scale: f32, min: f32) -> Self {
        let [scale, min] = [scale, min].map(|x| f16::from_f32(x).to_bits());
        Self { scale, min, ..Self::default() }
    }
}
