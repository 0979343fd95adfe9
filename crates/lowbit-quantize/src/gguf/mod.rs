//! GGUF files with the types that `llama-quantize` gives them.

mod convert;
mod metadata;
mod mix;
mod title;

pub use mix::Mix;

use crate::computed::Computed;
use crate::left_out::extras;
use crate::nvfp4::{self, Divisors};
use crate::planned::{self, Asked, Learned, Student, Written};
use crate::source::Source;
use crate::tensor::{Change, Encoded, Loss, Tensor};
use crate::{Fallback, QuantizeError, Rule, Summary, latents, mlx, output_path};
use bytes::Bytes;
use lowbit_files::gguf::{Metadata, Value, Writer};
use lowbit_files::staging::{Content, Existing, Staged};
use lowbit_files::{
    Checkpoint, DenseModule, Layout, Stored, TensorView, Tokenizer, Unwritten, UnwrittenTensor,
};
use lowbit_formats::{DType, FloatType, Format};
use lowbit_models::Config;
use lowbit_models::arch::{self, Extra};
use mix::{Facts, Part, Place};
use std::collections::HashSet;
use std::io::{BufWriter, Seek, Write};
use std::path::Path;

/// The version of GGML's block types, in `general.quantization_version`.
const QUANTIZATION_VERSION: u32 = 2;
const FILE_TYPE: &str = "general.file_type";
const VERSION: &str = "general.quantization_version";

/// A new file, before it is written.
pub(crate) struct Plan {
    mix: Mix,
    replace: bool,
    metadata: Metadata,
    jobs: Vec<Job>,
    fallbacks: Vec<Fallback>,
    warnings: Vec<String>,
}

impl Plan {
    /// Checks everything before anything is written.
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        output: &Path,
        mix: &Mix,
        Asked { rules, replace }: &Asked,
    ) -> Result<Self, QuantizeError> {
        let (mix, replace) = (*mix, *replace);
        output_path::check_all(checkpoint, output, replace)?;
        if let Some(metadata) = checkpoint.metadata() {
            // Its settings stay as they are.
            arch::find(&Config::new(checkpoint)?)?;
            let (jobs, fallbacks) = choose(carried_over(checkpoint)?, metadata, (&mix, rules))?;
            return Ok(Self { mix, replace, metadata: metadata.clone(), jobs, fallbacks, warnings: vec![] });
        }
        let computed = Computed::new(checkpoint)?;
        let Converted { tensors, metadata, warnings } = from_directory(&computed)?;
        let (jobs, fallbacks) = choose(tensors, &metadata, (&mix, rules))?;
        let plan = Self { mix, replace, metadata, jobs, fallbacks, warnings };
        let description = Unwritten::Gguf(plan.metadata.clone());
        let unwritten = plan.jobs.iter().map(Job::unwritten).collect::<Result<_, _>>()?;
        computed.check_new(output, "a GGUF file", description, unwritten)?;
        Ok(plan)
    }

    fn existing(&self) -> Existing {
        output_path::existing(self.replace, Content::GGUF)
    }
}

impl planned::Planned for Plan {
    fn tensors(&self) -> usize {
        self.jobs.len()
    }

    fn summary(&self) -> Result<Summary, QuantizeError> {
        let (fallbacks, warnings) = (self.fallbacks.clone(), self.warnings.clone());
        let mut summary = Summary { fallbacks, warnings, ..Summary::default() };
        for job in &self.jobs {
            let (stored, shape) = job.description();
            let bytes = match job {
                Job::Copy(view) => view.bytes.len() as u64,
                Job::Encode(tensor, format) => tensor.size_in(*format)?,
                Job::Divisors { shape: [matrices], .. } => *matrices as u64 * 4,
            };
            let parameters = shape.iter().map(|&n| n as u64).product();
            summary.add(job.name(), stored.to_string(), parameters, bytes, Loss::default());
        }
        Ok(summary)
    }

    fn check_place(&self, output: &Path) -> Result<(), QuantizeError> {
        Ok(Staged::check_file(output, self.existing())?)
    }

    fn stage(&self, output: &Path) -> Result<Staged, QuantizeError> {
        Ok(Staged::file(output, self.existing())?)
    }

    fn values(&self, module: &str) -> Result<Vec<f32>, QuantizeError> {
        let job = self.jobs.iter().find(|job| job.module() == module);
        job.ok_or_else(|| QuantizeError::Missing { name: module.into() })?.values()
    }

