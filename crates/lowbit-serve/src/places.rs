//! The places of requests that take turns with the engine's steps.

use crate::error::ApiError;
use axum::http::StatusCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests that have turns at a time. They alternate, pass by pass.
const RUNNING: usize = 4;
/// Requests that wait for such a place.
const WAITING: usize = 256;

/// The places of requests that have turns.
#[derive(Debug)]
pub(crate) struct Places {
    running: Arc<Semaphore>,
    /// Requests that run or wait.
    all: Arc<AtomicUsize>,
}

/// A place, which is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    _running: OwnedSemaphorePermit,
    _counted: Counted,
}

/// One of [`Places::all`].
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for Places {
    fn default() -> Self {
        Self { running: Arc::new(Semaphore::new(RUNNING)), all: Arc::default() }
    }
}

impl Places {
    /// True if no such request waits or runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.all.load(Ordering::Relaxed) == 0
    }

    /// Waits for a place.
    ///
    /// # Errors
    /// 429 while too many wait.
    pub(crate) async fn take(&self) -> Result<Place, ApiError> {
        let before = self.all.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(self.all.clone());
        if before >= RUNNING + WAITING {
            let message = format!("{WAITING} such requests are waiting already");
            return Err(ApiError::busy(StatusCode::TOO_MANY_REQUESTS, "overloaded", &message));
        }
        let running = self.running.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?;
        Ok(Place { _running: running, _counted: counted })
    }
}
