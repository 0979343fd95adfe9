use crate::{CacheEvents, Guesses};
use lowbit_kernels::Device;
use std::time::Duration;

/// An engine's limits: [`EngineOptions::new`], changed by its `with_` methods.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineOptions {
    /// The most requests that run at the same time.
    pub max_running: usize,
    /// The most requests that wait; more are refused with
    /// [`EngineError::Overloaded`](crate::EngineError::Overloaded).
    pub max_waiting: usize,
    /// The budget of all caches together, those of running requests and those that are kept for
    /// later ones, in bytes.
    pub cache_bytes: usize,
    /// True if caches are kept for later requests.
    pub prefix_cache: bool,
    /// The time between two tokens of a reply that prompts of others may not exceed on average, as
    /// far as passes of 64 tokens allow. No two tokens are more than twice that apart, and only
    /// where a pass costs much however short it is: then one long pass replaces several.
    pub target_inter_token: Duration,
    /// The most tokens of all prompts in a pass, rounded down to a multiple of 64 (at least 64).
    pub prefill_chunk: usize,
    /// The time that raises a waiting request's priority by one.
    pub ageing: Duration,
    /// Tokens of a reply for which a request has room when it starts. More room is made as the
    /// reply grows; where the budget is short then, the youngest request gives its caches back.
    pub reply_room: usize,
    /// The source of guesses of the next tokens, of which a step verifies several; without one each
    /// step gives a token.
    pub guesses: Option<Guesses>,
    /// The receiver of changes of the prefix cache, if any is wanted.
    pub cache_events: Option<CacheEvents>,
}

/// [`EngineOptions::cache_bytes`] by default.
const CACHE_BYTES: usize = 4 << 30;

impl EngineOptions {
    /// The defaults on `device`: 25 ms between tokens and passes of 4096 prompt tokens on a GPU,
    /// 250 ms and 512 on a CPU; 64 requests that run, 256 that wait; 4 GiB of caches.
    pub fn new(device: &Device) -> Self {
        let (inter_token, prefill_chunk) = match device {
            Device::Cpu(_) => (250, 512),
            Device::Gpu(_) => (25, 4096),
        };
        Self {
            max_running: 64,
            max_waiting: 256,
            cache_bytes: CACHE_BYTES,
            prefix_cache: true,
            target_inter_token: Duration::from_millis(inter_token),
            prefill_chunk,
            ageing: Duration::from_secs(5),
            reply_room: 512,
            guesses: None,
            cache_events: None,
        }
    }

    /// With at most so many requests that run at the same time (at least one).
    #[must_use]
    pub fn with_max_running(self, max_running: usize) -> Self {
        Self { max_running, ..self }
    }

    /// With at most so many requests that wait (at least one).
    #[must_use]
    pub fn with_max_waiting(self, max_waiting: usize) -> Self {
        Self { max_waiting, ..self }
    }

    /// With this budget of all caches, in bytes.
    #[must_use]
    pub fn with_cache_bytes(self, cache_bytes: usize) -> Self {
        Self { cache_bytes, ..self }
    }

    /// With or without caches that are kept for later requests.
    #[must_use]
    pub fn with_prefix_cache(self, prefix_cache: bool) -> Self {
        Self { prefix_cache, ..self }
    }

    /// With this average time between two tokens of a reply while others' prompts are read.
    #[must_use]
    pub fn with_target_inter_token(self, target_inter_token: Duration) -> Self {
        Self { target_inter_token, ..self }
    }

    /// With at most so many tokens of prompts in a pass.
    #[must_use]
    pub fn with_prefill_chunk(self, prefill_chunk: usize) -> Self {
        Self { prefill_chunk, ..self }
    }

    /// With this time that raises a waiting request's priority by one.
    #[must_use]
    pub fn with_ageing(self, ageing: Duration) -> Self {
        Self { ageing, ..self }
    }

    /// With guesses of the next tokens from this source.
    #[must_use]
    pub fn with_guesses(self, guesses: Guesses) -> Self {
        Self { guesses: Some(guesses), ..self }
    }

    /// With room for so many tokens of a reply when it starts (at least one).
    #[must_use]
    pub fn with_reply_room(self, reply_room: usize) -> Self {
        Self { reply_room, ..self }
    }

    /// With a receiver of changes of the prefix cache.
    #[must_use]
    pub fn with_cache_events(self, cache_events: CacheEvents) -> Self {
        Self { cache_events: Some(cache_events), ..self }
    }
}
