//! Answers many requests on one model: continuous batching, a prefix cache, and one byte budget for
//! all caches. It knows token ids alone: text, templates and HTTP are the caller's, and nothing
//! here is async.
//!
//! An [`Engine`] owns a [`Model`](lowbit_models::Model) and one thread. [`Backend::submit`] takes a
//! [`Request`] and a [`Sink`], which is called on that thread with every [`Event`]; dropping the
//! [`Handle`] that it returns cancels the request.
//!
//! # Features
//!
//! `cuda`, `vulkan` and `metal` bring the devices of these names, as in `lowbit-models`; the
//! default build runs on the CPU.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod cache_events;
mod engine;
mod error;
mod guesses;
mod model;
mod options;
mod pooled;
mod prefix;
mod request;
mod runner;
mod scheduler;
mod sequence;
mod store;

pub use backend::{Backend, Dropped, Handle, Stats, Turn};
pub use cache_events::{CacheEvent, CacheEvents};
pub use engine::Engine;
pub use error::EngineError;
pub use guesses::Guesses;
pub use options::EngineOptions;
pub use request::{Event, Request, Sink, Times, Usage};

// Parts of requests and events.
pub use lowbit_kernels::ops::SampleParams;
pub use lowbit_models::{
    Constraint, Drafter, Finish, GenerationOptions, Grammar, Logprob, Predictor, TokenLogprobs,
};
