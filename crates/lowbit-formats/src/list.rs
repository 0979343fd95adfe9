//! All formats: [`Format`] and [`with_codec!`], made of the lists in `mlx/mod.rs` and
//! `ggml/mod.rs`.

use crate::FloatType;
use crate::ggml::ggml_list;
use crate::mlx::mlx_list;

/// Makes [`Format`] and [`with_codec!`]. A name stands for a variant of `Format` and for the
/// [`Codec`](crate::Codec) in its file. (`$` is handed in because a macro that makes a macro cannot
/// write it.)
macro_rules! formats {
    (
        $d:tt
        affine { $($bits:literal,)* }
        mlx { $($(#[$mlx_doc:meta])* $mlx:ident,)* }
        ggml { $($(#[$ggml_doc:meta])* $ggml:ident,)* }
    ) => {
        /// The storage format of a weight tensor.
        ///
        /// Not `#[non_exhaustive]`, on purpose: [`with_codec!`](crate::with_codec) and the layouts
        /// of other crates match every format, and a match that forgets one must not compile.
        /// Before 1.0 a new format is a new minor version.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Format {
            /// Plain floats.
            Float(FloatType),
            /// MLX affine: `value = code * scale + bias`. Made by [`Format::affine`], which checks
            /// the numbers.
            #[allow(missing_docs)]
            #[non_exhaustive]
            Affine { bits: u8, group_size: u8, scales: FloatType },
            /// e4m3 codes and f32 scales. Made by [`Format::fp8`], which checks the number.
            #[allow(missing_docs)]
            #[non_exhaustive]
            Fp8 { group_size: u8 },
            /// e2m1 codes and an f32 scale per 16 values: NVFP4 with the matrix's scale in its own.
            Fp4,
            $($(#[$mlx_doc])* $mlx,)*
            $($(#[$ggml_doc])* $ggml,)*
        }

        impl Format {
            /// The numbers of bits of [`Format::Affine`].
            pub(crate) const AFFINE_BITS: &[u8] = &[$($bits),*];
            /// MLX's modes besides affine.
            pub(crate) const MLX_MODES: &[Format] = &[$(Format::$mlx),*];
            /// GGML's block types.
            pub(crate) const GGML_BLOCKS: &[Format] = &[$(Format::$ggml),*];
        }

        /// Runs `$body` with `$codec` bound to the [`Codec`](crate::Codec) of a
        /// [`Format`](crate::Format).
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
                    $d crate::Format::Fp8 { group_size, .. } => {
                        let $d codec = $d crate::Fp8::new(group_size);
                        $d body
                    }
                    $d crate::Format::Fp4 => {
                        let $d codec = $d crate::Fp4::new(16);
                        $d body
                    }
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

// Expands to `formats! { $ affine { .. } mlx { .. } ggml { .. } }` with both folders' lists.
mlx_list! { ggml_list formats $ }
