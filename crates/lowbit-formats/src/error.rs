use crate::{DType, Format};

/// An error in the choice of a format, or in data that should be in it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum FormatError {
    #[error("unknown format {name:?}; supported are {names}", name = cut(.0), names = names())]
    Unknown(String),
    #[error(
        "affine at {bits} bits, group {group_size} is not supported: bits are {all_bits} and groups {groups}",
        all_bits = listed(Format::AFFINE_BITS, "or"),
        groups = listed(&Format::AFFINE_GROUP_SIZES, "or")
    )]
    Affine { bits: usize, group_size: usize },
    #[error("unknown MLX quantization mode {name:?}; supported are {modes}", name = cut(.0), modes = modes())]
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
    #[error("{0} has no codes, but codes of 8 bits or fewer are wanted")]
    Codes(Format),
    #[error("{0} is only read: its codes are chosen with an importance matrix, which lowbit does not make")]
    OnlyRead(Format),
    #[error("{values} values are not whole rows of {k}")]
    Rows { values: usize, k: usize },
    #[error("value {index} is {value}, which {format} cannot store")]
    NotFinite { format: Format, index: usize, value: f32 },
}

fn names() -> String {
    join(Format::all().map(|format| format.to_string()))
}

fn modes() -> String {
    let names = Format::MLX_MODES.iter().map(Format::to_string);
    listed(&std::iter::once("affine".into()).chain(names).collect::<Vec<_>>(), "and")
}

/// `a, b and c`.
fn listed(items: &[impl ToString], last: &str) -> String {
    let items: Vec<_> = items.iter().map(ToString::to_string).collect();
    match &items[..] {
        [all @ .., end] if !all.is_empty() => format!("{} {last} {end}", all.join(", ")),
        items => items.concat(),
    }
}

fn ggml_names() -> String {
    let numbered = |format: Format| format.ggml_type().map(|number| format!("{number} ({format})"));
    join(Format::all().filter_map(numbered))
}

fn join(names: impl Iterator<Item = String>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

/// An unknown name, cut to the length that a message prints.
fn cut(name: &str) -> String {
    name.chars().take(60).collect()
}
