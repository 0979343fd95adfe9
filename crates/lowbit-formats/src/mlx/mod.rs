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
