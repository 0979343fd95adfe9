//! One file a command.

pub mod bench;
mod bench_model;
pub mod chat;
pub mod generate;
pub mod inspect;
pub mod perplexity;
pub mod quantize;
mod reply;