    fn write_student(&self, staged: &mut Staged, progress: Written<'_>) -> Result<Student, QuantizeError> {
        self.write(staged, &|_| None, progress)?;
        Ok(Student::File(staged.path().into()))
    }

    /// In place of what was written before.
    fn write(
        &self,
        staged: &mut Staged,
        learned: Learned<'_>,
        progress: Written<'_>,
    ) -> Result<Summary, QuantizeError> {
        let mut writer = Writer::new();
        for (key, value) in entries(&self.metadata, &self.mix) {
            writer.entry(&key, value)?;
        }
        let summary = write(&self.jobs, writer, staged, learned, progress)?;
        let (fallbacks, warnings) = (self.fallbacks.clone(), self.warnings.clone());
        Ok(Summary { fallbacks, warnings, ..summary })
    }
}

/// A tensor of the new file.
enum Job {
    /// As it is in the old one.
    Copy(TensorView),
    Encode(Tensor, Format),
    /// The numbers by which the matrices of `tensor` are divided, under a name of their own.
    Divisors {
        name: String,
        tensor: Tensor,
        shape: [usize; 1],
    },
}

impl Job {
    /// A tensor in `format`, after the numbers by which it is divided.
    fn encode_divided(mut tensor: Tensor, format: Format) -> [Self; 2] {
        tensor.change.divisors = Some(Divisors::default());
        let (name, shape) = (nvfp4::float_of(&tensor.name), [tensor.matrices()]);
        [Self::Divisors { name, tensor: tensor.clone(), shape }, Self::Encode(tensor, format)]
    }

    fn name(&self) -> &str {
        match self {
            Self::Copy(view) => &view.name,
            Self::Encode(tensor, _) => &tensor.name,
            Self::Divisors { name, .. } => name,
        }
    }

    /// The path of the module that the tensor is the weight of.
    fn module(&self) -> &str {
        self.name().strip_suffix(".weight").unwrap_or(self.name())
    }

    /// All values, before they are rounded.
    fn values(&self) -> Result<Vec<f32>, QuantizeError> {
        match self {
            Self::Copy(view) => unchanged(view)?.all_values(),
            Self::Encode(tensor, _) => tensor.all_values(),
            Self::Divisors { tensor, .. } => Ok(tensor.divisors()?.to_vec()),
        }
    }

    /// Its bytes, and what they lost: as it is in the old file, rounded to nearest, or what
    /// `learned` has.
    fn encode(&self, learned: Option<Vec<Vec<u8>>>) -> Result<(Bytes, Loss), QuantizeError> {
        let encoded = match (self, learned) {
            (Self::Copy(view), None) => return Ok((view.bytes.get(), Loss::default())),
            (Self::Copy(view), Some(learned)) => {
                let tensor = unchanged(view)?;
                tensor.encoded(tensor.source.format, learned)
            }
            (Self::Encode(tensor, format), None) => tensor.encode(*format),
            (Self::Encode(tensor, format), Some(learned)) => tensor.encoded(*format, learned),
            (Self::Divisors { tensor, .. }, _) => {
                let bytes: Vec<u8> = tensor.divisors()?.iter().flat_map(|x| x.to_le_bytes()).collect();
                return Ok((bytes.into(), Loss::default()));
            }
        };
        let Encoded { components, loss } =
            encoded.map_err(|error| error.with_rule(|| self.rule_to_keep()))?;
        // GGML's types have one component.
        Ok((components.into_iter().next().unwrap_or_default().into(), loss))
    }

    /// The tensor as readers will find it. Only the values of the RoPE divisors are needed to tell
    /// how the model computes; those of matrices must not be 0.
    fn unwritten(&self) -> Result<UnwrittenTensor, QuantizeError> {
        let (name, (stored, shape)) = (self.name().to_string(), self.description());
        let bytes = match self {
            Self::Divisors { shape: [matrices], .. } => Some(1f32.to_le_bytes().repeat(*matrices)),
            _ if convert::is_rope_divisors(&name) => Some(self.encode(None)?.0.to_vec()),
            _ => None,
        };
        Ok(UnwrittenTensor { name, stored, shape: shape.into(), bytes })
    }

