//! The memory that requests may take together.

use crate::error::ApiError;
use axum::http::StatusCode;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A unit of the memory that bodies may take together.
const UNIT: usize = 1 << 10;

/// The memory that bodies may take together.
#[derive(Debug)]
pub(crate) struct Budget(Arc<Semaphore>);

impl Budget {
    pub(crate) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new((bytes / UNIT).min(Semaphore::MAX_PERMITS))))
    }

    /// A part of it, which comes back when it is dropped.
    ///
    /// # Errors
    /// 503 where there is too little left.
    pub(crate) fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let busy =
            |_| ApiError::busy(StatusCode::SERVICE_UNAVAILABLE, "busy", "too many long requests at once");
        self.0.clone().try_acquire_many_owned(units).map_err(busy)
    }
}
