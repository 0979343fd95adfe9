mod guesses;
mod models;

use super::context::context;
use crate::interrupt::{Doing, Interrupts};
use crate::options::{Loaded, ModelOptions, at_least_one};
use crate::sampling::SamplingOptions;
use crate::template::TemplateOptions;
use crate::{Failure, habits, memory, out};
use guesses::ServerSpeculation;
use lowbit::{Device, dry_batches, dry_pooled};
use lowbit_engine::{Backend, CacheEvents, Engine, EngineOptions, Stats};
use lowbit_serve::{Keys, KvPublisher, Log, MetricNames, ServeOptions, Served, Server};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Flags of `serve`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    /// A TOML file of several models, which are loaded when requests name them: a table [[model]]
    /// for each, with name, path, and if wanted alias, device and context; max_loaded at its top is
    /// the most that are loaded at a time [default: 1].
    #[arg(long, value_name = "FILE", help_heading = "Model", conflicts_with_all = ["model", "hf_repo", "alias"])]
    models: Option<PathBuf>,
    #[command(flatten)]
    listen: Listen,
    #[command(flatten)]
    engine: Limits,
    #[command(flatten)]
    speculation: ServerSpeculation,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    template: TemplateOptions,
}

/// The address, and the clients that may call.
#[derive(clap::Args)]
#[command(next_help_heading = "Server")]
struct Listen {
    /// The address or name to listen on; one that other machines reach needs a key.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 takes any that is free.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// A key that clients must show; may be given several times, or with commas.
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    api_key: Vec<String>,
    /// A file with such keys, one per line.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Serve anyone who reaches the address.
    #[arg(long)]
    no_auth: bool,
    /// A further name of this machine that requests may have as their Host, where no key is asked
    /// for.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    allowed_host: Vec<String>,
    /// A site whose pages may send requests from a browser, such as https://chat.example.
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',')]
    allowed_origin: Vec<String>,
    /// The model's name for clients; the first is the one that is listed first. `*` answers to any
    /// name [default: the name that it was opened by].
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    alias: Vec<String>,
    /// The names of the figures in /metrics: lowbit's own, or vLLM's, which gateways read.
    #[arg(long, value_enum, value_name = "NAMES", default_value_t = Names::Lowbit)]
    metrics_names: Names,
    /// Tell routers which blocks of tokens are cached, as vLLM does, over ZeroMQ: tcp://HOST:PORT
    /// connects to one, tcp://*:PORT and @tcp://HOST:PORT wait for some. The tokens of prompts go
    /// out as they are, to anyone who subscribes.
    #[arg(long, value_name = "ENDPOINT", conflicts_with = "models")]
    kv_events: Option<String>,
    /// The topic of these events.
    #[arg(long, value_name = "TOPIC", default_value = "", requires = "kv_events", hide_default_value = true)]
    kv_events_topic: String,
    /// Leave the line x-anthropic-billing-header in system prompts: it is another in each request,
    /// so that nothing of such a prompt is found in the cache.
    #[arg(long)]
    keep_billing_header: bool,
    /// The time that running replies have to end after a signal to stop.
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    drain_seconds: u64,
}

/// The names of figures in /metrics.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Names {
    Lowbit,
    Vllm,
}

/// Limits of the engine.
#[derive(clap::Args)]
#[command(next_help_heading = "Engine")]
struct Limits {
    /// Tokens that a prompt and its reply may have together; 0 takes the model's context
    /// [default: what memory holds, at most the model's context].
    #[arg(long, short, value_name = "TOKENS")]
    ctx_size: Option<usize>,
    /// Requests that are answered at the same time.
    #[arg(long, value_name = "N", value_parser = at_least_one(), default_value = "64")]
    max_running: usize,
    /// Requests that wait; further ones are refused with 429.
    #[arg(long, value_name = "N", value_parser = at_least_one(), default_value = "256")]
    max_waiting: usize,
    /// Memory for caches, in GB: those of running requests, and those kept for later ones
    /// [default: a quarter of the free memory and at most 16 on a CPU; 85 % of what the weights leave on a GPU].
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    cache_memory: Option<f64>,
    /// The time between two tokens of a reply that others' prompts may not exceed on average; no
    /// two are twice as far apart [default: 25 on a GPU, 250 on a CPU].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    target_itl: Option<u64>,
    /// Keep no caches for later requests: each prompt is read whole.
    #[arg(long)]
    no_prefix_cache: bool,
}

fn gigabytes(text: &str) -> Result<f64, String> {
    let size = text.parse::<f64>().ok().filter(|size| size.is_finite() && *size > 0.0);
    size.ok_or_else(|| "a number of GB above 0 is wanted".into())
}

