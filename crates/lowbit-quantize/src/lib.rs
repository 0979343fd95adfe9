//! Quantising checkpoints: round-to-nearest, in the layout that mlx-lm writes and reads.

mod error;
mod mlx;
mod output_path;
mod round;

pub use error::QuantizeError;
pub use round::{QuantizeOptions, Summary, quantize};

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
