//! Paths of no other API: health, figures, tokens, and the page.

use crate::app::Host;
use crate::body;
use crate::error::ApiError;
use crate::openai::chat::conversation;
use crate::openai::{Warnings, answer, spelled};
use crate::prompt::{check, encode};
use crate::sampling::model;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderValue, Response, StatusCode};
use lowbit_engine::Stats;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The process runs.
pub(crate) async fn live() -> Response<Body> {
    answer(&json!({"status": "ok"}))
}

/// Requests are taken: 200, or 503 while the server drains or where the devices of all loaded
/// models are lost.
pub(crate) async fn ready(State(host): State<Arc<Host>>) -> Response<Body> {
    let is_ready = host.is_ready();
    let mut response = answer(&json!({"status": if is_ready { "ok" } else { "unavailable" }}));
    if !is_ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

/// As [`ready`], with what the engine does.
pub(crate) async fn health(State(host): State<Arc<Host>>) -> Response<Body> {
    let (is_ready, stats) = (host.is_ready(), host.stats());
    let sum = |of: fn(&Stats) -> usize| stats.iter().map(|(_, stats)| of(stats)).sum::<usize>();
    let states: Map<String, Value> =
        host.models.entries().iter().map(|one| (one.name.clone(), one.state_name().into())).collect();
    let mut response = answer(&json!({
        "status": if is_ready { "ok" } else { "unavailable" },
        "running": sum(|stats| stats.running),
        "waiting": sum(|stats| stats.waiting),
        "draining": host.is_draining(),
        "device_lost": stats.iter().any(|(_, stats)| stats.lost),
        "models": states,
    }));
    if !is_ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

/// Figures for Prometheus.
pub(crate) async fn metrics(State(host): State<Arc<Host>>) -> Result<Response<Body>, ApiError> {
    let text = host.metrics.text(host.stats()).map_err(|_| ApiError::internal())?;
    let mut response = Response::new(Body::from(text));
    let of = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, of);
    Ok(response)
}

/// The ids of a text (`content`, or vLLM's `prompt`), or of a conversation (`messages`).
pub(crate) async fn tokenize(State(host): State<Arc<Host>>, body: Body) -> Result<Response<Body>, ApiError> {
    let value = body::worked(&host, body, |app, mut fields| {
        let served = &app.served;
        let mut warnings = Warnings::default();
        model(&mut fields, served)?;
        let (text, prompt): (Option<String>, Option<String>) =
            (fields.take("content")?, fields.take("prompt")?);
        let special = fields.take("add_special")?.or(fields.take("add_special_tokens")?).unwrap_or(false);
        let pieces = fields.take("with_pieces")?.unwrap_or(false);
        let ids = match text.or(prompt) {
            Some(text) => encode(|| served.tokenizer.encode(&text, special))?,
            None => conversation(app, &mut fields, &mut warnings)?.prompt(served)?.ids.to_vec(),
        };
        warnings.unknown(&fields);
        let tokens: Vec<Value> = match pieces {
            true => {
                ids.iter().map(|&id| json!({"id": id, "piece": spelled(&served.tokenizer, id)})).collect()
            }
            false => ids.iter().map(|&id| id.into()).collect(),
        };
        let value = json!({"tokens": tokens, "count": ids.len(), "max_model_len": app.context()});
        Ok((value, warnings))
    });
    Ok(warned(value.await?.1))
}

/// The text of ids (`tokens`).
pub(crate) async fn detokenize(
    State(host): State<Arc<Host>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    let value = body::worked(&host, body, |app, mut fields| {
        let mut warnings = Warnings::default();
        model(&mut fields, &app.served)?;
        let ids: Vec<u32> = fields.need("tokens")?;
        warnings.unknown(&fields);
        check(&app.served, &ids, "tokens")?;
        let text = app.served.tokenizer.decode(&ids);
        let text = text.map_err(|error| ApiError::field("tokens", error))?;
        // llama.cpp's name, and vLLM's.
        Ok((json!({"content": text, "prompt": text}), warnings))
    });
    Ok(warned(value.await?.1))
}

/// The text that the model reads for a conversation.
pub(crate) async fn apply_template(
    State(host): State<Arc<Host>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    let value = body::worked(&host, body, |app, mut fields| {
        let mut warnings = Warnings::default();
        model(&mut fields, &app.served)?;
        let conversation = conversation(app, &mut fields, &mut warnings)?;
        warnings.unknown(&fields);
        Ok((json!({"prompt": conversation.render(&app.served)?.0}), warnings))
    });
    Ok(warned(value.await?.1))
}

/// The answer with the warnings about its request.
fn warned((value, warnings): (Value, Warnings)) -> Response<Body> {
    warnings.on(answer(&value))
}

/// A chat in a browser.
pub(crate) async fn page() -> Response<Body> {
    let mut response = file(include_str!("page/page.html"), "text/html; charset=utf-8");
    let policy = HeaderValue::from_static(PAGE_POLICY);
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    response
}

pub(crate) async fn script() -> Response<Body> {
    file(include_str!("page/page.js"), "text/javascript; charset=utf-8")
}

pub(crate) async fn style() -> Response<Body> {
    file(include_str!("page/page.css"), "text/css; charset=utf-8")
}

fn file(text: &'static str, of: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(of));
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The page loads its own script and style, and talks to this server.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