    /// The rule with which its values stay as they are.
    fn rule_to_keep(&self) -> Option<String> {
        let (Self::Encode(Tensor { source, shape, .. }, _), name) = (self, self.name()) else { return None };
        let float = match source.format {
            Format::Float(FloatType::F32) => FloatType::F32,
            // f16 ends where types with f16 scales do.
            _ => FloatType::BF16,
        };
        is_quantised(name, shape)
            .then(|| format!("{}={}", self.module(), float.dtype().to_string().to_uppercase()))
    }

    /// Its storage, and its shape without leading dimensions of 1, which ggml does not count.
    fn description(&self) -> (Stored, &[usize]) {
        let (stored, shape) = match self {
            Self::Copy(view) => (view.stored, &view.shape),
            Self::Encode(tensor, Format::Float(float)) => (Stored::Plain(float.dtype()), &tensor.shape),
            Self::Encode(tensor, format) => (Stored::Blocks(*format), &tensor.shape),
            Self::Divisors { shape, .. } => return (Stored::Plain(DType::F32), shape),
        };
        let ones = shape.iter().take_while(|&&n| n == 1).count();
        (stored, &shape[ones.min(shape.len().saturating_sub(1))..])
    }
}

/// A tensor of a GGUF file as it is.
fn unchanged(view: &TensorView) -> Result<Tensor, QuantizeError> {
    let (name, shape) = (view.name.clone(), view.shape.clone());
    Ok(Tensor { name, shape, source: Source::new(view)?, change: Change::default() })
}

/// A GGUF file's own tensors.
fn carried_over(checkpoint: &Checkpoint) -> Result<Vec<Planned>, QuantizeError> {
    let planned = |view: &TensorView| match view.stored {
        Stored::Plain(dtype) if FloatType::from_dtype(dtype).is_none() => {
            Ok::<_, QuantizeError>(Planned::Integers(view.clone()))
        }
        _ => Ok(Planned::Values(unchanged(view)?.into(), Some(view.clone()))),
    };
    let mut planned = checkpoint.tensors().iter().map(planned).collect::<Result<Vec<_>, _>>()?;
    sort(&mut planned);
    Ok(planned)
}

/// A directory as GGUF has it.
struct Converted {
    tensors: Vec<Planned>,
    /// With the tokenizer's.
    metadata: Metadata,
    /// Things that are left out, a sentence each.
    warnings: Vec<String>,
}

/// Converts `computed`, a directory, to GGUF.
fn from_directory(computed: &Computed<'_>) -> Result<Converted, QuantizeError> {
    let Computed { checkpoint, config, architecture, .. } = computed;
    // MLX's norms have their 1 already, but not all of those that predict further tokens.
    let keeps = mlx::keeps_predictors(architecture) && checkpoint.layout() == Layout::HuggingFace;
    let predictors = if keeps { mlx::predictors(checkpoint) } else { 0 };
    let mut tensors = convert::tensors(computed, predictors)?;
    tensors.extend(dense(computed)?);
    sort(&mut tensors);
    let mut metadata = metadata::metadata(computed, predictors, &tensors)?;
    let (vocab_size, hidden_size) = (computed.decoder().vocab_size, computed.decoder().hidden_size);
    let embedding =
        tensors.iter().map(Planned::name_and_shape).find(|(name, _)| *name == "token_embd.weight");
    if let Some((_, shape)) = embedding.filter(|(_, shape)| *shape != [vocab_size, hidden_size]) {
        let (got, want) = (format!("[{vocab_size}, {hidden_size}]"), format!("the embedding is {shape:?}"));
        return Err(config.refuse("[vocab_size, hidden_size]", &got, &want).into());
    }
    let tokenizer = Tokenizer::gguf_entries(checkpoint, vocab_size)?;
    for (key, value) in tokenizer.entries {
        metadata.insert(key, value)?;
    }
    let mut warnings = lowbit_models::warnings(checkpoint)?;
    warnings.extend(extras(computed, if predictors > 0 { &[Extra::Prediction] } else { &[] }));
    warnings.extend(tokenizer.warnings);
    warnings.extend(latents::other_eps(computed, Layout::Gguf));
    warnings.extend(of_embeddings(computed)?);
    if computed.rounded_yarn()?.is_some() {
        warnings.push(format!(
            "{}: llama.cpp rounds the bounds of YaRN's ramp, although truncate is false: the file is read so, and computes a \
             little otherwise",
            checkpoint.path().display()
        ));
    }
    if !computed.decoder().tie_word_embeddings && architecture.conversion.gguf_always_ties {
        warnings.push(format!(
            "{}: llama.cpp's output layer of the architecture {} is the embedding, and it refuses a file with another",
            checkpoint.path().display(),
            architecture.gguf
        ));
    }
    if computed.decoder().tie_word_embeddings && architecture.conversion.gguf_never_ties {
        warnings.push(format!(
            "{}: llama.cpp wants an output layer of the architecture {}, which is the embedding here, and refuses the file",
            checkpoint.path().display(),
            architecture.gguf
        ));
    }
    let unread = |name: &&str| {
        convert::is_rope_divisors(name) && !architecture.conversion.rope_divisors.contains(name)
    };
    if let Some(name) = tensors.iter().map(|planned| planned.name_and_shape().0).find(unread) {
        warnings.push(format!(
            "{}: llama.cpp does not read {name} for the architecture {}, and refuses a file with it",
            checkpoint.path().display(),
            architecture.gguf
        ));
    }
    Ok(Converted { tensors, metadata, warnings })
}

