use crate::{DType, Format};

/// What can be wrong with a format or with bytes said to be in it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum FormatError {
    #[error("unknown format {name:?}; supported are {names}", name = cut(.0), names = names())]
    Unknown(String),
    #[error(
        "affine at {bits} bits, group {group_size} is not supported: bits are 2, 3, 4, 5, 6 or 8 and groups 32, 64 or 128"
    )]
    Affine { bits: usize, group_size: usize },
    #[error("unknown MLX quantization mode {name:?}; supported are affine, mxfp4, mxfp8 and nvfp4", name = cut(.0))]
    Mode(String),
    #[error(
        "{format} has {want_bits} bits and groups of {want_group_size}, but {bits} bits and groups of {group_size} were asked for"
    )]
    ModeNumbers { format: Format, want_bits: usize, want_group_size: usize, bits: usize, group_size: usize },
    #[error("ggml type {0} is not supported; supported are {names}", names = ggml_names())]
    GgmlType(u32),
    #[error("{format} stores rows in blocks of {block} values, but a row has {k}")]
    Block { format: Format, block: usize, k: usize },
    #[error("{n} x {k} values are more than this machine can address")]
    TooLarge { n: usize, k: usize },
    #[error("{component} of a {n} x {k} weight in {format} takes {want} bytes, but {got} were given")]
    Bytes { format: Format, component: &'static str, n: usize, k: usize, want: usize, got: usize },
    #[error("{component} of a weight in {format} is {want}, but {got} was given")]
    Type { format: Format, component: &'static str, want: DType, got: DType },
    #[error("{values} values are not whole rows of {k}")]
    Rows { values: usize, k: usize },
    #[error("value {index} is {value}, which {format} cannot store")]
    NotFinite { format: Format, index: usize, value: f32 },
}

fn names() -> String {
    join(Format::all().map(|format| format.to_string()))
}

fn ggml_names() -> String {
    let numbered = |format: Format| format.ggml_type().map(|number| format!("{number} ({format})"));
    join(Format::all().filter_map(numbered))
}

fn join(names: impl Iterator<Item = String>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

/// As much of a stranger's name as a message prints.
fn cut(name: &str) -> String {
    name.chars().take(60).collect()
}
