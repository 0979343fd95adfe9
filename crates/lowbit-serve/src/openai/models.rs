//! `/v1/models`.

use crate::app::App;
use crate::error::ApiError;
use crate::sampling::unknown_model;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// The models: the served one, under each of its names.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Response<Body> {
    let aliases = app.served.aliases.iter().filter(|alias| *alias != "*");
    let names = std::iter::once(&app.served.name).chain(aliases);
    let data: Vec<Value> = names.map(|name| described(&app, name)).collect();
    super::answer(&json!({"object": "list", "data": data}))
}

/// One of them. Names have slashes.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response<Body>, ApiError> {
    match app.served.is_named(&name) {
        true => Ok(super::answer(&described(&app, &name))),
        false => Err(unknown_model(&name, &app.served)),
    }
}

fn described(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": "lowbit",
        "max_model_len": app.context(),
        // Anthropic's list has these.
        "type": "model",
        "display_name": name,
    })
}
