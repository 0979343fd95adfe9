//! One file per command.

pub mod bench;
mod bench_model;
mod bench_scaling;
pub mod chat;
mod compare;
mod context;
pub mod generate;
pub mod inspect;
mod learn;
mod lines;
mod logprobs;
pub mod perplexity;
pub mod quantize;
mod reply;
mod screen;
pub mod setup;
