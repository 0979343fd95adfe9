//! One file per command.

pub mod bench;
pub mod chat;
mod context;
pub mod embed;
pub mod generate;
pub mod inspect;
mod learn;
mod lines;
mod logprobs;
pub mod perplexity;
mod prompts;
pub mod quantize;
mod reply;
pub mod rerank;
mod screen;
#[cfg(feature = "serve")]
pub mod serve;
pub mod setup;
