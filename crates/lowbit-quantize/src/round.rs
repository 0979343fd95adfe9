//! Checkpoints in MLX's layout, as mlx-lm writes and reads them.

use crate::computed::Computed;
use crate::converted::Converted;
use crate::nvfp4::{self, Divisors};
use crate::planned::{Asked, Learned, Planned, Student, Written};
use crate::tensor::{Encoded, Loss, Tensor};
use crate::{Fallback, QuantizeError, Rule, Summary, mlx, output_path};
use lowbit_files::staging::{Content, Existing, Staged};
use lowbit_files::{Checkpoint, Companion, Layout, Stored, Unwritten, UnwrittenTensor, safetensors};
use lowbit_formats::{Component, DType, FloatType, Format, FormatError};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::path::Path;

/// The formats of a checkpoint in MLX's layout.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MlxFormat {
    /// `affine`, `mxfp4`, `mxfp8` or `nvfp4`, as `mx.quantize` names its modes.
    pub mode: String,
    /// Bits per code.
    pub bits: usize,
    /// Values that share a scale.
    pub group_size: usize,
}

impl MlxFormat {
    /// The names of the modes.
    pub const MODES: [&str; 4] = ["affine", "mxfp4", "mxfp8", "nvfp4"];

    /// With `bits` bits per code in groups of `group_size`, in one of [`Self::MODES`].
    /// [`Recipe::run`](crate::Recipe::run) refuses numbers that the mode does not have.
    pub fn new(mode: impl Into<String>, bits: usize, group_size: usize) -> Self {
        Self { mode: mode.into(), bits, group_size }
    }

    /// With MLX's default bits and group size for `mode`.
    pub fn for_mode(mode: impl Into<String>) -> Self {
        let mode = mode.into();
        let (bits, group_size) = match mode.as_str() {
            "mxfp8" => (8, 32),
            "mxfp4" => (4, 32),
            "nvfp4" => (4, 16),
            _ => (4, 64),
        };
        Self::new(mode, bits, group_size)
    }

    /// With this many bits per code.
    #[must_use]
    pub fn with_bits(self, bits: usize) -> Self {
        Self { bits, ..self }
    }

    /// With this many values that share a scale.
    #[must_use]
    pub fn with_group_size(self, group_size: usize) -> Self {
        Self { group_size, ..self }
    }

    /// The format of a weight whose scales have the type `scales`.
    fn format(&self, scales: FloatType) -> Result<Format, FormatError> {
        Format::from_mlx(&self.mode, self.bits, self.group_size, scales)
    }
}

impl Default for MlxFormat {
    /// `affine` at 4 bits in groups of 64.
    fn default() -> Self {
        Self::for_mode("affine")
    }
}

/// Bits and group size of routers and shared-expert gates: they are small, and choosing a wrong
/// expert costs most.
const ROUTER: (usize, usize) = (8, 64);

/// A file of a sharded checkpoint holds at most this many bytes, as mlx-lm has it.
const SHARD_BYTES: u64 = 5 << 30;

/// A new checkpoint in MLX's layout, before it is written.
pub(crate) struct Plan {
    format: MlxFormat,
    replace: bool,
    /// `config.json`, without the new quantisation.
    config: Value,
    companions: Vec<Companion>,
    jobs: Vec<Job>,
    fallbacks: Vec<Fallback>,
    warnings: Vec<String>,
}

