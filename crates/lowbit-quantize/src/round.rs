use crate::mlx::{Target, targets};
use crate::{QuantizeError, output_path};
use lowbit_files::staging::{Existing, Staged};
use lowbit_files::{Checkpoint, Layout, Stored, safetensors};
use lowbit_formats::{Component, DType, FloatType, Format, FormatError};
use serde_json::{Map, Value, json};
use std::ops::ControlFlow;
use std::path::Path;

/// What to quantise to, round-to-nearest.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct QuantizeOptions {
    /// `affine`, `mxfp4`, `mxfp8` or `nvfp4`, as `mx.quantize` names its modes.
    pub mode: String,
    /// Bits per code.
    pub bits: usize,
    /// Values that share a scale.
    pub group_size: usize,
    /// Whether a checkpoint that has the output's name already is replaced.
    pub replace: bool,
}

impl QuantizeOptions {
    /// To `bits` bits per code in groups of `group_size`, with one of [`Self::mode`]'s names. [`quantize`] refuses numbers
    /// that the mode does not have.
    pub fn new(mode: impl Into<String>, bits: usize, group_size: usize) -> Self {
        Self { mode: mode.into(), bits, group_size, replace: false }
    }

    /// With the bits and the group size that MLX takes for `mode` where none are given.
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

    /// Whether a checkpoint that has the output's name already is replaced.
    #[must_use]
    pub fn with_replace(self, replace: bool) -> Self {
        Self { replace, ..self }
    }
}

impl Default for QuantizeOptions {
    /// `affine` at 4 bits in groups of 64.
    fn default() -> Self {
        Self::for_mode("affine")
    }
}

/// What quantising made.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// Values in all tensors.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Bits and group size of routers and shared-expert gates: they are small, and choosing a wrong expert costs most.
const ROUTER: (usize, usize) = (8, 64);

/// A file of a sharded checkpoint holds at most this many bytes, as mlx-lm has it.
const SHARD_BYTES: u64 = 5 << 30;

