//! GGUF files with the types that `llama-quantize` gives them.

mod convert;
mod metadata;
mod mix;

pub use mix::Mix;

use crate::source::Source;
use crate::tensor::{Change, Loss, Tensor};
use crate::{Fallback, QuantizeError, Rule, Summary, output_path};
use lowbit_files::gguf::{Metadata, Value, Writer};
use lowbit_files::staging::{Existing, Staged};
use lowbit_files::{Checkpoint, Stored, TensorView, Tokenizer};
use lowbit_formats::{FloatType, Format};
use lowbit_models::Config;
use lowbit_models::arch::{self, Architecture};
use mix::{Facts, Part, Place};
use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;

/// What GGUF file to make.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GgufOptions {
    /// Which types its tensors get.
    pub mix: Mix,
    /// Tensors that get other types.
    pub rules: Vec<Rule>,
    /// Whether a file that has the output's name already is replaced.
    pub replace: bool,
}

impl GgufOptions {
    /// A file of this mix, which replaces nothing.
    pub fn new(mix: Mix) -> Self {
        Self { mix, rules: vec![], replace: false }
    }

    /// With other types for some tensors, as `llama-quantize --tensor-type` has it.
    #[must_use]
    pub fn with_rules(self, rules: Vec<Rule>) -> Self {
        Self { rules, ..self }
    }

    /// Whether a file that has the output's name already is replaced.
    #[must_use]
    pub fn with_replace(self, replace: bool) -> Self {
        Self { replace, ..self }
    }
}

/// The version of GGML's block types, in `general.quantization_version`.
const QUANTIZATION_VERSION: u32 = 2;
const FILE_TYPE: &str = "general.file_type";
const VERSION: &str = "general.quantization_version";