impl Plan {
    /// Checks everything before anything is written.
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        output: &Path,
        format: &MlxFormat,
        Asked { rules, replace }: &Asked,
    ) -> Result<Self, QuantizeError> {
        format.format(FloatType::BF16)?;
        output_path::check_all(checkpoint, output, *replace)?;
        let computed = Computed::new(checkpoint)?;
        let Converted { config, tensors, warnings } = mlx::convert(&computed)?;
        let companions = checkpoint.companions()?;
        let types = Types::new(&computed, &config, &tensors);
        Rule::check(rules, tensors.iter().filter_map(|tensor| types.module(tensor)))?;
        let mut fallbacks = vec![];
        let job = |tensor| Job::new(tensor, &types, (format, rules), &mut fallbacks);
        let jobs = tensors.into_iter().map(job).collect::<Result<Vec<_>, _>>()?;
        let (format, replace) = (format.clone(), *replace);
        let plan = Self { format, replace, config, companions, jobs, fallbacks, warnings };
        let unwritten = |(name, dtype, shape): (String, _, Vec<usize>)| {
            // No matrix is times 0.
            let ones = || 1f32.to_le_bytes().repeat(shape.iter().product());
            let bytes = name.ends_with(GLOBAL_SCALE).then(ones);
            UnwrittenTensor { name, stored: Stored::Plain(dtype), shape, bytes }
        };
        let mut tensors = vec![];
        for job in &plan.jobs {
            tensors.extend(job.components()?.into_iter().map(unwritten));
        }
        computed.check_new(output, "MLX's layout", Unwritten::Mlx(plan.quantized_config()), tensors)?;
        Ok(plan)
    }

    /// `config.json` with the new quantisation.
    fn quantized_config(&self) -> Value {
        let overrides = self.jobs.iter().filter_map(|job| job.quantization(&self.format)).collect();
        config(self.config.clone(), &self.format, overrides)
    }

    /// Its tensors.
    pub(crate) fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// Writes all files into `folder`.
    pub(crate) fn write_into(
        &self,
        folder: &Path,
        learned: Learned<'_>,
        progress: Written<'_>,
    ) -> Result<Summary, QuantizeError> {
        let (fallbacks, warnings) = (self.fallbacks.clone(), self.warnings.clone());
        let summary =
            Summary { fallbacks, warnings, ..write_tensors(&self.jobs, folder, learned, progress)? };
        let config = self.quantized_config();
        let config = serde_json::to_string_pretty(&config).expect("JSON values can be written");
        write(folder, "config.json", config.as_bytes())?;
        self.companions.iter().try_for_each(|companion| write(folder, &companion.name, &companion.bytes))?;
        Ok(summary)
    }

    fn existing(&self) -> Existing {
        output_path::existing(self.replace, Content::CHECKPOINT)
    }
}

impl Planned for Plan {
    fn tensors(&self) -> usize {
        self.jobs.len()
    }

    fn summary(&self) -> Result<Summary, QuantizeError> {
        let (fallbacks, warnings) = (self.fallbacks.clone(), self.warnings.clone());
        let mut summary = Summary { fallbacks, warnings, ..Summary::default() };
        for Job { tensor, format, .. } in &self.jobs {
            let parameters = tensor.shape.iter().map(|&n| n as u64).product();
            let size = tensor.size_in(*format)? + global_scales(tensor) as u64 * 4;
            summary.add(&tensor.name, format.to_string(), parameters, size, Loss::default());
        }
        Ok(summary)
    }

    fn check_place(&self, output: &Path) -> Result<(), QuantizeError> {
        Ok(Staged::check_directory(output, self.existing())?)
    }

    fn stage(&self, output: &Path) -> Result<Staged, QuantizeError> {
        Ok(Staged::directory(output, self.existing())?)
    }

    fn values(&self, module: &str) -> Result<Vec<f32>, QuantizeError> {
        let job = self.jobs.iter().find(|job| job.module() == module);
        job.ok_or_else(|| QuantizeError::Missing { name: module.into() })?.values()
    }

    fn write_student(&self, staged: &mut Staged, progress: Written<'_>) -> Result<Student, QuantizeError> {
        let rounded = staged.path().join("rounded");
        std::fs::create_dir(&rounded).map_err(|error| QuantizeError::Io { path: rounded.clone(), error })?;
        self.write_into(&rounded, &|_| None, progress)?;
        Ok(Student::Folder(rounded))
    }

    fn write(
        &self,
        staged: &mut Staged,
        learned: Learned<'_>,
        progress: Written<'_>,
    ) -> Result<Summary, QuantizeError> {
        self.write_into(staged.path(), learned, progress)
    }
}

