use lowbit_models::ModelError;
use std::sync::Arc;

/// Why a request was refused, or ended without a complete reply.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum EngineError {
    /// Retry later.
    #[error("{waiting} requests are waiting, and {limit} may wait at most")]
    Overloaded { waiting: usize, limit: usize },
    /// The prompt is longer than a text may be.
    #[error("the prompt has {tokens} tokens, but a text may have {limit} at most")]
    ContextLength { tokens: usize, limit: usize },
    /// The caches of this request alone exceed the budget, so that it can never run.
    #[error("the request needs {bytes} bytes of caches, but the budget is {budget}")]
    TooLarge { bytes: usize, budget: usize },
    /// The engine takes no new requests; after [`Backend::stop`](crate::Backend::stop) also the end
    /// of those that still ran.
    #[error("the engine is shutting down")]
    Draining,
    /// The request itself is wrong: no tokens, an id outside the vocabulary, sampling options that
    /// make no sense.
    #[error(transparent)]
    Invalid(Arc<ModelError>),
    /// The model failed on this request, for instance with logits that are NaN.
    #[error(transparent)]
    Model(Arc<ModelError>),
    /// The device failed for good: all requests fail, and so do new ones.
    #[error("the device is lost: {0}")]
    DeviceLost(Arc<ModelError>),
    /// A defect of this program. All requests that ran fail; new ones are taken.
    #[error("the engine panicked: {message}")]
    Panicked { message: Arc<str> },
    /// The system gave the engine no thread.
    #[error("the engine's thread could not be started: {0}")]
    Thread(Arc<std::io::Error>),
}

impl EngineError {
    /// True if nothing can run any more.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::DeviceLost(_))
    }
}