/// Quantises `checkpoint`, round-to-nearest without an importance matrix, into the new GGUF file `output`. Types and
/// bytes of all tensors are those that `llama-quantize` writes (llama.cpp of llama-cpp-python 0.3.36), of a directory those
/// that it writes after `convert_hf_to_gguf.py --no-mtp`. A checkpoint that is quantised already is decoded first.
///
/// `progress` and the output's name are as in [`quantize`](crate::quantize()), but that the output is a file.
///
/// # Errors
/// [`QuantizeError`]: an output that exists or may not be replaced, an architecture that is not supported, a tensor that
/// cannot be encoded because of NaN or infinity, say.
pub fn quantize_to_gguf(
    checkpoint: &Checkpoint,
    output: &Path,
    options: &GgufOptions,
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Summary, QuantizeError> {
    output_path::check(checkpoint.path(), output, options.replace)?;
    let files: BTreeSet<_> = checkpoint.tensors().iter().map(|view| &view.file).collect();
    files.into_iter().try_for_each(|file| output_path::check(file, output, options.replace))?;
    let config = Config::new(checkpoint)?;
    let architecture = arch::find(&config)?;
    let (planned, converted);
    let metadata = match checkpoint.metadata() {
        Some(metadata) => {
            planned = carried_over(checkpoint)?;
            metadata
        }
        None => {
            config.check()?;
            (planned, converted) = from_directory(checkpoint, &config, architecture)?;
            &converted
        }
    };
    let (jobs, fallbacks) = choose(planned, metadata, options)?;
    let mut writer = Writer::new();
    for (key, value) in entries(metadata, &options.mix) {
        writer.entry(&key, value)?;
    }
    let existing = if options.replace { Existing::Replace } else { Existing::Refuse };
    let mut staged = Staged::file(output, existing)?;
    let summary = Summary { fallbacks, ..write(&jobs, writer, &mut staged, &mut progress)? };
    staged.sync()?;
    if progress(jobs.len(), jobs.len()).is_break() {
        return Err(QuantizeError::Interrupted);
    }
    staged.commit()?;
    Ok(summary)
}

/// A tensor of the new file.
enum Job {
    /// As it is in the old one.
    Copy(TensorView),
    Encode(Tensor, Format),
}

impl Job {
    fn name(&self) -> &str {
        match self {
            Self::Copy(view) => &view.name,
            Self::Encode(tensor, _) => &tensor.name,
        }
    }

    /// How it is stored, and its shape without leading dimensions of 1, which ggml does not count.
    fn description(&self) -> (Stored, &[usize]) {
        let (stored, shape) = match self {
            Self::Copy(view) => (view.stored, &view.shape),
            Self::Encode(tensor, Format::Float(float)) => (Stored::Plain(float.dtype()), &tensor.shape),
            Self::Encode(tensor, format) => (Stored::Blocks(*format), &tensor.shape),
        };
        let ones = shape.iter().take_while(|&&n| n == 1).count();
        (stored, &shape[ones.min(shape.len().saturating_sub(1))..])
    }
}

/// A GGUF file's own tensors.
fn carried_over(checkpoint: &Checkpoint) -> Result<Vec<Planned>, QuantizeError> {
    let planned = |view: &TensorView| match view.stored {
        Stored::Plain(dtype) if FloatType::from_dtype(dtype).is_none() => {
            Ok::<_, QuantizeError>(Planned::Integers(view.clone()))
        }
        _ => {
            let (name, shape) = (view.name.clone(), view.shape.clone());
            let tensor = Tensor { name, shape, source: Source::new(view)?, change: Change::default() };
            Ok(Planned::Values(tensor, Some(view.clone())))
        }
    };
    let mut planned = checkpoint.tensors().iter().map(planned).collect::<Result<Vec<_>, _>>()?;
    sort(&mut planned);
    Ok(planned)
}

/// A directory's tensors and metadata, its tokenizer's among them.
fn from_directory(
    checkpoint: &Checkpoint,
    config: &Config<'_>,
    architecture: &Architecture,
) -> Result<(Vec<Planned>, Metadata), QuantizeError> {
    let planned = convert::tensors(checkpoint, config, architecture)?;
    let mut metadata = metadata::metadata(checkpoint, config, architecture, &planned)?;
    let (vocab_size, hidden_size) = (config.size("vocab_size", "")?, config.size("hidden_size", "")?);
    let embedding =
        planned.iter().map(Planned::name_and_shape).find(|(name, _)| *name == "token_embd.weight");
    if let Some((_, shape)) = embedding.filter(|(_, shape)| *shape != [vocab_size, hidden_size]) {
        let (got, want) = (format!("[{vocab_size}, {hidden_size}]"), format!("the embedding is {shape:?}"));
        return Err(config.refuse("[vocab_size, hidden_size]", &got, &want).into());
    }
    for (key, value) in Tokenizer::gguf_entries(checkpoint, vocab_size)? {
        metadata.insert(key, value)?;
    }
    Ok((planned, metadata))
}

/// A tensor before its type is chosen.
enum Planned {
    /// Not a weight.
    Integers(TensorView),
    /// With what is copied, if it keeps its type.
    Values(Tensor, Option<TensorView>),
}

impl Planned {
    fn name_and_shape(&self) -> (&str, &[usize]) {
        match self {
            Self::Integers(view) => (&view.name, &view.shape),
            Self::Values(tensor, _) => (&tensor.name, &tensor.shape),
        }
    }
}

/// Sorts as `llama-quantize` does: what is outside of layers first, then by layer, then by name.
fn sort(planned: &mut [Planned]) {
    planned.sort_by(|one, other| {
        let key = |planned: &Planned| layer(planned.name_and_shape().0);
        let names = || one.name_and_shape().0.cmp(other.name_and_shape().0);
        key(one).cmp(&key(other)).then_with(names)
    });
}

/// The layer of a tensor `blk.N.`.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// The type of each tensor.
fn choose(
    planned: Vec<Planned>,
    metadata: &Metadata,
    GgufOptions { mix, rules, .. }: &GgufOptions,
) -> Result<(Vec<Job>, Vec<Fallback>), QuantizeError> {
    let facts = facts(metadata, planned.iter().map(|planned| planned.name_and_shape().0))?;
    let quantised =
        planned.iter().map(Planned::name_and_shape).filter(|(name, shape)| is_quantised(name, shape));
    Rule::check(rules, quantised.map(|(name, _)| name))?;
    let (mut values, mut downs, mut fallbacks) = (0, 0, vec![]);
    let next = |count: &mut usize| std::mem::replace(count, *count + 1);
    let mut choose = |tensor: &Tensor, is_gguf: bool| {
        if !is_quantised(&tensor.name, &tensor.shape) {
            return Ok(if is_gguf { tensor.source.format } else { convert::unquantised(tensor) });
        }
        let rule = Rule::find(rules, &tensor.name);
        let part = Part::of(&tensor.name);
        let index = match part {
            // Tensors with a rule do not count.
            _ if rule.is_some() => 0,
            Part::Value => next(&mut values),
            // Of several down projections in a layer, all have the layer's number.
            Part::Down if facts.experts > 1 => layer(&tensor.name).unwrap_or(0),
            Part::Down => next(&mut downs),
            _ => 0,
        };
        let stacked = tensor.shape.len() > 2 && tensor.shape[tensor.shape.len() - 3] > 1;
        let place = Place { part, index, stacked, k: tensor.k() };
        let wanted = match rule {
            Some(rule) => rule.ggml()?,
            None => mix.format(place, &facts),
        };
        let taken = mix::fitting(wanted, place.k);
        if taken != wanted {
            fallbacks.push(Fallback { tensor: tensor.name.clone(), k: place.k, wanted, taken });
        }
        Ok::<_, QuantizeError>(taken)
    };
    let mut jobs = vec![];
    for planned in planned {
        jobs.push(match planned {
            Planned::Integers(view) => Job::Copy(view),
            Planned::Values(tensor, view) => match (choose(&tensor, view.is_some())?, view) {
                (format, Some(view)) if format == tensor.source.format => Job::Copy(view),
                (format, _) => Job::Encode(tensor, format),
            },
        });
    }
    Ok((jobs, fallbacks))
}

/// Whether a tensor is quantised at all: matrices, but not norms, routers and convolutions.
///
/// Source: `tensor_allows_quantization`, llama.cpp `src/llama-quant.cpp`.
fn is_quantised(name: &str, shape: &[usize]) -> bool {
    let dimensions = shape.iter().skip_while(|&&n| n == 1).count();
    let kept = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d"];
    dimensions >= 2 && name.ends_with("weight") && !kept.iter().any(|part| name.contains(part))
}

fn facts<'a>(metadata: &Metadata, names: impl Iterator<Item = &'a str>) -> Result<Facts, QuantizeError> {
    let architecture: &str = metadata.get("general.architecture")?;
    let size = |key: &str| metadata.find::<usize>(&format!("{architecture}.{key}"));
    let layers = size("block_count")?.unwrap_or(0);
    let heads = size("attention.head_count")?.unwrap_or(0);
    let key_heads = size("attention.head_count_kv")?.unwrap_or(heads);
    let (mut values, mut tied) = (0, true);
    for name in names {
        values += usize::from(Part::of(name) == Part::Value);
        tied &= Part::of(name) != Part::Output;
    }
    Ok(Facts {
        layers,
        experts: size("expert_count")?.unwrap_or(0),
        heads_per_key: heads.checked_div(key_heads).unwrap_or(0),
        values,
        tied,
        is_70b: architecture == "llama" && layers == 80 && heads != key_heads,
    })
}

