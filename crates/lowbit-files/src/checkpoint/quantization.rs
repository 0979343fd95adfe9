use std::path::Path;

use lowbit_formats::{DType, FloatType, Format, FormatError};
use serde_json::Value;

use super::{Checkpoint, Description, makers, mismatch};
use crate::names::CONFIG;
use crate::{FileError, shown};

/// The quantization of a module's weight according to config.json: a format without the type of
/// affine's scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization(Format);

impl Quantization {
    /// That of a weight in `format`.
    pub(super) fn of(format: Format) -> Self {
        Self(format)
    }

    /// The format of a weight with this quantization, whose `scales` tensor has the type `scales`.
    ///
    /// # Errors
    /// [`FormatError::Type`] when the scales are of a type that the mode does not have.
    pub fn format(self, scales: DType) -> Result<Format, FormatError> {
        let format = self.0.with_float(FloatType::from_dtype(scales).unwrap_or(FloatType::F32));
        let components = format.components(format.block())?;
        match components.iter().find(|component| component.name == "scales" && component.dtype != scales) {
            Some(wrong) => {
                Err(FormatError::Type { format, component: "scales", want: wrong.dtype, got: scales })
            }
            None => Ok(format),
        }
    }
}

impl Checkpoint {
    /// The quantization of the weight of module `path` (`model.layers.0.mlp.gate`); `None` if it is
    /// not quantised. An entry for the path overrides the general settings, which apply to modules
    /// that have `scales`.
    ///
    /// Source: mlx-lm 0.32 `load_model`, mlx 0.32 `nn.quantize`. In particular an override starts
    /// from the mode's own defaults, not from the general settings.
    ///
    /// # Errors
    /// [`FileError::Value`] for settings that are malformed, [`FileError::Format`] for those that
    /// MLX does not have.
    pub fn quantization(&self, path: &str) -> Result<Option<Quantization>, FileError> {
        if let Some(maker) = self.maker() {
            return Ok(maker.modules.get(path).copied().map(Quantization));
        }
        if let Description::Directory { multiplied, .. } = &self.description
            && multiplied.contains(path)
        {
            return Ok(Some(Quantization(Format::Fp4)));
        }
        let Some((key, settings)) = self.config().ok().and_then(find) else { return Ok(None) };
        let file = self.path().join(CONFIG);
        match settings.get(path) {
            Some(Value::Bool(false)) => Ok(None),
            Some(Value::Bool(true)) => parse(&file, key, settings).map(Some),
            Some(module) => parse(&file, &format!("{key}[{path:?}]"), module).map(Some),
            None if self.tensors.get(&format!("{path}.scales")).is_some() => {
                parse(&file, key, settings).map(Some)
            }
            None => Ok(None),
        }
    }
}

impl Checkpoint {
    /// The names of entries in MLX's quantization that are neither general settings nor about a
    /// module of this checkpoint.
    pub fn surplus_quantization(&self) -> Vec<String> {
        let mlx = || self.config().ok().and_then(find).filter(|_| self.maker().is_none());
        let Some((_, settings)) = mlx() else { return vec![] };
        let is_surplus = |key: &&String| {
            let is_module = || self.tensors.get(&format!("{key}.weight")).is_some();
            !["bits", "group_size", "mode"].contains(&key.as_str()) && !is_module()
        };
        settings
            .as_object()
            .into_iter()
            .flat_map(|settings| settings.keys())
            .filter(is_surplus)
            .cloned()
            .collect()
    }
}

/// MLX's settings, which mlx-lm writes under both keys, or another method's.
pub(super) fn find(config: &Value) -> Option<(&'static str, &Value)> {
    let text_config = config.get("text_config").unwrap_or(&Value::Null);
    [("quantization", config), ("quantization_config", config), ("quantization_config", text_config)]
        .into_iter()
        .find_map(|(key, config)| Some((key, config.get(key).filter(|settings| !settings.is_null())?)))
}

/// The way a checkpoint's weights are quantised.
pub(super) enum By {
    /// As config.json says it for MLX.
    Mlx,
    /// By another tool: its method, and what it says of it.
    Maker(String, Value),
}

/// The quantisation of weights by `config`, which was read from `file`.
///
/// # Errors
/// [`FileError::Quantization`] for methods that are not read, so that packed weights are not taken
/// for something else; those of settings that MLX does not have.
pub(super) fn by(file: &Path, config: &Value) -> Result<Option<By>, FileError> {
    let Some((key, settings)) = find(config) else {
        // Older tools describe it in a separate file.
        let Some((name, method)) = FILES.iter().find(|(name, _)| file.with_file_name(name).exists()) else {
            return Ok(None);
        };
        let settings = super::read_json(&file.with_file_name(name))?;
        return maker(file, method, &settings).map(Some);
    };
    let method = settings.get("quant_method");
    if method.is_some() || (key == "quantization_config" && settings.get("bits").is_none()) {
        // ModelOpt's own file names algorithms alone.
        let own = settings.get("quant_algo").map(|_| "modelopt");
        let method = method.map_or(own, Value::as_str).unwrap_or("an unnamed");
        return maker(file, method, settings).map(Some);
    }
    parse(file, key, settings).map(|_| Some(By::Mlx))
}

/// The files in which AutoGPTQ, AutoAWQ and ModelOpt describe their output.
const FILES: [(&str, &str); 3] =
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt")];

/// Methods that are not read, by their `quant_method`, and the names that people know them by.
const METHODS: [(&str, &str); 10] = [
    ("bitsandbytes", "bitsandbytes"),
    ("exl2", "EXL2"),
    ("exl3", "EXL3"),
    ("hqq", "HQQ"),
    ("aqlm", "AQLM"),
    ("vptq", "VPTQ"),
    ("quip", "QuIP#"),
    ("bitnet", "BitNet"),
    ("quark", "Quark"),
    ("torchao", "torchao"),
];

fn maker(file: &Path, method: &str, settings: &Value) -> Result<By, FileError> {
    if makers::is_read(method) {
        return Ok(By::Maker(method.into(), settings.clone()));
    }
    let known = METHODS.iter().find(|(name, _)| *name == method);
    let method = known.map_or_else(|| shown(method).to_string(), |(_, known)| known.to_string());
    Err(FileError::quantization(file, method))
}

fn parse(file: &Path, key: &str, settings: &Value) -> Result<Quantization, FileError> {
    if !settings.is_object() {
        return Err(mismatch(file, key, "an object", settings));
    }
    let field = |name| settings.get(name).filter(|value: &&Value| !value.is_null());
    let mode = match field("mode") {
        None => "affine",
        Some(mode) => {
            mode.as_str().ok_or_else(|| mismatch(file, &format!("{key}.mode"), "a string", mode))?
        }
    };
    let refuse = |error| FileError::Format { file: file.into(), key: key.into(), error };
    let default = Format::from_mlx_mode(mode).map_err(refuse)?;
    let number = |name, default| match field(name) {
        None => Ok(default),
        Some(value) => value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok())
            .ok_or_else(|| mismatch(file, &format!("{key}.{name}"), "a number", value)),
    };
    let bits = number("bits", default.scheme().bits)?;
    let group_size = number("group_size", default.block())?;
    Format::from_mlx(mode, bits, group_size, FloatType::F32).map(Quantization).map_err(refuse)
}
