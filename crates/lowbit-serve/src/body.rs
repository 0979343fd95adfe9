//! Bodies of requests, within limits.

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use futures_util::StreamExt;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// A body, which counts against the budget while it lives.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) bytes: Vec<u8>,
    _budget: Vec<OwnedSemaphorePermit>,
}

/// Reads a body whole.
///
/// # Errors
/// 413 for one that is too long, 408 for one that does not arrive, 503 when the bodies of all
/// requests take too much memory.
pub(crate) async fn read(app: &App, body: Body) -> Result<Read, ApiError> {
    let limits = &app.options.limits;
    let mut chunks = body.into_data_stream();
    let mut read = Read { bytes: vec![], _budget: vec![] };
    loop {
        let next = tokio::time::timeout(limits.body_idle, chunks.next()).await;
        let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", "the body has not arrived");
        let Some(chunk) = next.map_err(late)? else { return Ok(read) };
        let broken = |error| {
            ApiError::new(
                StatusCode::BAD_REQUEST,
                "invalid_body",
                format!("the body cannot be read: {error}"),
            )
        };
        let chunk: Bytes = chunk.map_err(broken)?;
        if read.bytes.len() + chunk.len() > limits.body {
            let message = format!("the body has more than {} bytes", limits.body);
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message));
        }
        read._budget.push(app.bodies.take(chunk.len())?);
        read.bytes.extend_from_slice(&chunk);
    }
}

/// Reads a body, and works on its fields away from the threads that serve connections.
///
/// # Errors
/// Those of [`read`], of [`Fields::parse`] and of `work`.
pub(crate) async fn worked<T: Send + 'static>(
    app: &Arc<App>,
    body: Body,
    work: impl FnOnce(&App, Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let body = read(app, body).await?;
    app.work(move |app| work(app, Fields::parse(&body.bytes)?)).await
}