/// Quantises `checkpoint`, a Hugging Face one in f32, f16 or bf16, round-to-nearest into a new directory `output` in
/// MLX's layout: codes, scales and biases equal those of `mlx_lm convert -q` (mlx-lm 0.32, MLX's CPU backend) bit
/// for bit. `progress` is called with the number of tensors done and of all tensors after each one, and
/// once more when everything is on the disk; returning `Break` stops.
///
/// The directory is [`Staged`]: it gets its name once all of it is on the disk. If this ends earlier, for whatever
/// reason, nothing has that name, or what was to be replaced still has it.
///
/// # Errors
/// [`QuantizeError`]: an output that exists or may not be replaced, a checkpoint of another kind, files beside it that
/// may not be copied ([`Checkpoint::companions`]), a tensor that cannot be encoded because of NaN or infinity, say.
pub fn quantize(
    checkpoint: &Checkpoint,
    output: &Path,
    options: &QuantizeOptions,
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Summary, QuantizeError> {
    // Checked before anything is written.
    Format::from_mlx(&options.mode, options.bits, options.group_size, FloatType::BF16)?;
    let found = match checkpoint.layout() {
        Layout::HuggingFace => None,
        Layout::Mlx => Some("MLX"),
        Layout::Gguf => Some("GGUF"),
    };
    if let Some(found) = found {
        return Err(QuantizeError::Layout { path: checkpoint.path().to_path_buf(), found });
    }
    output_path::check(checkpoint.path(), output, options.replace)?;
    let dtype = stored_dtype(checkpoint.config()?);
    let companions = checkpoint.companions()?;
    let jobs = targets(checkpoint)?;
    let jobs =
        jobs.into_iter().map(|target| Job::new(target, dtype, options)).collect::<Result<Vec<_>, _>>()?;
    let existing = if options.replace { Existing::Replace } else { Existing::Refuse };
    let staged = Staged::directory(output, existing)?;
    let summary = write_tensors(&jobs, staged.path(), &mut progress)?;
    let routers = jobs.iter().filter(|job| job.choice == Some(Choice::Router));
    let overrides =
        routers.map(|job| (job.module().to_string(), json!({ "group_size": ROUTER.1, "bits": ROUTER.0 })));
    write(staged.path(), "config.json", config(checkpoint, options, overrides.collect())?.as_bytes())?;
    for companion in companions {
        write(staged.path(), companion.name, &companion.bytes)?;
    }
    staged.sync()?;
    if progress(jobs.len(), jobs.len()).is_break() {
        return Err(QuantizeError::Interrupted);
    }
    staged.commit()?;
    Ok(summary)
}

/// Encodes all tensors, one after another, into files in `folder`.
fn write_tensors(
    jobs: &[Job],
    folder: &Path,
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Summary, QuantizeError> {
    let mut writer = safetensors::Writer::new();
    writer.metadata("format", "mlx");
    let (mut bytes, mut parameters) = (0, 0);
    for job in jobs {
        parameters += job.target.shape.iter().map(|&n| n as u64).product::<u64>();
        for (name, dtype, shape) in job.components()? {
            let named = |error| QuantizeError::Write { name: name.clone(), error };
            bytes += writer.tensor(&name, dtype, &shape).map_err(named)? as u64;
        }
    }
    let mut body = writer.begin(folder, SHARD_BYTES)?;
    for (done, job) in jobs.iter().enumerate() {
        for component in job.encode()? {
            body.tensor(&component)?;
        }
        if progress(done + 1, jobs.len()).is_break() {
            return Err(QuantizeError::Interrupted);
        }
    }
    body.finish()?;
    Ok(Summary { parameters, bytes })
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), QuantizeError> {
    let path = folder.join(name);
    std::fs::write(&path, bytes).map_err(|error| QuantizeError::Io { path, error })
}

/// How a module is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    Default,
    Router,
}

impl Choice {
    fn format(self, options: &QuantizeOptions, scales: FloatType) -> Result<Format, QuantizeError> {
        Ok(match self {
            Self::Default => Format::from_mlx(&options.mode, options.bits, options.group_size, scales)?,
            Self::Router => Format::affine(ROUTER.0, ROUTER.1, scales)?,
        })
    }
}

/// How a tensor is quantised; `None` for what stays as it is.
fn choose(target: &Target, options: &QuantizeOptions) -> Option<Choice> {
    let path = target.name.strip_suffix(".weight")?;
    let &[.., _, k] = &target.shape[..] else { return None };
    if path.ends_with("conv1d") || !k.is_multiple_of(options.group_size) {
        return None;
    }
    match path.ends_with("mlp.gate") || path.ends_with("shared_expert_gate") {
        true => k.is_multiple_of(ROUTER.1).then_some(Choice::Router),
        false => Some(Choice::Default),
    }
}

/// The type that the configuration says the weights have.
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

/// A tensor of the new checkpoint, and how it gets there.
struct Job {
    target: Target,
    stored: FloatType,
    dtype: FloatType,
    choice: Option<Choice>,
    format: Format,
}

impl Job {
    /// `wanted` is the type of all written tensors except the decay rates, as in mlx-lm.
    fn new(
        target: Target,
        wanted: Option<FloatType>,
        options: &QuantizeOptions,
    ) -> Result<Self, QuantizeError> {
        let (first, _) =
            target.pieces.first().ok_or_else(|| QuantizeError::Missing { name: target.name.clone() })?;
        let stored = match first.stored {
            Stored::Plain(dtype) => FloatType::from_dtype(dtype),
            Stored::Blocks(_) => None,
        };
        let refuse = || QuantizeError::Type { name: first.name.clone(), stored: first.stored.to_string() };
        let stored = stored.ok_or_else(refuse)?;
        let dtype = if target.name.ends_with("A_log") { stored } else { wanted.unwrap_or(stored) };
        let choice = choose(&target, options);
        let format = choice.map_or(Ok(Format::Float(dtype)), |choice| choice.format(options, dtype))?;
        Ok(Self { target, stored, dtype, choice, format })
    }

    /// The path of the module that the tensor is the weight of.
    fn module(&self) -> &str {
        self.target.name.strip_suffix(".weight").unwrap_or(&self.target.name)
    }

    /// Name, type and shape of what is written.
    fn components(&self) -> Result<Vec<(String, DType, Vec<usize>)>, QuantizeError> {
        if self.choice.is_none() {
            return Ok(vec![(self.target.name.clone(), self.dtype.dtype(), self.target.shape.clone())]);
        }
        let (&k, rows) = self.target.shape.split_last().expect("a module's weight is a matrix");
        let component = |component: &Component| {
            let name = format!("{}.{}", self.module(), component.name);
            (name, component.dtype, [rows, &[component.columns]].concat())
        };
        Ok(self.format.components(k)?.iter().map(component).collect())
    }

    /// The components' bytes, encoded row by row on all cores.
    fn encode(&self) -> Result<Vec<Vec<u8>>, QuantizeError> {
        let values = self.values();
        let k =
            if self.choice.is_some() { self.target.shape.last().copied().unwrap_or(1) } else { values.len() };
        let rows = values.len().checked_div(k).unwrap_or(0);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let run = rows.div_ceil(threads).max(1) * k.max(1);
        let encode = |(part, values): (usize, &[f32])| {
            self.format.encode_from(self.dtype, values, k).map_err(|error| match error {
                FormatError::NotFinite { format, index, value } => {
                    FormatError::NotFinite { format, index: part * run + index, value }
                }
                error => error,
            })
        };
        let encoded: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> =
                values.chunks(run).enumerate().map(|part| scope.spawn(move || encode(part))).collect();
            workers.into_iter().map(|worker| worker.join().expect("encoders do not panic")).collect()
        });
        let named = |error| QuantizeError::Encode { name: self.target.name.clone(), error };
        let encoded = encoded.into_iter().collect::<Result<Vec<_>, _>>().map_err(named)?;
        let component = |index: usize| encoded.iter().flat_map(|parts| &parts[index]).copied().collect();
        Ok((0..self.components()?.len()).map(component).collect())
    }

    /// The values, rounded to their new type.
    fn values(&self) -> Vec<f32> {
        let Self { target, stored, dtype, .. } = self;
        let one = if target.add_one { 1.0 } else { 0.0 };
        let mut values = vec![];
        for (view, range) in &target.pieces {
            let bytes = &view.bytes[range.clone()];
            // mlx-lm adds in the stored type, before it converts.
            let value = |i| dtype.round(stored.round(stored.get(bytes, i) + one));
            values.extend((0..bytes.len() / stored.size()).map(value));
        }
        values
    }
}

/// `config.json` with the quantisation, under both keys that readers look for.
fn config(
    checkpoint: &Checkpoint,
    options: &QuantizeOptions,
    overrides: Map<String, Value>,
) -> Result<String, QuantizeError> {
    let mut config = checkpoint.config()?.clone();
    let QuantizeOptions { mode, bits, group_size, .. } = options;
    let mut quantization = json!({ "group_size": group_size, "bits": bits, "mode": mode });
    if let (Some(quantization), Some(config)) = (quantization.as_object_mut(), config.as_object_mut()) {
        quantization.extend(overrides);
        for key in ["quantization", "quantization_config"] {
            config.insert(key.into(), Value::Object(quantization.clone()));
        }
    }
    Ok(serde_json::to_string_pretty(&config).expect("JSON values can be written"))
}
