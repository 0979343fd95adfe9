//! The layer around all handlers: who may call, errors in the form of each API, panics, and the
//! log.

use crate::app::{Host, Record};
use crate::error::{ApiError, Dialect};
use crate::openapi;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, AUTHORIZATION,
    HOST, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};
use axum::middleware::Next;
use futures_util::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// Answers without a key: they say nothing of what others do.
fn is_open(path: &str) -> bool {
    ["/", "/page.js", "/page.css", "/health"].contains(&path) || path.starts_with("/health/")
}

/// Lets a request through to its handler.
pub(crate) async fn guard(State(host): State<Arc<Host>>, mut request: Request, next: Next) -> Response<Body> {
    let path = request.uri().path();
    let dialect = Dialect::of(path);
    let known = openapi::counted(path);
    let client = shown_key(request.headers()).map_or(0, |key| host.client(key));
    let record = Record::new(host.clone(), (request.method().to_string(), known), client);
    let origin = match admit(&host, path, request.headers()) {
        Ok(origin) => origin,
        Err(error) => return finish(error.response(dialect), dialect, &record, None),
    };
    if request.method() == Method::OPTIONS && origin.is_some() {
        return finish(preflight(), dialect, &record, origin);
    }
    request.extensions_mut().insert(record.clone());
    let response = match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => {
            host.metrics.panicked();
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            (host.log)(&format!("error: a handler of {known} panicked: {text}"));
            ApiError::internal().response(dialect)
        }
    };
    finish(response, dialect, &record, origin)
}

/// Checks that a request may come in. Returns the origin of a page that is not the server's own.
fn admit(host: &Host, path: &str, headers: &HeaderMap) -> Result<Option<HeaderValue>, ApiError> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let forbidden = |message: String| ApiError::new(StatusCode::FORBIDDEN, "forbidden", message);
    let named = text(HOST).unwrap_or_default();
    if !host.options.knows_host(named) {
        return Err(forbidden(format!(
            "the host {named} is not this server's: --allowed-host names further ones"
        )));
    }
    let origin = headers.get(ORIGIN);
    if let Some(origin) = origin {
        let origin = origin.to_str().unwrap_or_default();
        if !host.options.knows_origin(origin, named) {
            return Err(forbidden(format!(
                "pages of {origin} may not call this server: --allowed-origin names those that may"
            )));
        }
    }
    let keys = &host.options.keys;
    if !keys.is_empty() && !is_open(path) && !shown_key(headers).is_some_and(|key| keys.has(key)) {
        let message = "a key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message));
    }
    let own = |origin: &&HeaderValue| {
        !host.options.origins.iter().any(|known| known.as_bytes().eq_ignore_ascii_case(origin.as_bytes()))
    };
    Ok(origin.filter(|origin| !own(origin)).cloned())
}

/// The key that a request shows.
fn shown_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| text(HeaderName::from_static("x-api-key")))
}

/// The answer to a browser's question before a page of another origin sends a request.
fn preflight() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, authorization"));
    response
}

/// Gives errors the form of the path's API, and says the status.
fn finish(
    mut response: Response<Body>,
    dialect: Dialect,
    record: &Arc<Record>,
    origin: Option<HeaderValue>,
) -> Response<Body> {
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        record.say(error.code.into());
        response = error.response(dialect);
    }
    record.status(response.status());
    if let Some(origin) = origin {
        response.headers_mut().insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().insert(VARY, HeaderValue::from_static("origin"));
    }
    response
}
