use super::context::context;
use crate::interrupt::{Doing, Interrupts};
use crate::options::{Loaded, ModelOptions, at_least_one, note_embedding_model};
use crate::sampling::SamplingOptions;
use crate::template::TemplateOptions;
use crate::{Failure, habits, memory, out};
use lowbit::{Device, dry_chat};
use lowbit_engine::{Backend, Engine, EngineOptions};
use lowbit_serve::{Keys, ServeOptions, Served, Server};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Flags of `serve`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    listen: Listen,
    #[command(flatten)]
    engine: Limits,
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
    /// The time that running replies have to end after a signal to stop.
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    drain_seconds: u64,
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
    /// [default: a quarter of the free memory and at most 16 on a CPU; 90 % of what the weights leave on a GPU].
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    cache_memory: Option<f64>,
}

fn gigabytes(text: &str) -> Result<f64, String> {
    let size = text.parse::<f64>().ok().filter(|size| size.is_finite() && *size > 0.0);
    size.ok_or_else(|| "a number of GB above 0 is wanted".into())
}

/// Serves a model.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let interrupts = Interrupts::listen()?;
    arguments.sampling.check()?;
    if arguments.template.has_tools() {
        return Err("--tools: clients name their tools in each request".into());
    }
    // Before the model is loaded: an address that is taken is known at once.
    let server = Server::bind(arguments.listen.options()?)?;
    let opened = arguments.model.open_to_chat()?;
    note_embedding_model(&opened.checkpoint);
    let template = arguments.template.load(&opened.checkpoint)?;
    let sampling = arguments.sampling.resolve(&opened.checkpoint)?;
    let opened = opened.with_context(arguments.engine.ctx_size.filter(|&tokens| tokens > 0));
    let loaded = opened.load(|model| dry_chat(model, sampling.first()))?;
    let (context, note) = context(&loaded, arguments.engine.ctx_size)?;
    if let Some(note) = note {
        out::note!("{note}");
    }
    let options = arguments.engine.options(&loaded);
    let Loaded { checkpoint, tokenizer, model, seconds } = loaded;
    let vocab_size = model.config().vocab_size;
    let engine = Engine::start(model, options)?;
    let context = context.min(engine.context());

    let mut names = arguments.listen.alias.clone();
    names.push(arguments.model.name().unwrap_or_else(|| stem(checkpoint.path())));
    let has_template = template.is_some();
    let served = Served::new(names.remove(0), tokenizer, template)
        .with_aliases(names)
        .with_defaults(sampling.first().clone())
        .with_seed(arguments.sampling.seed())
        .with_vocab_size(vocab_size)
        .with_context(context);
    sampling.say_without_seed();
    say(&served.name, server.address(), (context, seconds), has_template);
    interrupts.enter(Doing::Serving);
    server.run(served, Arc::new(engine), Arc::new(|line| out::note!("{line}")), || interrupts.stop())?;
    out::note!("stopped");
    Ok(())
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
        options.drain = Duration::from_secs(self.drain_seconds);
        Ok(options)
    }
}

/// Caches on a CPU take at most this many bytes unless a flag says otherwise.
const MOST_ON_CPU: u64 = 16_000_000_000;

impl Limits {
    fn options(&self, loaded: &Loaded) -> EngineOptions {
        let options = EngineOptions::new(loaded.model.device())
            .with_max_running(self.max_running)
            .with_max_waiting(self.max_waiting);
        let bytes = match (self.cache_memory, loaded.model.device()) {
            (Some(size), _) => Some((size * 1e9) as u64),
            (None, Device::Cpu(_)) => memory::available_bytes().map(|free| (free / 4).min(MOST_ON_CPU)),
            (None, Device::Gpu(gpu)) => gpu.total_memory().map(|total| {
                let weights: u64 = loaded.checkpoint.tensors().iter().map(|of| of.bytes.len() as u64).sum();
                (total as u64).saturating_sub(weights) / 10 * 9
            }),
        };
        match bytes.and_then(|bytes| usize::try_from(bytes).ok()) {
            Some(bytes) => options.with_cache_bytes(bytes),
            None => options,
        }
    }
}

/// The last name of a path, without what a file's name ends with.
fn stem(path: &Path) -> String {
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

/// Prints the server's addresses, and a first request.
fn say(name: &str, address: SocketAddr, (context, seconds): (usize, f64), chats: bool) {
    out::note!("{}: ready after {seconds:.1} s, context {context}", lowbit_files::shown(name));
    out::note!("OpenAI     http://{address}/v1");
    out::note!("Anthropic  http://{address}");
    out::note!("page       http://{address}/");
    let (path, body) = match chats {
        true => ("chat/completions", r#"{"messages": [{"role": "user", "content": "What is a vector?"}]}"#),
        false => ("completions", r#"{"prompt": "A vector is", "max_tokens": 100}"#),
    };
    out::note!("try: curl http://{address}/v1/{path} -d '{body}'");
}
