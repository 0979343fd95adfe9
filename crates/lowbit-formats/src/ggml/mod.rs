//! GGML's formats: one tensor of blocks, each a few bytes of scales and the packed codes of 32 or
//! 256 values. Numbers are little-endian.
//!
//! Each block type shows its bytes as a diagram: the fields and the offsets at which they start,
//! and below them the bits of the packed fields. Columns are ranges of bits, as in `3:0`;
//! `code j [3:0]` is bits 3 to 0 of code j.

mod block;
mod codebook;
mod fit;
mod grid_1;
mod grid_2_3;
mod iq;
mod iq1;
mod iq2;
mod iq3;
mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod nvfp4;
mod packing;
mod q1_0;
mod q2_0;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod superblock;
mod ternary;

pub use block::{F16, GgmlType};
pub use codebook::Codebook;
pub use iq1::{BlockIQ1_M, BlockIQ1_S, IQ1_M, IQ1_S};
pub use iq2::{BlockIQ2_S, BlockIQ2_XS, BlockIQ2_XXS, IQ2_S, IQ2_XS, IQ2_XXS};
pub use iq3::{BlockIQ3_S, BlockIQ3_XXS, IQ3_S, IQ3_XXS};
pub use iq4_nl::{BlockIQ4_NL, IQ4_NL};
pub use iq4_xs::{BlockIQ4_XS, IQ4_XS};
pub use mxfp4::{BlockMXFP4, MXFP4};
pub use nvfp4::{BlockNVFP4, NVFP4};
pub use q1_0::{BlockQ1_0, Q1_0};
pub use q2_0::{BlockQ2_0, Q2_0};
pub use q2_k::{BlockQ2_K, Q2_K};
pub use q3_k::{BlockQ3_K, Q3_K};
pub use q4_0::{BlockQ4_0, Q4_0};
pub use q4_1::{BlockQ4_1, Q4_1};
pub use q4_k::{BlockQ4_K, Q4_K};
pub use q5_0::{BlockQ5_0, Q5_0};
pub use q5_1::{BlockQ5_1, Q5_1};
pub use q5_k::{BlockQ5_K, Q5_K};
pub use q6_k::{BlockQ6_K, Q6_K};
pub use q8_0::{BlockQ8_0, Q8_0};
pub use ternary::{BlockTQ1_0, BlockTQ2_0, TQ1_0, TQ2_0};

/// The list of GGML's types: calls the macro `$next` with the tokens `$given`, followed by the
/// list.
macro_rules! ggml_list {
    ($next:ident $($given:tt)*) => {
        $next! {
            $($given)*
            ggml {
                /// GGML blocks of 32, 4 bits, symmetric.
                Q4_0,
                /// GGML blocks of 32, 4 bits and a minimum.
                Q4_1,
                /// GGML blocks of 32, 5 bits, symmetric.
                Q5_0,
                /// GGML blocks of 32, 5 bits and a minimum.
                Q5_1,
                /// GGML blocks of 32, 8 bits.
                Q8_0,
                /// GGML superblocks of 16 x 16, 2 bits, 4-bit scales and minima.
                Q2_K,
                /// GGML superblocks of 16 x 16, 3 bits, 6-bit scales.
                Q3_K,
                /// GGML superblocks of 8 x 32, 4 bits, 6-bit scales and minima.
                Q4_K,
                /// GGML superblocks of 8 x 32, 5 bits, 6-bit scales and minima.
                Q5_K,
                /// GGML superblocks of 16 x 16, 6 bits, 8-bit scales.
                Q6_K,
                /// GGML blocks of 32, a 16-entry codebook.
                IQ4_NL,
                /// GGML superblocks of 8 x 32, a 16-entry codebook, 6-bit scales.
                IQ4_XS,
                /// GGML blocks of 32 e2m1 codes, a power-of-two scale.
                MXFP4,
                /// GGML blocks of 4 x 16 e2m1 codes, e4m3 scales.
                NVFP4,
                /// GGML superblocks of 8 x 32, points of eight values -1, 0 or 1, 3-bit scales.
                IQ1_S,
                /// GGML superblocks of 16 x 16, points of eight values -1, 0 or 1, 3-bit scales.
                IQ1_M,
                /// GGML superblocks of 8 x 32, points of eight values, 4-bit scales.
                IQ2_XXS,
                /// GGML superblocks of 16 x 16, points of eight values, 4-bit scales.
                IQ2_XS,
                /// GGML superblocks of 16 x 16, points of eight values, their signs, 4-bit scales.
                IQ2_S,
                /// GGML superblocks of 8 x 32, points of four values, 4-bit scales.
                IQ3_XXS,
                /// GGML superblocks of 8 x 32, points of four values, their signs, 4-bit scales.
                IQ3_S,
                /// GGML blocks of 256 values -1, 0 or 1, five to a byte.
                TQ1_0,
                /// GGML blocks of 256, 2 bits.
                TQ2_0,
                /// GGML blocks of 128 signs.
                Q1_0,
                /// GGML blocks of 64, 2 bits.
                Q2_0,
            }
        }
    };
}
pub(crate) use ggml_list;