/// A sentence about what an embedding model says of its texts, for which GGUF has no place.
fn of_embeddings(computed: &Computed<'_>) -> Result<Option<String>, QuantizeError> {
    let config = computed.checkpoint.embedding_config()?;
    let parts = [
        (!config.prompts.is_empty(), "prompts"),
        (config.max_tokens.is_some(), "max_seq_length"),
        (!config.include_prompt, "include_prompt"),
        (!config.normalize, "embeddings of other lengths than 1"),
    ];
    let parts: Vec<_> = parts.into_iter().filter(|(said, _)| *said).map(|(_, part)| part).collect();
    let path = computed.checkpoint.path().display();
    let warning = format!("{path}: GGUF has no place for {}: embeddings are made without", parts.join(", "));
    Ok((!parts.is_empty()).then_some(warning))
}

/// The linear layers behind pooling, which have files of their own.
fn dense(computed: &Computed<'_>) -> Result<Vec<Planned>, QuantizeError> {
    let Computed { checkpoint, architecture, config, .. } = computed;
    let modules = checkpoint.embedding_config()?.dense;
    let mut all = vec![];
    for (index, module) in modules.iter().enumerate() {
        let own = Checkpoint::open(&checkpoint.path().join(&module.name))?;
        let name = DenseModule::GGUF.get(index).filter(|_| architecture.conversion.sees_later);
        let plain = !module.tanh && own.tensors().get("linear.bias").is_none();
        let (Some(name), true) = (name, plain) else {
            let want = "GGUF has two behind EmbeddingGemma's pooling, without bias and function";
            return Err(config
                .refuse("modules.json", &format!("a linear layer in {}", module.name), want)
                .into());
        };
        let view = own
            .tensors()
            .get("linear.weight")
            .ok_or_else(|| QuantizeError::Missing { name: format!("{}/linear.weight", module.name) })?;
        let tensor = Tensor { name: format!("{name}.weight"), ..unchanged(view)? };
        all.push(Planned::Values(tensor.into(), None));
    }
    Ok(all)
}

