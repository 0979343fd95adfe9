//! Bodies of requests, within limits.

use crate::app::{App, Host};
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
pub(crate) async fn read(host: &Host, body: Body) -> Result<Read, ApiError> {
    let limits = &host.options.limits;
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
        read._budget.push(host.bodies.take(chunk.len())?);
        read.bytes.extend_from_slice(&chunk);
    }
}

/// Reads a body, finds the model that it names, and works on its fields away from the threads that
/// serve connections. Returns the model, too.
///
/// # Errors
/// Those of [`read`], [`Fields::parse`], [`Host::model`] and `work`.
pub(crate) async fn worked<T: Send + 'static>(
    host: &Arc<Host>,
    body: Body,
    work: impl FnOnce(&App, Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<(Arc<App>, T), ApiError> {
    let body = read(host, body).await?;
    let parsed = host.work(move || Ok((Fields::parse(&body.bytes)?, body)));
    let (fields, body) = parsed.await?;
    let app = host.model(fields.text("model")).await?;
    let done = host.work(move || {
        let _held = body;
        let done = work(&app, fields)?;
        Ok((app, done))
    });
    done.await
}
