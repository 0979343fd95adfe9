//! Checkpoints that other tools than mlx-lm quantised: their tensors as MLX lays them out.
//!
//! Each tool stores a weight as several tensors of its own (`weight_packed`, `qweight`, `qzeros`,
//! ..). Here they become MLX's `weight`, `scales` and `biases`, and [`Maker`] knows the format of
//! each module. So whoever looks a weight up (layers, conversions, `inspect`) finds what it knows.
//! Tensors with the same bytes stay in the map; the rest is computed when it is read. Values in f32
//! are those of the tool's own code.

mod awq;
mod columns;
mod compressed_tensors;
mod fp8;
mod gptq;
mod integers;
mod microscaled;
mod modelopt;
mod nvfp4;
#[cfg(test)]
mod tests;

pub(super) use integers::words_by_rows;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use lowbit_formats::{DType, Format};
use serde_json::Value;

use crate::{Contents, FileError, Stored, TensorView, Tensors};

/// The tool that quantised a checkpoint whose tensors are not MLX's.
#[derive(Debug)]
pub(super) struct Maker {
    /// As people know it.
    pub method: &'static str,
    /// The format of each module that is quantised.
    pub modules: BTreeMap<String, Format>,
    /// The number of modules whose weights become floats because no format here holds them.
    pub expanded: usize,
    /// The names of tensors that are ignored: activations are not quantised.
    pub without_effect: Vec<String>,
}

/// The methods that are read, by `quant_method`, each with what makes MLX's tensors of its own.
type Read = fn(&mut Adapter<'_>) -> Result<(), FileError>;
const READ: [(&str, &str, Read); 10] = [
    ("compressed-tensors", "compressed-tensors", compressed_tensors::read),
    ("mxfp4", "MXFP4 as gpt-oss stores it", microscaled::read_gpt_oss),
    ("fp8", "FP8", fp8::read),
    ("fbgemm_fp8", "FP8", fp8::read),
    ("modelopt", "ModelOpt", modelopt::read),
    ("gptq", "GPTQ", gptq::read),
    ("awq", "AWQ", awq::read),
    ("auto-round", "AutoRound", gptq::read_auto_round),
    ("intel/auto-round", "AutoRound", gptq::read_auto_round),
    ("auto_round", "AutoRound", gptq::read_auto_round),
];

/// True if checkpoints of this `quant_method` are read.
pub(super) fn is_read(method: &str) -> bool {
    READ.iter().any(|(name, ..)| *name == method)
}

/// MLX's tensors of `tensors`, which a tool quantised as `settings` in `file` says.
///
/// # Errors
/// [`FileError::Quantization`] for what cannot be computed, [`FileError::Quantized`] for tensors
/// that do not fit together.
pub(super) fn adapt(
    file: &Path,
    config: &Value,
    (method, settings): (&str, &Value),
    tensors: Tensors,
) -> Result<(Tensors, Maker), FileError> {
    let &(_, name, read) =
        READ.iter().find(|(name, ..)| *name == method).expect("a method that `is_read` accepts");
    let mut adapter = Adapter {
        file,
        config,
        settings,
        method: name,
        tensors: &tensors,
        taken: HashSet::new(),
        made: vec![],
        modules: BTreeMap::new(),
        expanded: BTreeSet::new(),
        without_effect: BTreeSet::new(),
    };
    read(&mut adapter)?;
    if adapter.modules.is_empty()
        && adapter.expanded.is_empty()
        && adapter.word("format").as_deref() != Some("dense")
    {
        return Err(FileError::quantization(file, format!("{name} without any of its tensors")));
    }
    let Adapter { taken, mut made, modules, expanded, without_effect, .. } = adapter;
    made.extend(tensors.iter().filter(|view| !taken.contains(view.name.as_str())).cloned());
    let without_effect = without_effect.into_iter().map(str::to_string).collect();
    Ok((Tensors::new(made)?, Maker { method: name, modules, expanded: expanded.len(), without_effect }))
}

/// A checkpoint under conversion.
struct Adapter<'a> {
    file: &'a Path,
    config: &'a Value,
    settings: &'a Value,
    method: &'static str,
    tensors: &'a Tensors,
    taken: HashSet<&'a str>,
    made: Vec<TensorView>,
    modules: BTreeMap<String, Format>,
    expanded: BTreeSet<String>,
    without_effect: BTreeSet<&'static str>,
}