/// A tensor before its type is chosen.
enum Planned {
    /// Not a weight.
    Integers(TensorView),
    /// With the stored tensor, which is copied if it keeps its type.
    Values(Box<Tensor>, Option<TensorView>),
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
    (mix, rules): (&Mix, &[Rule]),
) -> Result<(Vec<Job>, Vec<Fallback>), QuantizeError> {
    let facts = facts(metadata, planned.iter().map(|planned| planned.name_and_shape().0))?;
    let quantised =
        planned.iter().map(Planned::name_and_shape).filter(|(name, shape)| is_quantised(name, shape));
    Rule::check(rules, quantised.map(|(name, _)| name))?;
    let (mut values, mut downs, mut fallbacks) = (0, 0, vec![]);
    let next = |count: &mut usize| std::mem::replace(count, *count + 1);
    let is_nvfp4 = planned.iter().any(|planned| match planned {
        Planned::Values(tensor, _) => nvfp4::is_nvfp4(tensor.source.format),
        Planned::Integers(_) => false,
    });
    let names: HashSet<String> =
        planned.iter().map(|planned| planned.name_and_shape().0.to_string()).collect();
    // Gemma 4's experts have a tensor of that name.
    let has_float = |tensor: &Tensor| {
        nvfp4::has_float_in_gguf(&tensor.name, tensor.shape.len())
            && !names.contains(&nvfp4::float_of(&tensor.name))
    };
    let mut choose = |tensor: &Tensor, is_gguf: bool| {
        if !is_quantised(&tensor.name, &tensor.shape) {
            let stays = is_gguf && tensor.source.format != Format::Fp4;
            return Ok(if stays { tensor.source.format } else { convert::unquantised(tensor) });
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
            None if mix.base == Format::NVFP4 => match tensor.source.format {
                // Of a model in NVFP4 the rest is in floats on purpose.
                Format::Float(float) if is_nvfp4 => Format::Float(float),
                source if nvfp4::is_nvfp4(source) && source != Format::Fp4 => Format::NVFP4,
                source => mix::nvfp4(has_float(tensor) && (part != Part::Output || source == Format::Fp4)),
            },
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
        match planned {
            Planned::Integers(view) => jobs.push(Job::Copy(view)),
            Planned::Values(tensor, view) => match (choose(&tensor, view.is_some())?, view) {
                (format, Some(view)) if format == tensor.source.format => jobs.push(Job::Copy(view)),
                (format @ Format::NVFP4, _)
                    if nvfp4::wants_float(tensor.source.format) && has_float(&tensor) =>
                {
                    jobs.extend(Job::encode_divided(*tensor, format));
                }
                (format, _) => jobs.push(Job::Encode(*tensor, format)),
            },
        }
    }
    Ok((jobs, fallbacks))
}

/// True if a tensor is quantised at all: matrices are, norms, routers and convolutions are not.
///
/// Source: `tensor_allows_quantization`, llama.cpp `src/llama-quant.cpp`.
fn is_quantised(name: &str, shape: &[usize]) -> bool {
    let dimensions = shape.iter().skip_while(|&&n| n == 1).count();
    let kept = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight"];
    dimensions >= 2 && name.ends_with("weight") && !kept.iter().any(|part| name.contains(part))
}

fn facts<'a>(metadata: &Metadata, names: impl Iterator<Item = &'a str>) -> Result<Facts, QuantizeError> {
    let architecture: &str = metadata.get("general.architecture")?;
    let size = |key: &str| metadata.find::<usize>(&format!("{architecture}.{key}"));
    let layers = size("block_count")?.unwrap_or(0);
    let heads = size("attention.head_count")?.unwrap_or(0);
    // Of layers that differ, llama.cpp's mixes look at the first.
    let key = format!("{architecture}.attention.head_count_kv");
    let key_heads = match metadata.find::<Vec<usize>>(&key) {
        Ok(Some(listed)) => listed.first().copied().unwrap_or(0),
        Ok(None) => heads,
        Err(_) => metadata.get(&key)?,
    };
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

/// Encodes all tensors, one after another, into the file, from its start.
fn write(
    jobs: &[Job],
    mut writer: Writer,
    staged: &mut Staged,
    learned: Learned<'_>,
    progress: Written<'_>,
) -> Result<Summary, QuantizeError> {
    for job in jobs {
        let (stored, shape) = job.description();
        writer.tensor(job.name(), stored, shape)?;
    }
    let path = staged.path().to_path_buf();
    let failed = |error| QuantizeError::Io { path: path.clone(), error };
    let mut summary = Summary::default();
    let file = staged.file_handle();
    file.set_len(0).and_then(|()| file.rewind()).map_err(failed)?;
    let mut body = writer.begin(BufWriter::new(file)).map_err(failed)?;
    for (done, job) in jobs.iter().enumerate() {
        let (stored, shape) = job.description();
        let (bytes, loss) = job.encode(learned(job.module()))?;
        body.tensor(&bytes).map_err(failed)?;
        let parameters = shape.iter().map(|&n| n as u64).product();
        summary.add(job.name(), stored.to_string(), parameters, bytes.len() as u64, loss);
        match job {
            Job::Copy(view) => view.release(),
            Job::Encode(tensor, _) => tensor.source.release(),
            Job::Divisors { .. } => {}
        }
        if progress(done + 1, jobs.len()).is_break() {
            return Err(QuantizeError::Interrupted);
        }
    }
    body.finish().map_err(failed)?.flush().map_err(failed)?;
    Ok(summary)
}
