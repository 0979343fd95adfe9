//! The server's tests.

#[path = "../../../lowbit/tests/library/support/embedding.rs"]
mod embedding;
#[path = "../../../lowbit/tests/library/support/reranker.rs"]
mod reranker;
mod support;

mod agents;
mod forms;
mod hostile;
mod models;
mod more_apis;
mod openapi;
mod replies;
mod requests;
mod safety;
mod texts;
