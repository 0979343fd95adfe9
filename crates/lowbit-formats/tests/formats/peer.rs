//! The peers' vectors, and comparison with them.

use lowbit_formats::{FloatType, Format, Parts};
use numcheck::Vectors;

pub const FLOATS: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::BF16];

/// The bits and group sizes of affine.
pub fn affine() -> Vec<(usize, usize)> {
    let numbers = |format| match format {
        Format::Affine { bits, group_size, .. } => Some((bits.into(), group_size.into())),
        _ => None,
    };
    Format::all().filter_map(numbers).collect()
}

/// The formats of MLX's other modes.
pub fn mlx_modes() -> Vec<Format> {
    Format::all().filter(|format| Format::from_mlx_mode(&format.to_string()).is_ok()).collect()
}

/// GGML's block types.
pub fn ggml_blocks() -> Vec<Format> {
    let blocks = |format: &Format| format.ggml_type().is_some() && format.block() > 1;
    Format::all().filter(blocks).collect()
}

/// `formats/{format}.safetensors`.
pub fn vectors(format: Format) -> Vectors {
    Vectors::open(&format!("formats/{format}"))
}

/// The rows that the peers encoded, by name: `values`, or `large`, which f16 cannot hold.
/// `[n, 256]`.
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

/// The same bits, but any NaN equals any NaN: which one a sum or product of NaN and infinity makes,
/// IEEE 754 leaves open.
#[track_caller]
pub fn assert_same(what: &str, got: &[f32], want: &[f32]) {
    let canonical = |values: &[f32]| -> Vec<f32> {
        values.iter().map(|&v| if v.is_nan() { f32::NAN } else { v }).collect()
    };
    numcheck::assert_bits(what, &canonical(got), &canonical(want));
}
