//! GPTQ as AutoGPTQ and GPTQModel pack it, and AutoRound, which packs in the same way.
//!
//! ```text
//! qweight i32 [K*bits/32, N]        codes of each column one stream, least significant bit first
//! qzeros  i32 [K/group, N*bits/32]  zero points of each row one stream; v1 stores zero - 1
//! scales  f16 [K/group, N]
//! g_idx   i32 [K]                   the group of each value
//! ```
//! Source: auto-gptq 0.7.1 `nn_modules/qlinear/qlinear_cuda_old.py`, auto-round 0.16
//! `inference/{backend,convert_model}.py`.

use lowbit_formats::{DType, FloatType};
use serde_json::Value;

use super::columns::{by_columns, drop_zero_bias, said};
use super::integers::{Integers, bits_at, transposed, word};
use super::{Adapter, awq};
use crate::{Contents, FileError};

/// The storage of zero points.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Zeros {
    /// Minus 1.
    Less,
    AsTheyAre,
}

pub(super) fn read(adapter: &mut Adapter<'_>) -> Result<(), FileError> {
    let format = adapter.word("checkpoint_format").unwrap_or_else(|| "gptq".into());
    let zeros = match &format[..] {
        "gptq" => Zeros::Less,
        "gptq_v2" => Zeros::AsTheyAre,
        other => return Err(adapter.unsupported(format!("checkpoint_format {}", crate::shown(other)))),
    };
    if adapter.settings.get("is_marlin_format").and_then(Value::as_bool) == Some(true) {
        return Err(adapter.unsupported("is_marlin_format"));
    }
    read_all(adapter, zeros)
}

pub(super) fn read_auto_round(adapter: &mut Adapter<'_>) -> Result<(), FileError> {
    let packing = adapter.word("packing_format").unwrap_or_else(|| "auto".into());
    for key in ["rotation_config", "spinquant_config"] {
        if adapter.settings.get(key).is_some_and(|value| !value.is_null()) {
            return Err(adapter.unsupported(key));
        }
    }
    match &packing[..] {
        "auto" | "auto_round:auto_gptq" | "auto_round:gptq" => read_all(adapter, Zeros::Less),
        "auto_round" | "auto_round:gptqmodel" => read_all(adapter, Zeros::AsTheyAre),
        "auto_round:auto_awq" | "auto_round:awq" => awq::read_all(adapter),
        other => Err(adapter.unsupported(format!("packing_format {}", crate::shown(other)))),
    }
}

fn read_all(adapter: &mut Adapter<'_>, zeros: Zeros) -> Result<(), FileError> {
    let symmetric = adapter.settings.get("sym").and_then(Value::as_bool) == Some(true);
    for module in adapter.modules_with(".qweight") {
        one(adapter, module, zeros, symmetric)?;
        drop_zero_bias(adapter, module);
    }
    Ok(())
}

fn one(adapter: &mut Adapter<'_>, module: &str, zeros: Zeros, symmetric: bool) -> Result<(), FileError> {
    let [weight, zero, scale] =
        [adapter.need(module, "qweight")?, adapter.need(module, "qzeros")?, adapter.need(module, "scales")?];
    let [words, n] = adapter.matrix(weight, DType::I32)?;
    let [groups, zero_words] = adapter.matrix(zero, DType::I32)?;
    let float = adapter.floats(scale)?;
    if scale.shape != [groups, n] {
        return Err(adapter
            .misfit(scale, format!("[{groups}, {n}] is wanted, as {} and {} say", weight.name, zero.name)));
    }
    let bits = (zero_words * 32).checked_div(n).unwrap_or(0);
    let k = (words * 32).checked_div(bits).unwrap_or(0);
    if ![2, 3, 4, 8].contains(&bits)
        || zero_words * 32 != n * bits
        || words * 32 != k * bits
        || !k.is_multiple_of(32)
    {
        return Err(
            adapter.misfit(zero, format!("zero points of {n} columns in 2, 3, 4 or 8 bits are wanted"))
        );
    }
    said(adapter, zero, bits)?;
    let sizes = Integers { bits, rows: n, k, groups, float: FloatType::F32 };
    adapter.check_integers(module, sizes)?;
    adapter.check_group_order(module, "g_idx", k / groups)?;
    let bytes = zero.bytes.get();
    let middle = 1u32 << (bits - 1);
    let value = move |row: usize, group: usize| {
        let stored = bits_at(|index| word(&bytes, group * zero_words + index), row * bits, bits);
        match zeros {
            Zeros::AsTheyAre => stored,
            // As AutoGPTQ computes it: with 3 bits there is room for 8.
            Zeros::Less if bits == 3 => stored + 1,
            Zeros::Less => (stored + 1) & ((1 << bits) - 1),
        }
    };
    // The middle times an f16 is an f16.
    let is_middle = symmetric && (0..groups).all(|group| (0..n).all(|row| value(row, group) == middle));
    let sizes = Integers { float: if is_middle { float } else { FloatType::F32 }, ..sizes };
    let from = weight.bytes.clone();
    let codes = Contents::computed(from.len(), move || transposed(&from.get(), n, words));
    let scale = by_columns(scale, float, n);
    adapter.push_integers(module, weight, (sizes, &[n], codes), scale, move |row, group| {
        value(row, group) as f32
    })
}
