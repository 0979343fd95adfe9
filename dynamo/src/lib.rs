//! lowbit as a worker of NVIDIA Dynamo: [`LowbitEngine`] answers what Dynamo's frontend has
//! tokenised, and tells its routers which blocks are cached and how full the cache is.
//!
//! It is an aggregated worker: prompts are read and replies written in one place. Fields that would
//! change a reply and are not done here are refused by name.

mod cache;
mod reply;
mod request;

use cache::Publishers;
use dynamo_backend_common::{
    BackendError, DynamoError, EngineConfig, ErrorType, GenerateContext, KvEventSource, LLMEngine,
    LLMEngineOutput, LlmRegistration, MetricsBindings, MetricsCtx, PreprocessedRequest,
};
use futures::stream::BoxStream;
use lowbit::{
    ChatTemplate, Checkpoint, Device, GenerationOptions, Grammars, Model, Syntax, Target, Tokenizer,
};
use lowbit_engine::{Backend, Engine, EngineOptions};
use std::ops::ControlFlow::{Break, Continue};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::unbounded_channel;

/// Time between two looks at whether the engine is done.
const LOOK: Duration = Duration::from_millis(20);

/// The model that a worker runs, and its limits.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// The folder of the model. Dynamo's frontend reads its tokenizer and its chat template, too.
    #[arg(long)]
    pub model: String,
    /// The name that clients call it by [default: the folder].
    #[arg(long)]
    pub served_model_name: Option<String>,
    /// The device: cpu alone so far. Dynamo 1.6.1 and lowbit's CUDA want different versions of
    /// cudarc.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Requests that are answered at the same time.
    #[arg(long, default_value_t = 64)]
    pub max_running: usize,
    /// Memory for caches, in GB.
    #[arg(long, default_value_t = 4.0)]
    pub cache_memory: f64,
    /// The time in seconds that running replies have to end after a signal to stop. Dynamo itself
    /// waits for a worker as long as DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT says.
    #[arg(long, default_value_t = 20)]
    pub drain_seconds: u64,
    /// The file of the template with which Dynamo's frontend renders chats, if it is not the
    /// model's: it says how reasoning is written, which precedes a reply's form.
    #[arg(skip)]
    pub chat_template: Option<PathBuf>,
}

/// A worker: a model once it was started, and Dynamo's receivers of its figures.
#[derive(Debug)]
pub struct LowbitEngine {
    settings: Settings,
    running: Mutex<Option<Arc<Running>>>,
    publishers: Arc<Publishers>,
}

/// A model that answers.
#[derive(Debug)]
pub(crate) struct Running {
    engine: Engine,
    tokenizer: Tokenizer,
    vocab_size: usize,
    /// The publisher's sampling.
    defaults: GenerationOptions,
    /// The compiler of replies' forms, from the first request for one on; or why it cannot.
    grammars: OnceLock<Result<Grammars, String>>,
    syntax: Syntax,
}

const INVALID: ErrorType = ErrorType::Backend(BackendError::InvalidArgument);
const SHUT_DOWN: ErrorType = ErrorType::Backend(BackendError::EngineShutdown);
const UNKNOWN: ErrorType = ErrorType::Backend(BackendError::Unknown);

/// An error of this kind.
fn error(kind: ErrorType, problem: impl std::fmt::Display) -> DynamoError {
    let (builder, problem) = (DynamoError::builder().error_type(kind), problem.to_string());
    // A client is told what is wrong with its request; the rest is for those who run the worker.
    let builder = if kind == INVALID { builder.public_message(&*problem) } else { builder };
    builder.message(problem).build()
}

/// Work of a thread of its own.
async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DynamoError> + Send + 'static,
) -> Result<T, DynamoError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| Err(error(UNKNOWN, panic)))
}

fn device(name: &str) -> Result<Device, DynamoError> {
    match name {
        "cpu" => Device::cpu(None).map_err(|problem| error(UNKNOWN, problem)),
        _ => Err(error(INVALID, format!("device {name}: this worker runs on cpu alone"))),
    }
}

impl Running {
    /// Loads the model, and starts its engine.
    fn start(settings: &Settings, publishers: &Arc<Publishers>) -> Result<Self, DynamoError> {
        let device = device(&settings.device)?;
        let load = || -> Result<_, lowbit::Error> {
            let checkpoint = Checkpoint::open(settings.model.as_ref())?;
            let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
            let template = match &settings.chat_template {
                Some(file) => Some(ChatTemplate::from_file(file, &checkpoint)?),
                None => ChatTemplate::from_checkpoint(&checkpoint)?,
            };
            let syntax = |template| Syntax::new(template, Some(&tokenizer));
            let syntax = template.as_ref().map_or_else(Syntax::plain, syntax);
            let defaults = GenerationOptions::recommended(&checkpoint.generation_config()?);
            let dry = |model: &Model| lowbit::dry_batches(model, settings.max_running, &defaults);
            let model = Model::load_compiled(&checkpoint, Target::new(&device, None)?, dry, |_, _| ())?;
            Ok((model, tokenizer, syntax, defaults))
        };
        let loaded = load().map_err(|problem| error(UNKNOWN, problem))?;
        let (model, tokenizer, syntax, defaults) = loaded;
        let options = EngineOptions::new(&device)
            .with_max_running(settings.max_running)
            .with_cache_bytes((settings.cache_memory * 1e9) as usize)
            .with_cache_events(publishers.events());
        let vocab_size = model.config().vocab_size;
        let engine = Engine::start(model, options).map_err(|problem| error(UNKNOWN, problem))?;
        Ok(Self { engine, tokenizer, vocab_size, defaults, grammars: OnceLock::new(), syntax })
    }

