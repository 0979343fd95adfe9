//! `/v1/cache`: the caches of the loaded models, and dropping those that are kept.

use crate::app::Host;
use crate::error::ApiError;
use crate::openai::answer;
use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use lowbit_engine::Stats;
use serde_json::{Value, json};
use std::sync::Arc;

/// The bytes of all caches by kind.
pub(crate) async fn show(State(host): State<Arc<Host>>) -> Response<Body> {
    let of = |(name, stats): &(String, Stats)| shown(name, stats);
    let models: Vec<Value> = host.stats().iter().map(of).collect();
    answer(&json!({"object": "cache", "models": models}))
}

fn shown(name: &str, stats: &Stats) -> Value {
    let kinds = |bytes: usize, states: usize| {
        let states = states * stats.state_bytes;
        json!({"bytes": bytes, "state_bytes": states, "kv_bytes": bytes.saturating_sub(states)})
    };
    let mut kept = kinds(stats.cached_bytes, stats.cached_states);
    kept["texts"] = stats.cached_texts.into();
    let mut running = kinds(stats.running_bytes, stats.running_states);
    running["requests"] = stats.running.into();
    let used = stats.cached_bytes + stats.running_bytes;
    json!({
        "model": name,
        "budget_bytes": stats.budget_bytes,
        "free_bytes": stats.budget_bytes.saturating_sub(used),
        "block_tokens": stats.block_tokens,
        "token_bytes": stats.token_bytes,
        "state_bytes": stats.state_bytes,
        "running": running,
        "kept": kept,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "evicted_texts": stats.evicted,
    })
}

/// Drops what is kept for later requests.
pub(crate) async fn clear(State(host): State<Arc<Host>>) -> Result<Response<Body>, ApiError> {
    let loaded = host.models.loaded();
    // Between two steps of each engine.
    let dropped = tokio::task::spawn_blocking(move || {
        let of = |app: &Arc<crate::app::App>| {
            let dropped = app.engine.drop_kept();
            json!({"model": app.served.name, "texts": dropped.texts, "bytes": dropped.bytes})
        };
        loaded.iter().map(of).collect::<Vec<Value>>()
    });
    let dropped = dropped.await.map_err(|_| ApiError::internal())?;
    Ok(answer(&json!({"object": "cache.dropped", "models": dropped})))
}
