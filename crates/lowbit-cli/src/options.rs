//! Flags that several commands share.

use crate::demo::Demo;
use crate::device::DeviceOptions;
use crate::{Failure, habits, out, progress};
use lowbit::{Checkpoint, Device, Model, ModelError, Target, Tokenizer};
use lowbit_formats::FloatType;
use lowbit_kernels::KernelError;
use lowbit_models::{CacheType, Config};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The model, and the device that it runs on.
#[derive(Clone, clap::Args)]
#[command(next_help_heading = "Model")]
pub struct ModelOptions {
    /// A checkpoint's directory, a .gguf file, or org/name on the Hugging Face hub
    /// [default: the bundled demo].
    #[arg(long, short)]
    model: Option<String>,
    /// The same, as llama.cpp's -hf: org/name, or org/name:Q4_K_M for one of several GGUF files.
    #[arg(long, value_name = "MODEL", conflicts_with = "model")]
    hf_repo: Option<String>,
    /// The type of activations [default: f16 on a GPU with matrix units, f32 elsewhere].
    #[arg(long, value_enum, ignore_case = true)]
    dtype: Option<Activations>,
    /// The type of cached keys and values: f32, f16, bf16, or q8_0, which is 8 bits with scales and
    /// half of f16 [default: f16 on the CPU, f32 with --exact, on a GPU that of activations].
    #[arg(long, value_name = "TYPE", value_parser = CacheFlag::parse)]
    cache_type: Option<CacheFlag>,
    /// The type of cached keys, which must be that of values: llama.cpp's -ctk.
    #[arg(long, value_name = "TYPE", hide = true, value_parser = CacheFlag::parse)]
    cache_type_k: Option<CacheFlag>,
    /// The same of cached values: llama.cpp's -ctv.
    #[arg(long, value_name = "TYPE", hide = true, value_parser = CacheFlag::parse)]
    cache_type_v: Option<CacheFlag>,
    /// Multiply decoded weights in f32 on the CPU, instead of rounding activations to 8 bits as
    /// llama.cpp does; several times slower.
    #[arg(long)]
    exact: bool,
    #[command(flatten)]
    pub device: DeviceOptions,
}

/// The types of activations.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Activations {
    #[value(alias = "float32")]
    F32,
    #[value(alias = "float16", alias = "half")]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
}

impl Activations {
    fn float(self) -> FloatType {
        match self {
            Self::F32 => FloatType::F32,
            Self::F16 => FloatType::F16,
            Self::Bf16 => FloatType::BF16,
        }
    }
}

/// The type of cached keys and values that a flag names; none is the usual one.
#[derive(Clone, Copy)]
struct CacheFlag(Option<CacheType>);

impl CacheFlag {
    /// By the names of llama.cpp (-ctk), vLLM (--kv-cache-dtype) and mlx-lm (--kv-bits).
    fn parse(name: &str) -> Result<Self, String> {
        Ok(Self(Some(match name.to_ascii_lowercase().as_str() {
            "auto" => return Ok(Self(None)),
            "f32" | "float32" => FloatType::F32.into(),
            "f16" | "float16" => FloatType::F16.into(),
            "bf16" | "bfloat16" => FloatType::BF16.into(),
            "q8_0" | "q8" | "8" | "int8" => CacheType::Int8,
            _ => return Err("f32, f16, bf16 and q8_0 (8 bits: integers with scales) are known".into()),
        })))
    }
}

/// The parser of flags that take a count of at least one.
pub fn at_least_one() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(1..)
}

/// A checkpoint whose texts can be encoded.
pub struct Opened {
    pub checkpoint: Checkpoint,
    pub tokenizer: Tokenizer,
    target: Target,
    start: Instant,
}

impl Opened {
    /// For sequences of up to `context` tokens, where that is known before the model is loaded:
    /// [`Target::with_context`].
    pub fn with_context(self, context: Option<usize>) -> Self {
        Self { target: self.target.with_context(context), ..self }
    }

