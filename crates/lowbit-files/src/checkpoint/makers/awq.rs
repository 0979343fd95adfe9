//! AWQ as AutoAWQ packs it (`gemm`).
//!
//! ```text
//! qweight i32 [K, N/8]        4 bits: column 8 i + j of a row in bits 4 ORDER[j] of word i
//! qzeros  i32 [K/group, N/8]  in the same way
//! scales  f16 [K/group, N]
//! ```
//! Source: autoawq 0.2.9 `utils/packing_utils.py`, `modules/linear/gemm.py`.

use bytes::Bytes;
use lowbit_formats::{DType, FloatType};

use super::Adapter;
use super::columns::{by_columns, drop_zero_bias, said};
use super::integers::{Integers, word, words_by_rows};
use crate::{Contents, FileError};

/// The nibble of a word that each of eight columns is in.
const ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

pub(super) fn read(adapter: &mut Adapter<'_>) -> Result<(), FileError> {
    let version = adapter.word("version").unwrap_or_else(|| "gemm".into());
    if version != "gemm" {
        return Err(adapter.unsupported(format!("version {}", crate::shown(&version))));
    }
    read_all(adapter)
}

pub(super) fn read_all(adapter: &mut Adapter<'_>) -> Result<(), FileError> {
    for module in adapter.modules_with(".qweight") {
        one(adapter, module)?;
        drop_zero_bias(adapter, module);
    }
    Ok(())
}

fn one(adapter: &mut Adapter<'_>, module: &str) -> Result<(), FileError> {
    let [weight, scale] = [adapter.need(module, "qweight")?, adapter.need(module, "scales")?];
    let [k, words] = adapter.matrix(weight, DType::I32)?;
    let float = adapter.floats(scale)?;
    let &[groups, n] = &scale.shape[..] else { return Err(adapter.misfit(scale, "a matrix is wanted")) };
    let bits = (words * 32).checked_div(n).unwrap_or(0);
    if bits != 4 || words * 8 != n || groups == 0 || !k.is_multiple_of(32) {
        return Err(adapter.misfit(weight, format!("[K, {n} / 8] is wanted, as {} says", scale.name)));
    }
    said(adapter, weight, bits)?;
    let zero = adapter.take(module, "qzeros");
    if let Some(view) = zero
        && adapter.matrix(view, DType::I32)? != [groups, words]
    {
        return Err(adapter.misfit(view, format!("[{groups}, {words}] is wanted, as {} says", scale.name)));
    }
    let sizes =
        Integers { bits, rows: n, k, groups, float: if zero.is_some() { FloatType::F32 } else { float } };
    adapter.check_integers(module, sizes)?;
    let zero = zero.map(|view| view.bytes.get());
    let value = move |row: usize, group: usize| match &zero {
        // Codes count from the middle.
        None => 8.0,
        Some(bytes) => nibble(word(bytes, group * words + row / 8), row % 8) as f32,
    };
    let from = weight.bytes.clone();
    let codes = Contents::computed(from.len(), move || repacked(&from.get(), n, k));
    adapter.push_integers(module, weight, (sizes, &[n], codes), by_columns(scale, float, n), value)
}

/// Column `column` of the eight in a word.
fn nibble(word: u32, column: usize) -> u32 {
    word >> (4 * ORDER[column]) & 15
}

/// Codes by rows of `N`, eight of a row in a word.
fn repacked(words: &Bytes, n: usize, k: usize) -> Vec<u8> {
    let (from, columns) = (n / 8, k / 8);
    words_by_rows(n, columns, |first, out| {
        let count = out.len() / (4 * columns);
        for column in 0..columns {
            for part in 0..count / 8 {
                // Eight values of each of eight rows.
                let block: [u32; 8] =
                    std::array::from_fn(|i| word(words, (8 * column + i) * from + first / 8 + part));
                for row in 0..8 {
                    let packed = block.iter().rfold(0, |packed, &word| packed << 4 | nibble(word, row));
                    let at = 4 * ((8 * part + row) * columns + column);
                    out[at..at + 4].copy_from_slice(&packed.to_le_bytes());
                }
            }
        }
    })
}
