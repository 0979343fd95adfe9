//! The one list of formats.

use crate::FloatType;

/// Makes [`Format`] and [`with_codec!`] of the list. A name stands for a variant of `Format` and for the
/// [`Codec`](crate::Codec) in its file. (`$` is handed in because a macro that makes a macro cannot write it.)
macro_rules! formats {
    (
        $d:tt
        affine { $($bits:literal,)* }
        mlx { $($(#[$mlx_doc:meta])* $mlx:ident,)* }
        ggml { $($(#[$ggml_doc:meta])* $ggml:ident,)* }
    ) => {
        /// How a weight tensor is stored.
        ///
        /// Not `#[non_exhaustive]`, on purpose: [`with_codec!`](crate::with_codec) and the layouts of other crates match
        /// every format, and one that they forget must not compile. A new format is a new minor version before 1.0.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Format {
            /// Plain floats.
            Float(FloatType),
            /// MLX affine: `value = code * scale + bias`. Made by [`Format::affine`], which checks the numbers.
            #[allow(missing_docs)]
            #[non_exhaustive]
            Affine { bits: u8, group_size: u8, scales: FloatType },
            $($(#[$mlx_doc])* $mlx,)*
            $($(#[$ggml_doc])* $ggml,)*
        }

        impl Format {
            /// The bits that [`Format::Affine`] comes in.
            pub(crate) const AFFINE_BITS: &[u8] = &[$($bits),*];
            /// MLX's modes besides affine.
            pub(crate) const MLX_MODES: &[Format] = &[$(Format::$mlx),*];
            /// GGML's block types.
            pub(crate) const GGML_BLOCKS: &[Format] = &[$(Format::$ggml),*];
        }

        /// Runs `$body` with `$codec` bound to the [`Codec`](crate::Codec) of a [`Format`](crate::Format).
        #[macro_export]
        macro_rules! with_codec {
            ($d format:expr, $d codec:ident => $d body:expr) => {
                match $d format {
                    $d crate::Format::Float(float) => {
                        let $d codec = $d crate::Float(float);
                        $d body
                    }
                    $($d crate::Format::Affine { bits: $bits, group_size, scales, .. } => {
                        let $d codec = $d crate::Affine::<$bits>::new(group_size, scales);
                        $d body
                    })*
                    $d crate::Format::Affine { .. } => unreachable!("Format::affine checks the bits"),
                    $($d crate::Format::$mlx => {
                        let $d codec = $d crate::Microscaled($d crate::$mlx);
                        $d body
                    })*
                    $($d crate::Format::$ggml => {
                        let $d codec = $d crate::$ggml;
                        $d body
                    })*
                }
            };
        }
    };
}

formats! { $
    affine { 2, 3, 4, 5, 6, 8, }
    mlx {
        /// MLX `mxfp4`: groups of 32 e2m1 codes, a power-of-two scale.
        Mxfp4,
        /// MLX `mxfp8`: groups of 32 e4m3 codes, a power-of-two scale.
        Mxfp8,
        /// MLX `nvfp4`: groups of 16 e2m1 codes, an e4m3 scale.
        Nvfp4,
    }
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
    }
}
