//! The peers' vectors, and comparison with them.

use lowbit_formats::{FloatType, Format, Parts};
use numcheck::Vectors;

pub const FLOATS: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::BF16];

pub const AFFINE_BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
pub const AFFINE_GROUPS: [usize; 3] = [32, 64, 128];

/// Formats whose vectors are a file of their own, by name.
pub fn mlx_modes() -> [Format; 3] {
    [Format::Mxfp4, Format::Mxfp8, Format::Nvfp4]
}

pub fn ggml_blocks() -> Vec<Format> {
    let blocks = |format: &Format| format.ggml_type().is_some() && format.block() > 1;
    Format::all().filter(blocks).collect()
}

/// `formats/{format}.safetensors`.
pub fn vectors(format: Format) -> Vectors {
    Vectors::open(&format!("formats/{format}"))
}

/// The rows that the peers encoded, by name: `values`, or `large`, which f16 cannot hold. `[n, 256]`.
pub fn values(name: &str) -> Vec<f32> {
    Vectors::open("formats/values").get(name).f32s()
}

/// The components called `{prefix}weight`, `{prefix}scales` and so on.
pub fn components(vectors: &Vectors, format: Format, weight: &str, scales: &str) -> Vec<Vec<u8>> {
    let components = format.components(format.block()).unwrap();
    let prefix = |name| if name == "weight" { weight } else { scales };
    components.iter().map(|c| vectors.get(&format!("{}{}", prefix(c.name), c.name)).bytes).collect()
}

pub fn parts(components: &[Vec<u8>]) -> Parts<'_> {
    std::array::from_fn(|i| components.get(i).map_or(&[][..], Vec::as_slice))
}

/// The same bits, but any NaN equals any NaN: which one a sum or product of NaN and infinity makes, IEEE 754 leaves open.
#[track_caller]
pub fn assert_same(what: &str, got: &[f32], want: &[f32]) {
    let canonical = |values: &[f32]| -> Vec<f32> {
        values.iter().map(|&v| if v.is_nan() { f32::NAN } else { v }).collect()
    };
    numcheck::assert_bits(what, &canonical(got), &canonical(want));
}
