//! The library's tests.

#[path = "support/bigram.rs"]
mod bigram;
#[path = "support/embedding.rs"]
mod embedding;
#[path = "support/reranker.rs"]
mod reranker;

mod chat;
mod embed;
mod examples;
mod families;
mod rerank;
