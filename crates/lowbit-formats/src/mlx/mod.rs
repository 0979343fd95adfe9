//! MLX's formats: `weight`, `scales` and, for affine, `biases`.

mod affine;
mod microscaled;
mod mxfp4;
mod mxfp8;
mod nvfp4;

pub use affine::{Affine, AffineRow};
pub use microscaled::{Microscaled, MicroscaledMode, MicroscaledRow};
pub use mxfp4::Mxfp4;
pub use mxfp8::Mxfp8;
pub use nvfp4::Nvfp4;

/// The list of MLX's formats: calls the macro `$next` with the tokens `$given`, followed by the
/// list.
macro_rules! mlx_list {
    ($next:ident $($given:tt)*) => {
        $next! {
            $($given)*
            affine { 2, 3, 4, 5, 6, 8, }
            mlx {
                /// MLX `mxfp4`: groups of 32 e2m1 codes, a power-of-two scale.
                Mxfp4,
                /// MLX `mxfp8`: groups of 32 e4m3 codes, a power-of-two scale.
                Mxfp8,
                /// MLX `nvfp4`: groups of 16 e2m1 codes, an e4m3 scale.
                Nvfp4,
            }
        }
    };
}
pub(crate) use mlx_list;
