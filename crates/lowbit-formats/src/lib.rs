//! Weight formats, and how each stores, decodes and encodes a row of values: one file per format,
//! under `mlx/` and `ggml/`. No I/O, no threads, no `unsafe`.
//!
//! A [`Format`] is a value known at load (`affine` at 4 bits, group 64, f16 scales; `Q4_K`). Its
//! [`Codec`] is the same thing as a type, so that code generic over `C: Codec` is compiled for each
//! format with its bit widths known; `with_codec!(format, codec => ...)` goes from the one to the
//! other.
//!
//! A format's [`Scheme`] says what its codes and scales mean, independent of how a file packs them.
//! A format that packs them in blocks also unpacks these ([`Unpacked`]). Code that repacks weights
//! for a GPU needs nothing but these two.
//!
//! To add a format: write its file, and list it in its folder's `mod.rs`. An affine width is a
//! number in that list.

// Formats are spelled as their peers spell them.
#![allow(non_camel_case_types)]

#[macro_use]
mod list;

mod codec;
mod component;
mod dtype;
mod error;
mod float;
mod format;
mod ggml;
mod minifloat;
mod mlx;
mod nearest;
mod scaled;
mod scheme;

pub use codec::{Codec, PackBlock, Parts};
pub use component::Component;
pub use dtype::{DType, FloatType};
pub use error::FormatError;
pub use float::Float;
pub use ggml::*;
pub use list::Format;
pub use minifloat::{E2M1, E4M3, E8M0, Minifloat};
pub use mlx::*;
pub use scaled::{Fp4, Fp8, Scaled, ScaledRow};
pub use scheme::{BlockScales, Codes, MAX_RUN, Products, Scales, Scheme, Unpacked};

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