/// Encodes all tensors, one after another, into files in `folder`.
fn write_tensors(
    jobs: &[Job],
    folder: &Path,
    learned: Learned<'_>,
    progress: Written<'_>,
) -> Result<Summary, QuantizeError> {
    let mut writer = safetensors::Writer::new();
    writer.metadata("format", "mlx");
    for job in jobs {
        for (name, dtype, shape) in job.components()? {
            let named = |error| QuantizeError::Write { name: name.clone(), error };
            writer.tensor(&name, dtype, &shape).map_err(named)?;
        }
    }
    let mut summary = Summary::default();
    let mut body = writer.begin(folder, SHARD_BYTES)?;
    for (done, job) in jobs.iter().enumerate() {
        let Tensor { name, shape, source, .. } = &job.tensor;
        let encoded = job.encode(learned(job.module())).map_err(|error| job.not_encoded(error))?;
        for component in &encoded.components {
            body.tensor(component)?;
        }
        let parameters = shape.iter().map(|&n| n as u64).product();
        let bytes = encoded.components.iter().map(|component| component.len() as u64).sum();
        summary.add(name, job.format.to_string(), parameters, bytes, encoded.loss);
        source.release();
        if progress(done + 1, jobs.len()).is_break() {
            return Err(QuantizeError::Interrupted);
        }
    }
    body.finish()?;
    Ok(summary)
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), QuantizeError> {
    let path = folder.join(name);
    // additional_chat_templates/ is a folder of its own.
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    made.and_then(|()| std::fs::write(&path, bytes)).map_err(|error| QuantizeError::Io { path, error })
}

/// True if a module chooses or weighs experts.
pub(crate) fn is_router(module: &str) -> bool {
    ["mlp.gate", "mlp.router", "feed_forward.gate", "router.layer", "shared_expert_gate"]
        .iter()
        .any(|name| module.ends_with(name))
}

/// The format of a tensor, with scales in `scales`; `None` for tensors that are not quantised.
fn wanted(
    tensor: &Tensor,
    (format, rules): (&MlxFormat, &[Rule]),
    types: &Types,
) -> Result<Option<Format>, QuantizeError> {
    let (Some(path), scales) = (types.module(tensor), types.of(tensor)) else { return Ok(None) };
    if let Some(rule) = Rule::find(rules, path) {
        let group_size = if format.mode == "affine" { format.group_size } else { ROUTER.1 };
        return rule.mlx(group_size, scales);
    }
    Ok(Some(match is_router(path) {
        true => Format::affine(ROUTER.0, ROUTER.1, scales)?,
        false => format.format(scales)?,
    }))
}

/// `format`, or affine in the largest groups that divide rows of `k` values; `None` if no groups
/// do.
fn fitting(format: Format, k: usize) -> Option<Format> {
    if k.is_multiple_of(format.block()) {
        return Some(format);
    }
    let Format::Affine { bits, scales, .. } = format else { return None };
    let smaller = [64, 32].into_iter().find(|&group_size| k.is_multiple_of(group_size))?;
    Format::affine(bits.into(), smaller, scales).ok()
}

/// The weights' type according to the configuration.
fn stored_dtype(config: &Value) -> Option<FloatType> {
    let text = config.get("text_config");
    let name = config.get("torch_dtype").or_else(|| config.get("dtype")).or_else(|| text?.get("dtype"));
    match name?.as_str()? {
        "float32" => Some(FloatType::F32),
        "float16" => Some(FloatType::F16),
        "bfloat16" => Some(FloatType::BF16),
        _ => None,
    }
}

/// The types of the new checkpoint's tensors.
struct Types {
    /// All of them, but for the decay rates and the routers' biases, as mlx-lm converts a Hugging
    /// Face checkpoint, and in one of a GGUF file. MLX's keep their own.
    all: Option<FloatType>,
    /// Scales and biases of what was quantised in a mode that does not say which type the weights
    /// had: the norms', since MLX computes in that type.
    scales: FloatType,
    /// The routers that are no linear layers in mlx-lm, so that they cannot be quantised: those
    /// that have the bias of their choice themselves.
    plain_routers: HashSet<String>,
}

/// The name of that bias.
const CHOICE: &str = ".e_score_correction_bias";

/// The weight of a router.
const ROUTER_WEIGHT: &str = ".mlp.gate.weight";

/// The tensors that keep their type.
const KEPT: [&str; 5] = ["A_log", CHOICE, ".expert_bias", "self_attn.dt_bias", "attention.dt_bias"];

