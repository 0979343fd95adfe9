use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A change of what prompts find in the prefix cache, for routers that send a prompt to the engine
/// which has its start. A block is [`Stats::block_tokens`](crate::Stats::block_tokens) tokens of a
/// text with all tokens before it, and has a number of its own, in 63 bits: the same text has the
/// same numbers, in each engine of this version.
///
/// Running requests' prompts are found, too. Models with recurrent states or windows are entered at
/// checkpoints alone: a block is stored once a checkpoint stands at its end or behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheEvent {
    /// Blocks that follow each other are found from now on.
    Stored {
        /// The block before them; `None` at a text's start.
        parent: Option<u64>,
        /// Their numbers.
        blocks: Vec<u64>,
        /// Their tokens, after each other.
        tokens: Vec<u32>,
    },
    /// Blocks are found no more.
    Removed {
        /// Their numbers.
        blocks: Vec<u64>,
    },
    /// No block is found any more.
    Cleared,
}

/// Receives the changes of each step, on the engine's thread: it must not block. See
/// [`EngineOptions::with_cache_events`](crate::EngineOptions::with_cache_events).
#[derive(Clone)]
pub struct CacheEvents(Arc<dyn Fn(Vec<CacheEvent>) + Send + Sync>);

impl CacheEvents {
    /// Calls `tell` with changes, in their order.
    pub fn new(tell: impl Fn(Vec<CacheEvent>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    /// Tells changes: for implementations of [`Backend`](crate::Backend) other than the engine. A
    /// receiver that panics harms no request.
    pub fn tell(&self, events: Vec<CacheEvent>) {
        let _ = catch_unwind(AssertUnwindSafe(|| (self.0)(events)));
    }
}

impl fmt::Debug for CacheEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CacheEvents")
    }
}
