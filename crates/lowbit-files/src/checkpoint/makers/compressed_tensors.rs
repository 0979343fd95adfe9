//! compressed-tensors, as llm-compressor writes it: `pack-quantized` and `int-quantized`, and the
//! formats of [`microscaled`].
//!
//! ```text
//! weight_packed     i32 [.., N, K*bits/32]    codes + 2^(bits-1), each row one stream, least significant bit first: MLX's bytes
//! weight_scale      float [.., N, K/group]    [.., N, 1] per channel, [1] per tensor
//! weight_zero_point i32 [.., N*bits/32, K/group]   packed along N in the same way; missing where symmetric
//! weight_shape      i64 or i32 [2]            N and K
//! ```
//! Source: compressed-tensors 0.20 `compressors/pack_quantized`, `compressors/naive_quantized`,
//! `quantization/lifecycle`.

use lowbit_formats::{DType, FloatType};
use serde_json::Value;

use super::integers::{Integers, bits_at, word};
use super::nvfp4::{self, Global};
use super::{Adapter, fp8, integers, microscaled};
use crate::{Contents, FileError, Stored, TensorView};

/// A group of modules that are quantised alike.
#[derive(Debug)]
struct Group {
    bits: u64,
    is_integer: bool,
    symmetric: bool,
}

pub(super) fn read(adapter: &mut Adapter<'_>) -> Result<(), FileError> {
    adapter.refuse_cache_scheme("kv_cache_scheme")?;
    let is_something = |value: &&Value| match value {
        Value::Null => false,
        Value::Object(map) => !map.is_empty() && map.get("format").and_then(Value::as_str) != Some("dense"),
        _ => true,
    };
    for key in ["transform_config", "sparsity_config"] {
        if adapter.settings.get(key).filter(is_something).is_some() {
            return Err(adapter.unsupported(key));
        }
    }
    let groups = groups(adapter)?;
    for module in adapter.modules_with(".weight_packed") {
        let (weight, scale) = (adapter.need(module, "weight_packed")?, adapter.need(module, "weight_scale")?);
        match weight.stored {
            Stored::Plain(DType::U8) if scale.stored == Stored::Plain(DType::F8E4M3) => {
                let global = adapter.need(module, "weight_global_scale")?;
                nvfp4::read_module(adapter, module, [weight, scale, global], Global::Divides)?;
            }
            Stored::Plain(DType::U8) => microscaled::read_module(adapter, module, (weight, scale))?,
            _ => packed(adapter, &groups, module, (weight, scale))?,
        }
        activations(adapter, module);
    }
    for module in adapter.modules_with(".weight_scale") {
        let Some(weight) = adapter.tensors.get(&format!("{module}.weight")) else { continue };
        let (weight, scale) = match weight.stored {
            Stored::Plain(DType::I8 | DType::F8E4M3) => {
                (adapter.need(module, "weight")?, adapter.need(module, "weight_scale")?)
            }
            _ => continue,
        };
        match weight.stored {
            Stored::Plain(DType::I8) => bytes(adapter, module, (weight, scale))?,
            _ if scale.stored == Stored::Plain(DType::U8) => {
                microscaled::read_module(adapter, module, (weight, scale))?;
            }
            _ => fp8::read_module(adapter, module, (weight, scale))?,
        }
        activations(adapter, module);
    }
    Ok(())
}

/// The formats that are read.
const FORMATS: [&str; 8] = [
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "dense",
];

/// The groups of the configuration; none for a name that stands for a scheme.
fn groups(adapter: &Adapter<'_>) -> Result<Vec<Group>, FileError> {
    let mut groups = vec![];
    for group in adapter.settings.get("config_groups").and_then(Value::as_object).into_iter().flatten() {
        let weights = group.1.get("weights").unwrap_or(&Value::Null);
        let Some(bits) = weights.get("num_bits").and_then(Value::as_u64) else { continue };
        let kind = weights.get("type").and_then(Value::as_str).unwrap_or("int");
        let symmetric = weights.get("symmetric").and_then(Value::as_bool).unwrap_or(true);
        groups.push(Group { bits, is_integer: kind == "int", symmetric });
    }
    for format in formats(adapter.settings) {
        if !FORMATS.contains(&format) {
            return Err(adapter.unsupported(format!("format {}", crate::shown(format))));
        }
    }
    Ok(groups)
}

/// The formats that are named, of all modules and of groups of them.
fn formats(settings: &Value) -> Vec<&str> {
    let of_groups = settings
        .get("config_groups")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(|groups| groups.values());
    let all = of_groups.chain([settings]).filter_map(|of| of.get("format").and_then(Value::as_str));
    // Of groups that differ.
    all.filter(|format| *format != "mixed-precision").collect()
}