/// The norm behind the last layer.
const LAST_NORMS: [&str; 3] = ["model.norm.weight", "model.embedding_norm.weight", "backbone.norm_f.weight"];

impl Types {
    fn new(computed: &Computed<'_>, config: &Value, tensors: &[Tensor]) -> Self {
        let configured = stored_dtype(config);
        let norm = tensors.iter().find_map(|tensor| match tensor.source.format {
            Format::Float(float) if LAST_NORMS.iter().any(|norm| tensor.name.ends_with(norm)) => Some(float),
            _ => None,
        });
        let all = configured.filter(|_| computed.checkpoint.layout() != Layout::Mlx);
        // Those of DeepSeek V2 have none, and are no linear layers, either.
        let own = if computed.architecture.conversion.latents.is_some() { ROUTER_WEIGHT } else { CHOICE };
        let parameter = own.rsplit_once('.').map_or(own, |(_, parameter)| parameter);
        let routers = tensors.iter().filter(|tensor| tensor.name.ends_with(own));
        let routers = routers.filter_map(|tensor| tensor.name.strip_suffix(parameter)?.strip_suffix('.'));
        let plain_routers = routers.map(str::to_string).collect();
        Self { all, scales: all.or(norm).or(configured).unwrap_or(FloatType::BF16), plain_routers }
    }

    /// The path of the module whose weight this tensor is, if it is a matrix of a product.
    fn module<'t>(&self, tensor: &'t Tensor) -> Option<&'t str> {
        let path = tensor.name.strip_suffix(".weight").filter(|path| !mlx::is_convolution(path))?;
        (tensor.shape.len() > 1 && !self.plain_routers.contains(path)).then_some(path)
    }

    /// That of `tensor`, or of its scales.
    fn of(&self, tensor: &Tensor) -> FloatType {
        match tensor.source.format {
            Format::Float(own) if KEPT.iter().any(|name| tensor.name.ends_with(name)) => own,
            Format::Float(own) => self.all.unwrap_or(own),
            Format::Affine { scales, .. } => scales,
            _ => self.scales,
        }
    }
}

/// A tensor of the new checkpoint, and how it gets there.
pub(crate) struct Job {
    tensor: Tensor,
    dtype: FloatType,
    format: Format,
}

impl Job {
    fn new(
        mut tensor: Tensor,
        types: &Types,
        wanted: (&MlxFormat, &[Rule]),
        fallbacks: &mut Vec<Fallback>,
    ) -> Result<Self, QuantizeError> {
        let dtype = types.of(&tensor);
        // The values of a quantised weight are what its format decodes to in f32: that is what the
        // model computes with.
        if let Format::Float(own) = tensor.source.format {
            // mlx-lm adds in the stored type, before it converts.
            (tensor.change.sum, tensor.change.rounded) = (own, dtype);
        }
        // GGML's blocks are not in MLX's layout.
        let as_it_is = match tensor.source.format {
            // Nor are small floats with a float as scale.
            Format::Fp8 { .. } | Format::Fp4 => Format::Float(dtype),
            format if format.ggml_type().is_some() => Format::Float(dtype),
            _ => tensor.source.format.with_float(dtype),
        };
        let format = match self::wanted(&tensor, wanted, types)? {
            None => as_it_is,
            Some(wanted) => {
                let taken = fitting(wanted, tensor.k()).unwrap_or(as_it_is);
                if taken != wanted {
                    let (name, k) = (tensor.name.clone(), tensor.k());
                    fallbacks.push(Fallback { tensor: name, k, wanted, taken });
                }
                taken
            }
        };
        // Of mlx-lm's layers those of experts have a scale per matrix.
        if (format, tensor.source.format, tensor.shape.len()) == (Format::Nvfp4, Format::Fp4, 3) {
            tensor.change.divisors = Some(Divisors::default());
        }
        Ok(Self { tensor, dtype, format })
    }

    /// Rounded to nearest, or what `learned` has.
    fn encode(&self, learned: Option<Vec<Vec<u8>>>) -> Result<Encoded, QuantizeError> {
        let mut encoded = match learned {
            None => self.tensor.encode(self.format),
            Some(learned) => self.tensor.encoded(self.format, learned),
        }?;
        let divisors = self.tensor.divisors()?;
        if !divisors.is_empty() {
            let global = divisors.iter().map(|&divisor| nvfp4::global_scale(divisor));
            encoded.components.push(global.flat_map(f32::to_le_bytes).collect());
        }
        Ok(encoded)
    }

