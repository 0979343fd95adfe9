//! The server's tests.

#[path = "../../../lowbit/tests/api/support/embedding.rs"]
mod embedding;
#[path = "../../../lowbit/tests/api/support/reranker.rs"]
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
