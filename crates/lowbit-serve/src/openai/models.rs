//! `/v1/models`.

use crate::app::{App, Host};
use crate::error::ApiError;
use crate::models::Entry;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// The models, each under all of its names, and whether they are loaded.
pub(crate) async fn models(State(host): State<Arc<Host>>) -> Response<Body> {
    let of = |entry| Entry::names(entry).map(|name| described(&host, entry, name));
    let data: Vec<Value> = host.models.entries().iter().flat_map(of).collect();
    super::answer(&json!({"object": "list", "data": data}))
}

/// One of them. Names have slashes.
pub(crate) async fn model(
    State(host): State<Arc<Host>>,
    Path(name): Path<String>,
) -> Result<Response<Body>, ApiError> {
    match host.models.entries().iter().find(|entry| entry.is_named(&name)) {
        Some(entry) => Ok(super::answer(&described(&host, entry, &name))),
        None => Err(host.models.unknown(&name)),
    }
}

fn described(host: &Host, entry: &Entry<App>, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": host.created,
        "owned_by": "lowbit",
        "state": entry.state_name(),
        "max_model_len": entry.with(|app| app.context()),
        // Anthropic's list has these.
        "type": "model",
        "display_name": name,
    })
}
