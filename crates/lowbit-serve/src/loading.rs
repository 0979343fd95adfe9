//! Loads models that are asked for, and unloads others for them.

use crate::app::{App, Host};
use crate::error::ApiError;
use crate::models::{Entry, State};
use axum::http::StatusCode;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that a model waits for a place.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two looks at whether there is one.
const LOOK: Duration = Duration::from_millis(5);

impl Host {
    /// The model that a request names, loaded if it was not.
    ///
    /// # Errors
    /// 404 for a name that no model has, 500 if it cannot be loaded, 503 if there is no place for
    /// it.
    pub(crate) async fn model(self: &Arc<Self>, name: Option<&str>) -> Result<Arc<App>, ApiError> {
        let entry = self.models.find(name)?;
        if let Some(app) = self.models.used(entry) {
            return Ok(app);
        }
        let index = self.models.entries().iter().position(|one| std::ptr::eq(one, entry)).unwrap_or(0);
        let loading = self.models.loading.clone().lock_owned().await;
        let host = self.clone();
        // It goes on if the client goes: the next one that asks has the model.
        let loaded = tokio::task::spawn_blocking(move || {
            let _loading = loading;
            let entry = &host.models.entries()[index];
            if host.models.used(entry).is_none() {
                load(&host, entry)?;
            }
            host.models.used(entry).ok_or_else(ApiError::internal)
        });
        loaded.await.unwrap_or_else(|_| Err(ApiError::stopping()))
    }
}

/// Loads a model, and waits for it.
fn load(host: &Arc<Host>, entry: &Entry<App>) -> Result<(), ApiError> {
    host.admit()?;
    let Some(load) = &entry.load else { return Err(ApiError::internal()) };
    make_place(host)?;
    entry.set(State::Loading);
    let loaded = catch_unwind(AssertUnwindSafe(load));
    let loaded = loaded.unwrap_or_else(|_| Err("the loader panicked".into()));
    let (served, engine) = loaded.map_err(|problem| {
        entry.set(State::Failed);
        (host.log)(&format!("error: {}: {problem}", lowbit::files::shown(&entry.name)));
        let message = format!("model {} cannot be loaded; the server's log says why", entry.name);
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "model_not_loaded", message)
    })?;
    if host.is_draining() {
        engine.drain();
    }
    entry.set(State::Loaded(Arc::new(App::new(host.clone(), served, engine)), 0));
    Ok(())
}

/// Unloads the models whose last use is longest ago, until there is a place for one more.
///
/// # Errors
/// 503 if all of them are in use, and stay so for a while.
fn make_place(host: &Host) -> Result<(), ApiError> {
    let (models, start) = (&host.models, Instant::now());
    loop {
        let loaded = models.entries().iter().filter_map(|entry| entry.with(|_| ())).count();
        if loaded < models.most {
            return Ok(());
        }
        let idle = models.entries().iter().filter_map(|entry| {
            let since = entry.idle_since(|app| app.engine.stats().is_idle())?;
            entry.load.is_some().then_some((since, entry))
        });
        if let Some((_, entry)) = idle.min_by_key(|(since, _)| *since) {
            entry.set(State::Unloaded);
            (host.log)(&format!("{}: unloaded", lowbit::files::shown(&entry.name)));
        } else if start.elapsed() < PATIENCE {
            // A reply that has just ended is in its engine's figures until the step has.
            std::thread::sleep(LOOK);
        } else {
            let message = format!("all {loaded} models that are loaded are in use");
            return Err(ApiError::busy(StatusCode::SERVICE_UNAVAILABLE, "models_busy", &message));
        }
    }
}