    /// Rounded to nearest in another format.
    pub(crate) fn encode_as(&self, format: Format) -> Result<Encoded, QuantizeError> {
        self.tensor.encode(format).map_err(|error| self.not_encoded(error))
    }

    /// The error, with the rule that leaves the tensor as it is.
    fn not_encoded(&self, error: QuantizeError) -> QuantizeError {
        error.with_rule(|| self.is_quantised().then(|| format!("{}=none", self.module())))
    }

    /// Its storage.
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// The length of a row.
    pub(crate) fn k(&self) -> usize {
        self.tensor.k()
    }

    /// Rows of all matrices.
    pub(crate) fn rows(&self) -> usize {
        self.tensor.rows()
    }

    /// All values, before they are rounded.
    pub(crate) fn values(&self) -> Result<Vec<f32>, QuantizeError> {
        self.tensor.all_values()
    }

    pub(crate) fn is_quantised(&self) -> bool {
        !matches!(self.format, Format::Float(_))
    }

    /// The module's entry in the configuration, if it is quantised otherwise than most. As mlx-lm
    /// does it, routers have one in any case.
    fn quantization(&self, format: &MlxFormat) -> Option<(String, Value)> {
        let usual = format.format(self.dtype).ok();
        let global = global_scales(&self.tensor) > 0;
        if !self.is_quantised() || usual == Some(self.format) && !is_router(self.module()) && !global {
            return None;
        }
        let mut entry = json!({ "group_size": self.format.block(), "bits": self.format.scheme().bits });
        if !matches!(self.format, Format::Affine { .. }) {
            entry["mode"] = self.format.to_string().into();
        }
        if global {
            entry["global_scale"] = true.into();
        }
        Some((self.module().to_string(), entry))
    }

    /// The path of the module that the tensor is the weight of.
    pub(crate) fn module(&self) -> &str {
        self.tensor.name.strip_suffix(".weight").unwrap_or(&self.tensor.name)
    }

    /// Name, type and shape of what is written.
    fn components(&self) -> Result<Vec<(String, DType, Vec<usize>)>, QuantizeError> {
        if !self.is_quantised() {
            return Ok(vec![(self.tensor.name.clone(), self.dtype.dtype(), self.tensor.shape.clone())]);
        }
        let (&k, rows) = self.tensor.shape.split_last().expect("a module's weight is a matrix");
        let component = |component: &Component| {
            let name = format!("{}.{}", self.module(), component.name);
            (name, component.dtype, [rows, &[component.columns]].concat())
        };
        let mut components: Vec<_> = self.format.components(k)?.iter().map(component).collect();
        let global = global_scales(&self.tensor);
        if global > 0 {
            components.push((format!("{}{GLOBAL_SCALE}", self.module()), DType::F32, vec![global]));
        }
        Ok(components)
    }
}

/// The tensor of a number per matrix, by which MLX multiplies.
const GLOBAL_SCALE: &str = ".global_scale";

/// The number of a tensor's matrices, if they are multiplied by a number each.
fn global_scales(tensor: &Tensor) -> usize {
    tensor.change.divisors.as_ref().map_or(0, |_| tensor.matrices())
}

/// `config.json` with the quantisation, under both keys that readers look for.
fn config(mut config: Value, format: &MlxFormat, overrides: Map<String, Value>) -> Value {
    let MlxFormat { mode, bits, group_size } = format;
    let mut quantization = json!({ "group_size": group_size, "bits": bits, "mode": mode });
    if let (Some(quantization), Some(config)) = (quantization.as_object_mut(), config.as_object_mut()) {
        quantization.extend(overrides);
        // The place of the old one in a multimodal configuration.
        if let Some(text) = config.get_mut("text_config").and_then(Value::as_object_mut) {
            text.remove("quantization_config");
        }
        for key in ["quantization", "quantization_config"] {
            config.insert(key.into(), Value::Object(quantization.clone()));
        }
    }
    config
}
