//! The numbers that GGUF gives tensor types.

use lowbit_formats::{DType, FloatType, Format};

use crate::Stored;

/// ggml's plain types that are not used for weights, and so have no [`Format`].
const PLAIN: [(u32, DType); 5] =
    [(24, DType::I8), (25, DType::I16), (26, DType::I32), (27, DType::I64), (28, DType::F64)];

/// ggml's block types that have no [`Format`], to name them in errors.
const UNSUPPORTED: [(u32, &str); 10] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

/// The tensor type with the number `ggml_type`.
///
/// # Errors
/// Its name when it is known but not supported, else its number.
pub(super) fn stored(ggml_type: u32) -> Result<Stored, String> {
    if let Some((_, dtype)) = PLAIN.iter().find(|(number, _)| *number == ggml_type) {
        return Ok(Stored::Plain(*dtype));
    }
    match Format::from_ggml_type(ggml_type) {
        Ok(Format::Float(float)) => return Ok(Stored::Plain(float.dtype())),
        Ok(format) => return Ok(Stored::Blocks(format)),
        Err(_) => {}
    }
    let name = UNSUPPORTED.iter().find(|(number, _)| *number == ggml_type).map(|(_, name)| *name);
    Err(name.map_or_else(|| ggml_type.to_string(), str::to_string))
}

/// The number of the type of `stored`, if GGUF has one.
pub(super) fn number(stored: Stored) -> Option<u32> {
    match stored {
        Stored::Plain(dtype) => match FloatType::from_dtype(dtype) {
            Some(float) => Format::Float(float).ggml_type(),
            None => PLAIN.iter().find(|(_, known)| *known == dtype).map(|(number, _)| *number),
        },
        Stored::Blocks(format) => format.ggml_type(),
    }
}

/// The names of the supported types, for errors.
pub(super) fn supported() -> String {
    let names: Vec<_> = (0..64).filter_map(|number| stored(number).ok()).map(|s| s.to_string()).collect();
    names.join(", ")
}