/// A weight whose codes are packed.
fn packed(
    adapter: &mut Adapter<'_>,
    groups: &[Group],
    module: &str,
    (weight, scale): (&TensorView, &TensorView),
) -> Result<(), FileError> {
    let shape = adapter.need(module, "weight_shape")?;
    let k = integers(shape).and_then(|sizes| usize::try_from(*sizes.last()?).ok());
    let k = k.filter(|&k| k > 0).ok_or_else(|| adapter.misfit(shape, "the weight's sizes are wanted"))?;
    let Some((&columns, rows)) = weight.shape.split_last().filter(|(_, rows)| !rows.is_empty()) else {
        return Err(adapter.misfit(weight, "a matrix is wanted"));
    };
    let bits = columns.checked_mul(32).filter(|all| all.is_multiple_of(k)).map_or(0, |all| all / k);
    if weight.stored != Stored::Plain(DType::I32) || !(1..=8).contains(&bits) || !k.is_multiple_of(32) {
        return Err(adapter.misfit(weight, format!("i32 with whole words for rows of {k} values is wanted")));
    }
    let zero_point = adapter.take(module, "weight_zero_point");
    let said = |group: &Group| {
        group.is_integer && group.bits == bits as u64 && group.symmetric == zero_point.is_none()
    };
    if !groups.is_empty() && !groups.iter().any(said) {
        let zeros = if zero_point.is_some() { "with" } else { "without" };
        let want = format!("no group of the configuration has integers of {bits} bits {zeros} zero points");
        return Err(adapter.misfit(weight, want));
    }
    let per_row = scales(adapter, scale, rows)?;
    adapter.check_group_order(module, "weight_g_idx", k / per_row.max(1))?;
    let stored = adapter.floats(scale)?;
    // A zero point times a scale takes more bits than a scale.
    let float = if zero_point.is_some() { FloatType::F32 } else { stored };
    let sizes = Integers { bits, rows: rows.iter().product(), k, groups: per_row, float };
    adapter.check_integers(module, sizes)?;
    let zero = zeros(adapter, zero_point, (sizes, rows))?;
    let scale = of_scales(scale, stored, per_row);
    adapter.push_integers(module, weight, (sizes, rows, weight.bytes.clone()), scale, zero)
}

/// The scale of a row and a group.
fn of_scales(
    view: &TensorView,
    float: FloatType,
    per_row: usize,
) -> impl Fn(usize, usize) -> f32 + Clone + Send + Sync + 'static {
    let (bytes, whole) = (view.bytes.get(), view.elements() == 1);
    move |row, group| float.get(&bytes, if whole { 0 } else { row * per_row + group })
}

/// The number of scales per row.
fn scales(adapter: &Adapter<'_>, scale: &TensorView, rows: &[usize]) -> Result<usize, FileError> {
    match scale.shape.split_last() {
        _ if scale.elements() == 1 => Ok(1),
        Some((&columns, of_rows)) if of_rows == rows && columns > 0 => Ok(columns),
        _ if scale.shape == rows => Ok(1),
        _ => Err(adapter.misfit(scale, format!("scales of rows {rows:?} are wanted"))),
    }
}

/// The zero point of a row and a group, of codes that count from 0.
fn zeros(
    adapter: &Adapter<'_>,
    view: Option<&TensorView>,
    (sizes, rows): (Integers, &[usize]),
) -> Result<Box<dyn Fn(usize, usize) -> f32 + Send + Sync>, FileError> {
    let Integers { bits, groups, .. } = sizes;
    let Some(view) = view else {
        let middle = (1u32 << (bits - 1)) as f32;
        return Ok(Box::new(move |_, _| middle));
    };
    let n = rows.last().copied().unwrap_or(1);
    let words = (n * bits).div_ceil(32);
    let want = [&rows[..rows.len() - 1], &[words, groups]].concat();
    if view.stored != Stored::Plain(DType::I32) || view.shape != want {
        return Err(adapter.misfit(view, format!("i32 {want:?} is wanted")));
    }
    let bytes = view.bytes.get();
    Ok(Box::new(move |row, group| {
        let at = |index: usize| word(&bytes, (row / n * words + index) * groups + group);
        bits_at(at, row % n * bits, bits) as f32
    }))
}

/// A weight of one byte per code.
fn bytes(
    adapter: &mut Adapter<'_>,
    module: &str,
    (weight, scale): (&TensorView, &TensorView),
) -> Result<(), FileError> {
    let Some((&k, rows)) =
        weight.shape.split_last().filter(|(k, rows)| !rows.is_empty() && k.is_multiple_of(32))
    else {
        return Err(adapter.misfit(weight, "rows of a multiple of 32 values are wanted"));
    };
    let (per_row, stored) = (scales(adapter, scale, rows)?, adapter.floats(scale)?);
    let zero_point = adapter.take(module, "weight_zero_point");
    let float = if zero_point.is_some() { FloatType::F32 } else { stored };
    let sizes = Integers { bits: 8, rows: rows.iter().product(), k, groups: per_row, float };
    adapter.check_integers(module, sizes)?;
    if let Some(view) = zero_point
        && (view.stored != Stored::Plain(DType::I8) || view.shape != scale.shape)
    {
        return Err(adapter.misfit(view, format!("i8 {:?} is wanted", scale.shape)));
    }
    let zero_point = zero_point.map(|view| (view.bytes.get(), view.elements() == 1));
    let zero = move |row: usize, group: usize| {
        let stored = zero_point
            .as_ref()
            .map_or(0, |(bytes, whole)| bytes[if *whole { 0 } else { row * per_row + group }]);
        128.0 + f32::from(stored as i8)
    };
    let from = weight.bytes.clone();
    // Codes count from 0 in MLX.
    let codes = Contents::computed(from.len(), move || from.get().iter().map(|code| code ^ 0x80).collect());
    adapter.push_integers(module, weight, (sizes, rows, codes), of_scales(scale, stored, per_row), zero)
}

/// Drops what says how activations are quantised: here they are not.
fn activations(adapter: &mut Adapter<'_>, module: &str) {
    for part in ["input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"]
    {
        adapter.drop_without_effect(module, part);
    }
}