/// Serves a model, or several.
pub fn run(arguments: Arguments) -> Result<(), Failure> {
    let interrupts = Interrupts::listen()?;
    arguments.sampling.check()?;
    if arguments.template.has_tools() {
        return Err("--tools: clients name their tools in each request".into());
    }
    // Before a model is loaded: an address that is taken is known at once.
    let server = Server::bind(arguments.listen.options()?)?;
    let address = server.address();
    // A log that nobody reads must not stop the server.
    out::in_background()?;
    let log: Log = Arc::new(|line: &str| out::note!("{line}"));
    let arguments = Arc::new(arguments);
    if let Some(file) = &arguments.models {
        let (offers, most) = models::read(file, &arguments)?;
        let names: Vec<&str> = offers.iter().map(|offer| offer.name.as_str()).collect();
        let names = lowbit_files::shown(&names.join(", ")).to_string();
        out::note!("{names}: loaded when asked for, at most {most} at a time");
        say(address, First::Chat);
        interrupts.enter(Doing::Serving);
        server.run_offered(offers, most, log, || interrupts.stop())?;
    } else {
        let ask = (&arguments.model, arguments.engine.ctx_size);
        let publisher = arguments.listen.publisher()?;
        let events = publisher.as_ref().map(KvPublisher::events);
        let prepared = Prepared::load(&arguments, ask, arguments.listen.alias.clone(), (1, events))?;
        out::note!("{}", prepared.ready());
        say(address, prepared.first);
        let (served, engine) = prepared.loaded();
        interrupts.enter(Doing::Serving);
        server.run(served, engine, log, || interrupts.stop())?;
    }
    out::note!("stopped");
    Ok(())
}

/// A model that is ready to serve.
struct Prepared {
    served: Served,
    engine: Engine,
    seconds: f64,
    first: First,
}

impl Prepared {
    /// Loads a model with this context, and starts its engine, whose caches have a `share`-th of
    /// the memory for caches and tells their changes. It has these names, and the one that it was
    /// opened by.
    fn load(
        arguments: &Arguments,
        (model, asked): (&ModelOptions, Option<usize>),
        mut names: Vec<String>,
        (share, events): (usize, Option<CacheEvents>),
    ) -> Result<Self, Failure> {
        let opened = model.open_to_chat()?;
        let template = arguments.template.load(&opened.checkpoint)?;
        let sampling = arguments.sampling.resolve(&opened.checkpoint)?;
        let opened = opened.with_context(asked.filter(|&tokens| tokens > 0));
        let pooling = opened.checkpoint.embedding_config()?.pooling;
        let loaded = opened.load(|model| {
            dry_batches(model, arguments.engine.max_running, sampling.first())?;
            arguments.speculation.compile(model, arguments.engine.max_running, sampling.first())?;
            pooling.map_or(Ok(()), |pooling| dry_pooled(model, pooling))
        })?;
        let (context, note) = context(&loaded, asked)?;
        if let Some(note) = note {
            out::note!("{note}");
        }
        let mut options = arguments.engine.options(&loaded, share);
        options.guesses = arguments.speculation.load(&loaded)?;
        options.cache_events = events;
        let Loaded { checkpoint, tokenizer, model: own, seconds } = loaded;
        let vocab_size = own.config().vocab_size;
        let engine = Engine::start(own.clone(), options)?;
        if names.is_empty() || arguments.models.is_none() {
            names.push(model.name().unwrap_or_else(|| stem(checkpoint.path())));
        }
        // It answers to any name, and has one of its own all the same.
        names.sort_by_key(|name| name == "*");
        let first = match (pooling, &template) {
            (Some(_), _) => First::Embedding,
            (None, Some(_)) => First::Chat,
            (None, None) => First::Text,
        };
        let served = Served::new(names.remove(0), tokenizer, template)
            .with_aliases(names)
            .with_defaults(sampling.first().clone())
            .with_seed(arguments.sampling.seed())
            .with_vocab_size(vocab_size)
            .with_context(context.min(engine.context()))
            .with_model(checkpoint, own);
        sampling.say_without_seed();
        Ok(Self { served, engine, seconds, first })
    }

    /// A line for the log.
    fn ready(&self) -> String {
        let name = lowbit_files::shown(&self.served.name);
        format!(
            "{name}: {}\n{name}: ready after {:.1} s, context {}",
            reuse(&self.engine.stats()),
            self.seconds,
            self.served.context
        )
    }

    fn loaded(self) -> lowbit_serve::Loaded {
        (self.served, Arc::new(self.engine))
    }
}

