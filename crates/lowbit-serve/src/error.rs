//! Errors of requests, and their form in each API.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use serde_json::{Value, json};

/// Bytes of a message that are sent: it may quote a request.
const LONGEST: usize = 2000;

/// Why a request is refused or has failed.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// OpenAI's `code`.
    pub(crate) code: &'static str,
    pub(crate) message: String,
    /// The field that is wrong.
    pub(crate) param: Option<String>,
    /// Seconds after which trying again makes sense.
    pub(crate) retry_after: Option<u32>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = lowbit::files::shown(&message.into()).to_string();
        let message = cut(message);
        Self { status, code, message, param: None, retry_after: None }
    }

    /// 400 for a field of the request; the message names it.
    pub(crate) fn field(name: &str, problem: impl std::fmt::Display) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_value", format!("{name}: {problem}"));
        Self { param: Some(cut(name.to_string())), ..error }
    }

    /// 400 for what this server does not do.
    pub(crate) fn unsupported(name: &str, problem: impl std::fmt::Display) -> Self {
        Self { code: "unsupported_value", ..Self::field(name, problem) }
    }

    /// 400 for a prompt that is longer than the context.
    pub(crate) fn context(tokens: usize, limit: usize) -> Self {
        let message =
            format!("the prompt has {tokens} tokens, but the context is {limit} tokens: nothing is cut");
        Self::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
    }

    /// 429 or 503 for a server that has no room now.
    pub(crate) fn busy(status: StatusCode, code: &'static str, message: &str) -> Self {
        Self { retry_after: Some(1), ..Self::new(status, code, message) }
    }

    /// 503: the server ends.
    pub(crate) fn stopping() -> Self {
        Self::busy(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the server is stopping")
    }

    /// 500 with no more than that it happened.
    pub(crate) fn internal() -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal_error",
            "the server has made a mistake; its log says more",
        )
    }

    /// The error in the form of `dialect`, as a body or as an event of a stream.
    pub(crate) fn body(&self, dialect: Dialect) -> Value {
        match dialect {
            Dialect::OpenAi => json!({"error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
            }}),
            Dialect::Anthropic => json!({"type": "error", "error": {
                "type": self.anthropic_type(),
                "message": self.message,
            }}),
            Dialect::Ollama => json!({"error": self.message}),
        }
    }

    fn openai_type(&self) -> &'static str {
        match self.status.as_u16() {
            429 => "rate_limit_error",
            401 | 403 => "authentication_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    pub(crate) fn response(&self, dialect: Dialect) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body(dialect).to_string()));
        *response.status_mut() = self.status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// The guard around all handlers gives it the form of the path's API.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status;
        response.extensions_mut().insert(self);
        response
    }
}

/// The form of an API's errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Dialect {
    /// The API that a path belongs to.
    pub(crate) fn of(path: &str) -> Self {
        match path {
            _ if path.starts_with("/v1/messages") => Self::Anthropic,
            _ if path.starts_with("/api/") => Self::Ollama,
            _ => Self::OpenAi,
        }
    }
}

/// The last place of `text` at `index` or before that is between two characters.
pub(crate) fn boundary(text: &str, index: usize) -> usize {
    (0..=index.min(text.len())).rev().find(|&index| text.is_char_boundary(index)).unwrap_or(0)
}

/// The start of `text`, of [`LONGEST`] bytes at most.
fn cut(mut text: String) -> String {
    if text.len() > LONGEST {
        text.truncate(boundary(&text, LONGEST));
        text.push_str(" ..");
    }
    text
}