/// The new file's metadata: the old one's, with the new types at the end.
fn entries(metadata: &Metadata, mix: &Mix) -> impl Iterator<Item = (String, Value)> {
    let carried = metadata.iter().filter(|(key, _)| {
        ![FILE_TYPE, VERSION, "split.no", "split.count", "split.tensors.count"].contains(key)
    });
    let new = [(VERSION, QUANTIZATION_VERSION), (FILE_TYPE, mix.file_type)];
    let new = new.map(|(key, value)| (key.to_string(), Value::U32(value)));
    carried.map(|(key, value)| (key.to_string(), value.clone())).chain(new)
}

/// Encodes all tensors, one after another, into the file.
fn write(
    jobs: &[Job],
    mut writer: Writer,
    staged: &mut Staged,
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Summary, QuantizeError> {
    for job in jobs {
        let (stored, shape) = job.description();
        writer.tensor(job.name(), stored, shape)?;
    }
    let path = staged.path().to_path_buf();
    let failed = |error| QuantizeError::Io { path: path.clone(), error };
    let mut summary = Summary::default();
    let mut body = writer.begin(BufWriter::new(staged.file_handle())).map_err(failed)?;
    for (done, job) in jobs.iter().enumerate() {
        let (stored, shape) = job.description();
        let (encoded, loss);
        let bytes: &[u8] = match job {
            Job::Copy(view) => {
                loss = Loss::default();
                &view.bytes
            }
            Job::Encode(tensor, format) => {
                let named = |error| QuantizeError::Encode { name: tensor.name.clone(), error };
                encoded = tensor.encode(*format, FloatType::F32).map_err(named)?;
                loss = encoded.loss;
                encoded.components.first().map_or(&[], Vec::as_slice)
            }
        };
        body.tensor(bytes).map_err(failed)?;
        let parameters = shape.iter().map(|&n| n as u64).product();
        summary.add(job.name(), stored.to_string(), parameters, bytes.len() as u64, loss);
        match job {
            Job::Copy(view) => view.release(),
            Job::Encode(tensor, _) => tensor.source.release(),
        }
        if progress(done + 1, jobs.len()).is_break() {
            return Err(QuantizeError::Interrupted);
        }
    }
    body.finish().map_err(failed)?.flush().map_err(failed)?;
    Ok(summary)
}