impl Listen {
    fn options(&self) -> Result<ServeOptions, Failure> {
        let mut keys = Keys::new(self.api_key.iter().cloned());
        if let Some(file) = &self.api_key_file {
            let of_file = Keys::parse(&habits::read_text(file)?);
            if of_file.is_empty() {
                return Err(format!("{}: has no key", lowbit_files::shown_path(file)).into());
            }
            keys = keys.and(of_file);
        }
        if keys.is_empty() && !self.api_key.is_empty() {
            return Err("--api-key: the key is empty".into());
        }
        let mut options = ServeOptions::default();
        options.host.clone_from(&self.host);
        options.port = self.port;
        options.keys = keys;
        options.no_auth = self.no_auth;
        options.hosts.clone_from(&self.allowed_host);
        options.origins.clone_from(&self.allowed_origin);
        options.metric_names = match self.metrics_names {
            Names::Lowbit => MetricNames::Lowbit,
            Names::Vllm => MetricNames::Vllm,
        };
        options.keep_billing_header = self.keep_billing_header;
        options.drain = Duration::from_secs(self.drain_seconds);
        Ok(options)
    }

    /// Publishes changes of caches, if it is wanted.
    fn publisher(&self) -> Result<Option<KvPublisher>, Failure> {
        let start = |endpoint: &String| KvPublisher::start(endpoint, &self.kv_events_topic);
        let publisher = self.kv_events.as_ref().map(start).transpose();
        publisher.map_err(|error| format!("--kv-events: {error}").into())
    }
}

/// Caches on a CPU take at most this many bytes unless a flag says otherwise.
const MOST_ON_CPU: u64 = 16_000_000_000;

impl Limits {
    /// The engine's options, with a `share`-th of the memory for caches.
    fn options(&self, loaded: &Loaded, share: usize) -> EngineOptions {
        let options = EngineOptions::new(loaded.model.device())
            .with_max_running(self.max_running)
            .with_max_waiting(self.max_waiting)
            .with_prefix_cache(!self.no_prefix_cache);
        let target = self.target_itl.map_or(options.target_inter_token, Duration::from_millis);
        let options = options.with_target_inter_token(target);
        let bytes = match (self.cache_memory, loaded.model.device()) {
            (Some(size), _) => Some((size * 1e9) as u64),
            (None, Device::Cpu(_)) => memory::available_bytes().map(|free| (free / 4).min(MOST_ON_CPU)),
            (None, Device::Gpu(gpu)) => gpu.total_memory().map(|total| {
                let weights: u64 = loaded.checkpoint.tensors().iter().map(|of| of.bytes.len() as u64).sum();
                // The rest is for passes over prompts, and for the activations that each captured
                // step keeps.
                (total as u64).saturating_sub(weights) / 20 * 17
            }),
        };
        match bytes.and_then(|bytes| usize::try_from(bytes).ok()) {
            Some(bytes) => options.with_cache_bytes(bytes / share),
            None => {
                let bytes = options.cache_bytes / share;
                options.with_cache_bytes(bytes)
            }
        }
    }
}

/// The last name of a path, without what a file's name ends with.
fn stem(path: &Path) -> String {
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

/// The memory for caches, and what of a prompt can be found in them.
fn reuse(stats: &Stats) -> String {
    let size = format!("caches of {:.1} GB", stats.budget_bytes as f64 / 1e9);
    let (block, states) = (stats.block_tokens, stats.state_bytes);
    // A kept text and the request that reads it have each their own.
    let least = 2 * (states + block * stats.token_bytes);
    match states {
        _ if stats.budget_bytes < least => format!("{size} hold no prompt's start for another request"),
        0 => format!("{size}; prompts share their starts in blocks of {block} tokens"),
        _ => format!(
            "{size}; prompts share their starts up to checkpoints, every one of {:.1} MB (recurrent states, windows)",
            states as f64 / 1e6
        ),
    }
}

/// The kind of a first request to try.
#[derive(Clone, Copy)]
enum First {
    Chat,
    Text,
    Embedding,
}

/// Prints the server's addresses, and a first request.
fn say(address: SocketAddr, first: First) {
    out::note!("OpenAI     http://{address}/v1");
    out::note!("Anthropic  http://{address}");
    out::note!("page       http://{address}/");
    let (path, body) = match first {
        First::Chat => {
            ("chat/completions", r#"{"messages": [{"role": "user", "content": "What is a vector?"}]}"#)
        }
        First::Text => ("completions", r#"{"prompt": "A vector is", "max_tokens": 100}"#),
        First::Embedding => ("embeddings", r#"{"input": "A vector is"}"#),
    };
    out::note!("try: curl http://{address}/v1/{path} -d '{body}'");
}
