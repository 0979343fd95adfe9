//! The program's tests.

#[path = "../../../lowbit/tests/api/support/bigram.rs"]
mod bigram;
#[path = "../../../lowbit/tests/api/support/embedding.rs"]
mod embedding;
#[path = "../../../lowbit/tests/api/support/reranker.rs"]
mod reranker;
mod support;

mod bench_server;
mod cli;
mod compare;
mod directories;
mod embed;
mod flags;
mod forms;
mod habits;
mod hostile;
mod json;
mod outputs;
mod prompts;
mod quantize;
mod replies;
mod rerank;
mod sampling;
mod serve;
mod speculation;
mod terminal;