impl<'a> Adapter<'a> {
    /// The modules that have a tensor `part`, with its name's dot.
    fn modules_with(&self, part: &str) -> Vec<&'a str> {
        self.tensors.names().filter_map(|name| name.strip_suffix(part)).collect()
    }

    /// A module's tensor, which is not passed on as it is.
    fn take(&mut self, module: &str, part: &str) -> Option<&'a TensorView> {
        self.take_named(&format!("{module}.{part}"))
    }

    fn take_named(&mut self, name: &str) -> Option<&'a TensorView> {
        let view = self.tensors.get(name)?;
        self.taken.insert(view.name.as_str());
        Some(view)
    }

    /// As [`Self::take`], of a tensor that has to be there.
    fn need(&mut self, module: &str, part: &str) -> Result<&'a TensorView, FileError> {
        self.need_named(module, &format!(".{part}"))
    }

    /// As [`Self::need`], of the tensor whose name ends with `end`.
    fn need_named(&mut self, module: &str, end: &str) -> Result<&'a TensorView, FileError> {
        let tensor = format!("{module}{end}");
        self.take_named(&tensor).ok_or_else(|| {
            let want = format!("{module} is quantised by {} and needs it", self.method);
            FileError::Quantized { file: self.file.into(), tensor, got: "missing".into(), want }
        })
    }

    /// Drops a module's tensor that changes nothing here.
    fn drop_without_effect(&mut self, module: &str, part: &'static str) {
        if self.take(module, part).is_some() {
            self.without_effect.insert(part);
        }
    }

    /// Adds a module's tensor.
    fn push(&mut self, module: &str, part: &str, of: &TensorView, made: (DType, Vec<usize>, Contents)) {
        let (dtype, shape, bytes) = made;
        let (name, stored) = (format!("{module}.{part}"), Stored::Plain(dtype));
        self.made.push(TensorView { name, stored, shape, bytes, file: of.file.clone() });
    }

    /// Says which format a module is in.
    fn is_in(&mut self, module: &str, format: Format) {
        self.modules.insert(module.into(), format);
    }

    /// An error: `view` is not what it should be.
    fn misfit(&self, view: &TensorView, want: impl Into<String>) -> FileError {
        let got = format!("{} {:?}", view.stored, view.shape);
        FileError::Quantized {
            file: view.file.to_path_buf(),
            tensor: view.name.clone(),
            got,
            want: want.into(),
        }
    }

    /// An error: the method is read, but not `what`.
    fn unsupported(&self, what: impl std::fmt::Display) -> FileError {
        FileError::quantization(self.file, format!("{} with {what}", self.method))
    }

    /// A number of the settings.
    fn number(&self, key: &'static str) -> Result<Option<i64>, FileError> {
        match self.settings.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match value.as_i64() {
                Some(number) => Ok(Some(number)),
                None => {
                    Err(super::mismatch(self.file, &format!("quantization_config.{key}"), "a number", value))
                }
            },
        }
    }

    /// A string of the settings, in lower case.
    fn word(&self, key: &str) -> Option<String> {
        self.settings.get(key).and_then(Value::as_str).map(str::to_lowercase)
    }

    /// Refuses keys and values that are cached in few bits: they are not here.
    fn refuse_cache_scheme(&self, key: &str) -> Result<(), FileError> {
        match self.settings.get(key).filter(|scheme| !scheme.is_null()) {
            None => Ok(()),
            Some(_) => Err(self.unsupported(format!(
                "{key} (quantised keys and values; set it to null in {} to have them in f16)",
                crate::names::CONFIG
            ))),
        }
    }

    /// Refuses an order of the groups that `g_idx` says, unless it is the usual one: value `i` of a
    /// row in group `i / group_size`.
    fn check_group_order(&mut self, module: &str, part: &str, group_size: usize) -> Result<(), FileError> {
        let Some(view) = self.take(module, part) else { return Ok(()) };
        let bytes = view.bytes.get();
        let (indices, rest) = bytes.as_chunks::<4>();
        if view.stored != Stored::Plain(DType::I32) || !rest.is_empty() {
            return Err(self.misfit(view, "i32 indices are wanted"));
        }
        let is = |i: usize, index: &[u8; 4]| i32::from_le_bytes(*index) == (i / group_size) as i32;
        let in_order = indices.iter().enumerate().all(|(i, index)| is(i, index));
        // compressed-tensors writes -1 where there is no order.
        let none = indices.iter().all(|index| i32::from_le_bytes(*index) == -1);
        if in_order || none {
            return Ok(());
        }
        Err(self.unsupported(format!(
            "act-order ({} puts values into groups out of order)",
            crate::shown(&view.name)
        )))
    }
}

/// A view's bytes as little-endian integers.
fn integers(view: &TensorView) -> Option<Vec<i64>> {
    let bytes = view.bytes.get();
    match view.stored {
        Stored::Plain(DType::I64) => {
            Some(bytes.as_chunks().0.iter().map(|&n| i64::from_le_bytes(n)).collect())
        }
        Stored::Plain(DType::I32) => {
            Some(bytes.as_chunks().0.iter().map(|&n| i32::from_le_bytes(n).into()).collect())
        }
        _ => None,
    }
}