    /// The compiler of replies' forms.
    pub(crate) fn grammars(&self) -> Result<&Grammars, DynamoError> {
        let make = || {
            let stop_ids = self.tokenizer.eos_ids();
            let grammars = Grammars::new(&self.tokenizer, &self.syntax, self.vocab_size, stop_ids);
            grammars.map_err(|problem| problem.to_string())
        };
        let grammars = self.grammars.get_or_init(make);
        grammars.as_ref().map_err(|problem| error(INVALID, problem))
    }

    fn registration(&self, settings: &Settings) -> LlmRegistration {
        let stats = self.engine.stats();
        let block = stats.block_tokens * stats.token_bytes;
        LlmRegistration {
            context_length: u32::try_from(self.engine.context()).ok(),
            kv_cache_block_size: u32::try_from(stats.block_tokens).ok(),
            total_kv_blocks: stats.budget_bytes.checked_div(block).map(|blocks| blocks as u64),
            max_num_seqs: Some(settings.max_running as u64),
            ..Default::default()
        }
    }
}

impl LowbitEngine {
    /// A worker that has not started.
    pub fn new(settings: Settings) -> Self {
        Self { settings, running: Mutex::default(), publishers: Arc::default() }
    }

    fn running(&self) -> Result<Arc<Running>, DynamoError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).clone();
        running.ok_or_else(|| error(SHUT_DOWN, "the engine does not run"))
    }
}

#[async_trait::async_trait]
impl LLMEngine for LowbitEngine {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let (settings, publishers) = (self.settings.clone(), self.publishers.clone());
        let running = apart(move || Running::start(&settings, &publishers)).await?;
        let llm = Some(running.registration(&self.settings));
        let running = Arc::new(running);
        self.publishers.watch(&running);
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
        let (model, served_model_name) =
            (self.settings.model.clone(), self.settings.served_model_name.clone());
        Ok(EngineConfig { model, served_model_name, llm, ..Default::default() })
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        context: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let running = self.running()?;
        let counts = reply::Counts::new(request.token_ids.len());
        // A form is compiled.
        let asked = apart(move || {
            let asked = request::Asked::read(&request, &running)?;
            let (sender, events) = unbounded_channel();
            // Nobody listens any more: the request is cancelled.
            let sink = move |event| if sender.send(event).is_ok() { Continue(()) } else { Break(()) };
            let handle = running.engine.submit(asked.request, Box::new(sink)).map_err(reply::failed)?;
            Ok((handle, events, asked.last_ids))
        });
        let (handle, events, last_ids) = asked.await?;
        Ok(Box::pin(reply::stream(context, (handle, events), counts, last_ids)))
    }

    /// Lets running replies end, for as long as the settings say; then they end with an error.
    async fn cleanup(&self) -> Result<(), DynamoError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(running) = running else { return Ok(()) };
        running.engine.drain();
        let end = Instant::now() + Duration::from_secs(self.settings.drain_seconds);
        while !running.engine.stats().is_idle() && Instant::now() < end {
            tokio::time::sleep(LOOK).await;
        }
        running.engine.stop();
        // The last one that drops the engine waits for its thread.
        apart(move || Ok(drop(running))).await
    }

    /// A request for one token, which Dynamo makes where it looks after workers' health.
    async fn health_check_payload(&self) -> Result<Option<serde_json::Value>, DynamoError> {
        Ok(Some(serde_json::json!({
            "token_ids": [0],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": true},
            "sampling_options": {"temperature": 0.0},
            "output_options": {},
        })))
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        let publishers = self.publishers.clone();
        let on_ready = Box::new(move |publisher| Ok(publishers.set_kv(publisher)));
        Ok(vec![KvEventSource::Push { on_ready, dp_rank: 0 }])
    }

    async fn setup_metrics(&self, _context: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let publishers = self.publishers.clone();
        let on_ready = Box::new(move |publisher| Ok(publishers.set_figures(publisher)));
        Ok(MetricsBindings { dp_ranks: vec![0], on_publisher_ready: Some(on_ready) })
    }
}
