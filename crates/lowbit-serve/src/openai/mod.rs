//! OpenAI's API.

pub(crate) mod chat;
mod chat_reply;
pub(crate) mod completions;
pub(crate) mod messages;
pub(crate) mod models;

use crate::app::{App, now};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::run::{End, Tokens};
use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, WARNING};
use axum::http::{HeaderValue, Response};
use axum::response::IntoResponse;
use lowbit::Tokenizer;
use lowbit_engine::{Logprob, TokenLogprobs};
use serde::Serialize;
use serde_json::{Value, json};

/// The fields that all chunks and answers of a request have.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Head {
    pub(crate) fn new(app: &App, start: &str, model: String) -> Self {
        Self { id: app.id(start), created: now(), model }
    }

    /// An answer or chunk of the kind `object`.
    pub(crate) fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("lowbit-", env!("CARGO_PKG_VERSION")),
            "choices": choices,
        })
    }
}

pub(crate) fn finish_reason(end: &End) -> &'static str {
    match end {
        End::Stop | End::StopText(_) => "stop",
        End::Calls => "tool_calls",
        End::Length => "length",
    }
}

/// The tokens of replies, of which `per_prompt` each share a prompt, which counts once.
pub(crate) fn usage(replies: &[Tokens], per_prompt: usize) -> Value {
    let prompts = || replies.iter().step_by(per_prompt.max(1));
    let prompt: usize = prompts().map(|tokens| tokens.prompt).sum();
    let written: usize = replies.iter().map(|tokens| tokens.written).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": prompts().map(|tokens| tokens.cached).sum::<usize>()},
        "completion_tokens_details": {
            "reasoning_tokens": replies.iter().map(|tokens| tokens.reasoning).sum::<usize>(),
        },
    })
}

/// The last chunk of a stream, with the usage alone.
fn answer_usage(head: &Head, object: &str, tokens: &[Tokens], per_prompt: usize) -> String {
    let mut chunk = head.object(object, vec![]);
    chunk["usage"] = usage(tokens, per_prompt);
    event(&chunk)
}

/// A token's log-probability, as chats have it.
pub(crate) fn logprob(tokenizer: &Tokenizer, token: &TokenLogprobs) -> Value {
    let one = |of: &Logprob| {
        let text = spelled(tokenizer, of.id);
        // A part of a character has no text of its own.
        let bytes = (!text.contains('\u{fffd}')).then(|| text.as_bytes().to_vec());
        json!({"token": text, "logprob": finite(of.logprob), "bytes": bytes})
    };
    let mut value = one(&token.token);
    value["top_logprobs"] = token.top.iter().map(one).collect();
    value
}

pub(crate) fn spelled(tokenizer: &Tokenizer, id: u32) -> String {
    tokenizer.decode(&[id]).unwrap_or_default()
}

/// As OpenAI has it, -9999 stands for a probability of 0: JSON has no infinity.
pub(crate) fn finite(logprob: f64) -> f64 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// An event of a stream.
pub(crate) fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

/// An answer in JSON.
pub(crate) fn answer(value: &impl Serialize) -> Response<Body> {
    let Ok(text) = serde_json::to_string(value) else { return ApiError::internal().into_response() };
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Fields that were left out of account, for the client to see.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warnings(Vec<String>);

/// Names that a header lists.
const NAMES: usize = 20;

impl Warnings {
    pub(crate) fn say(&mut self, warning: impl Into<String>) {
        if self.0.len() < NAMES {
            self.0.push(warning.into());
        }
    }

    /// Adds the fields that nobody took.
    pub(crate) fn unknown(&mut self, fields: &Fields) {
        fields.unknown().for_each(|name| self.say(format!("{name}: unknown field, ignored")));
    }

    /// The response with a header for them.
    pub(crate) fn on(&self, mut response: Response<Body>) -> Response<Body> {
        if self.0.is_empty() {
            return response;
        }
        let plain = |c: char| if c.is_ascii_graphic() && c != '"' && c != '\\' || c == ' ' { c } else { '?' };
        let text: String = self.0.join("; ").chars().take(1000).map(plain).collect();
        if let Ok(value) = HeaderValue::from_str(&format!("299 lowbit \"{text}\"")) {
            response.headers_mut().insert(WARNING, value);
        }
        response
    }
}
