//! Serves a model over HTTP: OpenAI's chat completions, completions and responses, Anthropic's
//! messages, Ollama's chats, health, figures and tokens. The program's command for it is
//! `lowbit serve`.
//!
//! A [`Server`] takes an address; [`Server::run`] answers requests for a [`Served`] model by
//! anything that is a [`Backend`](lowbit_engine::Backend), which is usually an
//! [`Engine`](lowbit_engine::Engine). Text stays here: templates are rendered, texts tokenised and
//! replies taken apart on worker threads, and the engine sees ids alone.
//!
//! It is meant to face clients that are not trusted: bodies, headers, connections and waiting times
//! have limits ([`Limits`]), an address that other machines reach asks for a key, and other sites'
//! pages are kept out.

mod anthropic;
mod app;
mod body;
mod budget;
mod cache;
mod connection;
mod embeddings;
mod error;
mod fields;
mod form;
mod guard;
mod ids;
mod kv_events;
mod loading;
mod metrics;
mod models;
mod ollama;
mod openai;
mod openapi;
mod options;
mod own;
mod places;
mod prompt;
mod rerank;
mod responses;
mod run;
mod sampling;
mod served;
mod server;
mod stream;
mod turns;

pub use app::Log;
pub use kv_events::KvPublisher;
pub use models::{Load, Loaded, Offer};
pub use options::{Keys, Limits, MetricNames, ServeOptions};
pub use served::Served;
pub use server::Server;

use std::net::SocketAddr;

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The host's name leads to no address.
    #[error("{host}: {problem}")]
    Host {
        /// The name.
        host: String,
        /// Why.
        problem: String,
    },
    /// An address that strangers reach.
    #[error("other machines reach {host}: name a key (--api-key), or say --no-auth to serve anyone")]
    Exposed {
        /// The host.
        host: String,
    },
    /// The address cannot be taken.
    #[error("{address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The system gives it no threads, or no listener.
    #[error("the server cannot start: {0}")]
    Runtime(std::io::Error),
}