    /// Loads the model, and compiles the kernels that `work` launches, see
    /// [`Model::load_compiled`].
    pub fn load(self, work: impl FnOnce(&Model) -> Result<(), ModelError> + Send) -> Result<Loaded, Failure> {
        let Self { checkpoint, tokenizer, target, start } = self;
        let model = ModelOptions::load_opened(&checkpoint, &target, work)?;
        Ok(Loaded { checkpoint, tokenizer, model, seconds: start.elapsed().as_secs_f64() })
    }
}

/// A checkpoint that is ready to use.
pub struct Loaded {
    pub checkpoint: Checkpoint,
    pub tokenizer: Tokenizer,
    pub model: Model,
    pub seconds: f64,
}

impl ModelOptions {
    /// Finds and maps the model, and loads its tokenizer.
    pub fn open_with_tokenizer(&self) -> Result<Opened, Failure> {
        self.open_or_demo(Demo::Text)
    }

    /// The same for a chat: where no model is named, the demo is one that chats.
    pub fn open_to_chat(&self) -> Result<Opened, Failure> {
        self.open_or_demo(Demo::Chat)
    }

    fn open_or_demo(&self, demo: Demo) -> Result<Opened, Failure> {
        let start = Instant::now();
        let (target, files) = if self.is_here() {
            // To open a GPU takes some 0.2 s, in which the files can be read.
            let (found, files) = std::thread::scope(|scope| {
                let builder = std::thread::Builder::new().name("device".into());
                let found = builder.spawn_scoped(scope, || self.device.find(self.exact));
                let found = found.map_err(KernelError::ThreadPool)?;
                let files = self.files(demo);
                let found = found.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                Ok::<_, KernelError>((found, files))
            })?;
            (self.target_on(&found?.told())?, files)
        } else {
            // Nothing is downloaded for a device that cannot be used.
            (self.target()?, self.files(demo))
        };
        let (checkpoint, tokenizer) = files?;
        Ok(Opened { checkpoint, tokenizer, target, start })
    }

    /// True if the model is on the disk by this name.
    fn is_here(&self) -> bool {
        self.model.as_ref().or(self.hf_repo.as_ref()).is_none_or(|model| Path::new(model).exists())
    }

    /// The model's files: the checkpoint, and its tokenizer.
    fn files(&self, demo: Demo) -> Result<(Checkpoint, Tokenizer), Failure> {
        let checkpoint = self.find(demo)?;
        let spinner = progress::spinner(format!("loading {}", lowbit_files::shown_path(checkpoint.path())));
        // Before the tokenizer: an unsupported architecture may have an unsupported tokenizer, too,
        // and is the better error.
        lowbit_models::arch::find(&Config::new(&checkpoint)?)?;
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
        spinner.finish_and_clear();
        Ok((checkpoint, tokenizer))
    }

    /// Loads a checkpoint that is open already, without its tokenizer, and compiles the kernels
    /// that `work` launches; its warnings are printed.
    pub fn load_opened(
        checkpoint: &Checkpoint,
        target: &Target,
        work: impl FnOnce(&Model) -> Result<(), ModelError> + Send,
    ) -> Result<Model, Failure> {
        let spinner = progress::spinner(format!("loading {}", lowbit_files::shown_path(checkpoint.path())));
        let model = Model::load_compiled(checkpoint, target.clone(), work, progress::compiling(&spinner))?;
        spinner.finish_and_clear();
        warn(&model);
        Ok(model)
    }

    /// True if --model was given.
    pub fn is_named(&self) -> bool {
        self.model.is_some() || self.hf_repo.is_some()
    }

    /// The model's name on the hub, if it was named by that.
    #[cfg(feature = "serve")]
    pub fn name(&self) -> Option<String> {
        let name = self.model.as_ref().or(self.hf_repo.as_ref())?;
        (!habits::expand_home(name).exists()).then(|| name.clone())
    }

    /// The same for another model, and for another device if one is named.
    pub fn named(&self, model: &str, device: Option<&str>) -> Result<Self, String> {
        let device = device.map_or_else(|| Ok(self.device.clone()), |name| self.device.named(name))?;
        Ok(Self { model: Some(model.into()), hf_repo: None, device, ..self.clone() })
    }

    /// The type of activations, if one is named.
    pub fn activations(&self) -> Option<FloatType> {
        self.dtype.map(Activations::float)
    }

    /// The device that the flags name, or the best that is there.
    pub fn device(&self) -> Result<Device, Failure> {
        self.device.device(self.exact)
    }

