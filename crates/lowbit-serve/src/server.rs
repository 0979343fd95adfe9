//! The server: its address, its routes, and its end.

use crate::app::{App, Host, Log};
use crate::connection::accept;
use crate::error::ApiError;
use crate::guard::guard;
use crate::models::{Models, Offer};
use crate::options::ServeOptions;
use crate::served::Served;
use crate::{ServeError, anthropic, cache, embeddings, ollama, openai, openapi, own, rerank, responses};
use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use lowbit_engine::Backend;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

/// Time between two looks at whether to stop, and at whether all has ended.
const LOOK: Duration = Duration::from_millis(20);
/// Time that connections get to close after the last reply.
const CLOSE: Duration = Duration::from_secs(1);

/// An address that is taken. It serves nothing before [`Self::run`]: a model can be loaded in
/// between, and clients wait.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    options: ServeOptions,
}

impl Server {
    /// Takes the address.
    ///
    /// # Errors
    /// [`ServeError::Host`] and [`ServeError::Exposed`] as [`ServeOptions::address`] has them,
    /// [`ServeError::Listen`] for one that another program has.
    pub fn bind(options: ServeOptions) -> Result<Self, ServeError> {
        let address = options.address()?;
        let failed = |error| ServeError::Listen { address, error };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, options })
    }

    /// The address, with the port that was found for port 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests for `served` by `engine` until `stop` says true, which is called some 50
    /// times a second. From then on new requests are refused with 503, and running ones have
    /// [`ServeOptions::drain`] to end; what still runs then ends with an error. `log` gets a line
    /// per request.
    ///
    /// # Errors
    /// [`ServeError::Runtime`] when the system gives it no threads.
    pub fn run(
        self,
        served: Served,
        engine: Arc<dyn Backend>,
        log: Log,
        stop: impl Fn() -> bool,
    ) -> Result<(), ServeError> {
        let host = Arc::new(Host::new(Models::one(&served), self.options.clone(), log));
        host.models.put(App::new(host.clone(), served, engine));
        self.serve(host, stop)
    }

    /// As [`Self::run`], with models that are loaded when a request names them, `most` at a time:
    /// one that was not used for longest goes for another, with its caches, once nothing runs on
    /// it.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub fn run_offered(
        self,
        offers: Vec<Offer>,
        most: usize,
        log: Log,
        stop: impl Fn() -> bool,
    ) -> Result<(), ServeError> {
        let host = Arc::new(Host::new(Models::offered(offers, most), self.options.clone(), log));
        self.serve(host, stop)
    }

    fn serve(self, host: Arc<Host>, stop: impl Fn() -> bool) -> Result<(), ServeError> {
        let runtime = Builder::new_multi_thread().thread_name("http").enable_all().build();
        let runtime: Runtime = runtime.map_err(ServeError::Runtime)?;
        let drain = self.options.drain;
        let (closing, closed) = watch::channel(false);
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(self.listener).map_err(ServeError::Runtime)?;
            let router = routes(host.clone());
            tokio::spawn(accept(listener, host.clone(), router, closed));
            while !stop() {
                tokio::time::sleep(LOOK).await;
            }
            host.drain();
            wait(drain, || host.is_idle()).await;
            host.end();
            wait(CLOSE, || host.is_idle()).await;
            closing.send_replace(true);
            // Each connection has a receiver, and the loop that takes them.
            wait(CLOSE, || closing.receiver_count() == 0).await;
            Ok(())
        })?;
        runtime.shutdown_timeout(CLOSE);
        host.models.clear();
        Ok(())
    }
}

/// Waits until `done`, for `limit` at most.
async fn wait(limit: Duration, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() && start.elapsed() < limit {
        tokio::time::sleep(LOOK).await;
    }
}

fn routes(host: Arc<Host>) -> Router {
    Router::new()
        .route("/", get(own::page))
        .route("/page.js", get(own::script))
        .route("/page.css", get(own::style))
        .route("/openapi.json", get(openapi::show))
        .route("/health", get(own::health))
        .route("/health/live", get(own::live))
        .route("/health/ready", get(own::ready))
        .route("/metrics", get(own::metrics))
        .route("/tokenize", post(own::tokenize))
        .route("/detokenize", post(own::detokenize))
        .route("/apply-template", post(own::apply_template))
        .route("/v1/cache", get(cache::show).delete(cache::clear))
        .route("/v1/models", get(openai::models::models))
        .route("/v1/models/{*name}", get(openai::models::model))
        .route("/v1/chat/completions", post(openai::chat::chat))
        .route("/v1/completions", post(openai::completions::completions))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v2/rerank", post(rerank::rerank))
        .route("/rerank", post(rerank::rerank))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(embeddings::ollama))
        .route("/api/embeddings", post(embeddings::ollama_one))
        .route("/api/tags", get(ollama::tags))
        .route("/api/show", post(ollama::show))
        .route("/api/version", get(ollama::version))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(host.clone(), guard))
        .with_state(host)
}

async fn unknown(uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "unknown_path", format!("there is no {}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {method}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}
