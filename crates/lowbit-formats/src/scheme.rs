//! What a format's codes and scales mean, however a file packs them. Code that repacks weights (the upload to a GPU)
//! needs this and [`Unpacked`], and no match on formats.

use crate::{FloatType, MAX_RUN};

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