    /// The device and the types that the flags name.
    pub fn target(&self) -> Result<Target, Failure> {
        self.target_on(&self.device()?)
    }

    fn target_on(&self, device: &Device) -> Result<Target, Failure> {
        let target = Target::new(device, self.activations())?.with_exact(self.exact);
        match self.cache_type(&target)? {
            Some(cache) => Ok(target.with_cache(cache)),
            None => Ok(target),
        }
    }

    /// The type of cached keys and values that the flags name, if they do.
    fn cache_type(&self, target: &Target) -> Result<Option<CacheType>, Failure> {
        let usual = target.cache;
        let type_of = |flag: &Option<CacheFlag>| flag.map(|CacheFlag(cache)| cache.unwrap_or(usual));
        let both = type_of(&self.cache_type);
        let [keys, values] = [&self.cache_type_k, &self.cache_type_v].map(type_of);
        let [k, v] = [keys, values].map(|cache| cache.or(both).unwrap_or(usual));
        if k != v {
            let (k, v) = (k.name(), v.name());
            return Err(format!(
                "keys in {k} and values in {v}: both have one type here; --cache-type {k} is of both"
            )
            .into());
        }
        if let (CacheType::Float(wanted), Device::Gpu(_)) = (k, &target.device)
            && k != usual
        {
            let (wanted, usual) = (wanted.dtype(), usual.name());
            return Err(format!(
                "--cache-type {wanted}: keys and values are cached in {usual} here, or in q8_0; --dtype names another type"
            )
            .into());
        }
        Ok(keys.or(values).or(both))
    }

    /// Finds and maps the checkpoint alone.
    pub fn open(&self) -> Result<Checkpoint, Failure> {
        self.find(Demo::Text)
    }

    /// The checkpoint that is named, or the bundled one.
    fn find(&self, demo: Demo) -> Result<Checkpoint, Failure> {
        let path = match self.model.as_ref().or(self.hf_repo.as_ref()) {
            Some(model) => resolve(model)?,
            None => {
                let gpu_bytes = || Some(self.device.find(self.exact).ok()?.gpu_memory()? as u64);
                demo.find(&std::env::current_dir()?, gpu_bytes)?
            }
        };
        Ok(Checkpoint::open(&path)?)
    }
}

/// Prints the model's warnings on standard error. A warning that cannot be written is ignored.
fn warn(model: &Model) {
    for warning in model.warnings() {
        out::note!("warning: {warning}");
    }
}

/// Says of an embedding model that it was not made to write text.
pub fn note_embedding_model(checkpoint: &Checkpoint) {
    if checkpoint.embedding_config().is_ok_and(|config| config.pooling.is_some()) {
        out::note!("note: this is an embedding model; `lowbit embed` makes its embeddings");
    }
}

/// Finds and maps the checkpoint of this name, which is given as --model's.
pub fn open_named(model: &str) -> Result<Checkpoint, Failure> {
    Ok(Checkpoint::open(&resolve(model)?)?)
}

/// A path as it is; `org/name` downloaded, or from the cache.
fn resolve(model: &str) -> Result<PathBuf, Failure> {
    let local = habits::expand_home(model);
    if local.exists() {
        return Ok(local);
    }
    find(model, &local)
}

#[cfg(feature = "hub")]
fn find(model: &str, local: &Path) -> Result<PathBuf, Failure> {
    use lowbit_hub::HubError;

    let bar = progress::bytes("download");
    let path = lowbit_hub::resolve_with(model, &mut |progress| {
        bar.set_message(progress.file.to_string());
        bar.set_length(progress.total);
        bar.set_position(progress.bytes);
    });
    bar.finish_and_clear();
    path.map_err(|error| match error {
        // The model is there.
        HubError::File(error) => error.into(),
        error => habits::with_nearest(local, error),
    })
}

#[cfg(not(feature = "hub"))]
fn find(model: &str, local: &Path) -> Result<PathBuf, Failure> {
    let model = lowbit_files::shown(model);
    let problem = "there is no such file or directory, and this program was built without the feature `hub`, \
                   which finds models by name";
    Err(habits::with_nearest(local, format!("{model}: {problem}")))
}
