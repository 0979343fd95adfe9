use crate::{EngineError, Request, Sink};
use std::fmt;
use std::time::Duration;

/// Answers requests: implemented by the [`Engine`](crate::Engine), and by scripted models in tests
/// of what stands above it.
pub trait Backend: Send + Sync {
    /// Takes a request. `sink` is called with its events until the last one, also when the handle
    /// was dropped.
    ///
    /// # Errors
    /// Those that are known before the request waits: [`EngineError::Overloaded`],
    /// [`EngineError::ContextLength`], [`EngineError::TooLarge`], [`EngineError::Draining`],
    /// [`EngineError::Invalid`], and [`EngineError::DeviceLost`] once the device has failed.
    fn submit(&self, request: Request, sink: Sink) -> Result<Handle, EngineError>;

    /// The most tokens that a prompt and its reply may have together: the model's context, or less
    /// where the budget holds no more.
    fn context(&self) -> usize;

    /// Waits until the engine is between two of its steps, and keeps it there while the turn lives:
    /// for work on the same device that is no reply, such as embeddings. Work for longer than a
    /// step takes its turns one by one; the engine makes a step between two turns, and turns come
    /// in the order in which they were asked for.
    ///
    /// # Errors
    /// [`EngineError::Draining`] once the engine was stopped, [`EngineError::DeviceLost`] once the
    /// device has failed.
    fn turn(&self) -> Result<Turn, EngineError>;

    /// Drops all caches that are kept for later requests, between two steps; waits for it.
    fn drop_kept(&self) -> Dropped;

    /// Figures of now, and of all so far.
    fn stats(&self) -> Stats;

    /// Takes no more requests, and returns at once. Those that wait or run are answered:
    /// [`Stats::is_idle`] tells when all are done.
    fn drain(&self);

    /// Takes no more requests, and ends those that wait or run with [`EngineError::Draining`].
    /// Returns at once.
    fn stop(&self);
}

/// A request that was submitted. Dropping it cancels the request: one that still runs ends with
/// [`Finish::Interrupted`](crate::Finish::Interrupted) before the next step. Keep it until the last
/// event.
#[must_use = "dropping a handle cancels its request"]
pub struct Handle(Box<dyn Fn() + Send + Sync>);

impl Handle {
    /// A handle that calls `cancel` when it is dropped, also if the request has ended by then.
    pub fn new(cancel: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Box::new(cancel))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle")
    }
}

/// The time between two steps of an engine, see [`Backend::turn`]. Dropping it lets the engine go
/// on.
#[must_use = "dropping a turn ends it"]
pub struct Turn {
    /// Its drop is the end.
    _end: Box<dyn Send>,
}

impl Turn {
    /// A turn that ends when `end` is dropped.
    pub fn new(end: impl Send + 'static) -> Self {
        Self { _end: Box::new(end) }
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turn")
    }
}

/// Caches that were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dropped {
    /// Texts.
    pub texts: usize,
    /// Their bytes.
    pub bytes: usize,
}

impl Dropped {
    /// These counts: for implementations of [`Backend`] other than the engine.
    pub fn new(texts: usize, bytes: usize) -> Self {
        Self { texts, bytes }
    }
}

/// Figures of an engine: of now, and of the time since its start.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Requests that wait, the preempted ones included.
    pub waiting: usize,
    /// Requests whose prompt is read or whose reply is written.
    pub running: usize,
    /// True if no new requests are taken.
    pub draining: bool,
    /// True once the device has failed for good.
    pub lost: bool,
    /// The budget of all caches, in bytes.
    pub budget_bytes: usize,
    /// Bytes of the running requests' caches.
    pub running_bytes: usize,
    /// Bytes of the caches that are kept for later requests.
    pub cached_bytes: usize,
    /// Texts whose caches are kept for later requests.
    pub cached_texts: usize,
    /// Recurrent states among the kept caches and among those of running requests, of
    /// [`Self::state_bytes`] each: a sequence's own, and those at places to go back to.
    pub cached_states: usize,
    /// As [`Self::cached_states`], of running requests.
    pub running_states: usize,
    /// Bytes of a token's keys and values.
    pub token_bytes: usize,
    /// Bytes of a sequence's recurrent states; 0 for models of attention alone.
    pub state_bytes: usize,
    /// Tokens per block of the prefix cache.
    pub block_tokens: usize,
    /// Requests that were taken.
    pub submitted: u64,
    /// Requests that got a complete reply.
    pub finished: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Requests that failed after they were taken.
    pub failed: u64,
    /// Times that a request gave its caches back to others and started anew.
    pub preempted: u64,
    /// Texts whose kept caches were dropped for room.
    pub evicted: u64,
    /// Tokens of the prompts of started requests.
    pub prompt_tokens: u64,
    /// Those found in the prefix cache.
    pub cached_tokens: u64,
    /// Sampled tokens.
    pub completion_tokens: u64,
    /// Guesses of next tokens that were verified.
    pub drafted_tokens: u64,
    /// Those of them that became tokens.
    pub accepted_tokens: u64,
    /// Tokens that were computed once more after a preemption.
    pub recomputed_tokens: u64,
    /// Steps.
    pub steps: u64,
    /// Sequences in the last step's batch.
    pub last_batch: usize,
    /// Passes in which replies got a token each.
    pub decode_passes: u64,
    /// Sequences in all of these.
    pub decode_rows: u64,
    /// The time that they took.
    pub decode_time: Duration,
    /// Passes over prompts.
    pub prefill_passes: u64,
    /// Tokens in all of these.
    pub prefill_tokens: u64,
    /// The time that they took, first tokens included.
    pub prefill_time: Duration,
}

impl Stats {
    /// True if no request waits or runs.
    pub fn is_idle(&self) -> bool {
        self.waiting == 0 && self.running == 0
    }
}
