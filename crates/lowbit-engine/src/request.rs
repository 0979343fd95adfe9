use crate::EngineError;
use lowbit_models::{Finish, GenerationOptions, TokenLogprobs};
use std::ops::ControlFlow;
use std::time::Duration;

/// A prompt and how to go on from it: [`Request::new`], changed by its `with_` methods.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// Sampling and where the reply ends. The draws are those of
    /// [`Session::generate`](lowbit_models::Session::generate) with the same options.
    pub options: GenerationOptions,
    /// The number of likeliest tokens whose log-probabilities come with each token of the reply,
    /// beside the token's own. `None` means no log-probabilities at all.
    pub logprobs: Option<usize>,
    /// Prompt lengths at which other requests are likely to branch off, such as the end of the
    /// system message and tools, and the start of the last user message. Only models with recurrent
    /// states need them: their prefix cache can be entered at such places alone. They are rounded
    /// down to multiples of 64. The end of the prompt is always such a place.
    pub checkpoints: Vec<usize>,
    /// Requests of a higher priority are started first. Waiting raises a request's own, see
    /// [`EngineOptions::ageing`](crate::EngineOptions::ageing).
    pub priority: i32,
    /// The client, by any number. Of requests with equal priority, that one starts first whose
    /// client has the fewest running.
    pub client: u64,
}

impl Request {
    /// A greedy continuation of `prompt`, of up to 256 tokens.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            options: GenerationOptions::default(),
            logprobs: None,
            checkpoints: vec![],
            priority: 0,
            client: 0,
        }
    }

    /// With this sampling and these limits.
    #[must_use]
    pub fn with_options(self, options: GenerationOptions) -> Self {
        Self { options, ..self }
    }

    /// With log-probabilities, those of so many likeliest tokens beside each token's own.
    #[must_use]
    pub fn with_logprobs(self, alternatives: usize) -> Self {
        Self { logprobs: Some(alternatives), ..self }
    }

    /// With these places where other requests are likely to branch off.
    #[must_use]
    pub fn with_checkpoints(self, checkpoints: Vec<usize>) -> Self {
        Self { checkpoints, ..self }
    }

    /// Of this client.
    #[must_use]
    pub fn with_client(self, client: u64) -> Self {
        Self { client, ..self }
    }

    /// With this priority.
    #[must_use]
    pub fn with_priority(self, priority: i32) -> Self {
        Self { priority, ..self }
    }
}

/// An event of a request, in this order: `Started`, `Prompt` after each part of the prompt,
/// `Token` for each token, and exactly one of `Finished` and `Failed` at the end (`Failed` may come
/// alone). Nothing follows a [`Sink`] that returned `Break`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The request left the queue.
    Started {
        /// Tokens at the prompt's start that were found in the prefix cache.
        cached_tokens: usize,
    },
    /// A part of the prompt was read.
    Prompt {
        /// Tokens that are done, the cached ones included.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A token of the reply. The id that ends it, one of the stop ids, is not reported.
    Token {
        /// The token.
        id: u32,
        /// Its log-probability and the likeliest tokens', if the request asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// The reply is complete.
    Finished {
        /// Why it ended; `Interrupted` means that the request was cancelled.
        finish: Finish,
        /// Tokens.
        usage: Usage,
        /// Times.
        times: Times,
    },
    /// The request ended without a complete reply.
    Failed(EngineError),
}

/// Receives a request's events, on the engine's thread: it must not block. `Break` cancels the
/// request.
pub type Sink = Box<dyn FnMut(Event) -> ControlFlow<()> + Send>;

/// The tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of the prompt's tokens that were found in the prefix cache.
    pub cached_tokens: usize,
    /// Sampled tokens, the stop id included, as vLLM and llama-server count.
    pub completion_tokens: usize,
    /// Guesses that were verified, if the engine [guesses](crate::EngineOptions::guesses).
    pub drafted_tokens: usize,
    /// Those of them that became tokens.
    pub accepted_tokens: usize,
}

impl Usage {
    /// These counts: for implementations of [`Backend`](crate::Backend) other than the engine.
    pub fn new(prompt_tokens: usize, cached_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, cached_tokens, completion_tokens, drafted_tokens: 0, accepted_tokens: 0 }
    }
}

/// The times that the parts of a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Times {
    /// From [`Backend::submit`](crate::Backend::submit) until the request left the queue.
    pub queued: Duration,
    /// From there until the first token was sampled.
    pub prompt: Duration,
    /// From there to the end.
    pub decode: Duration,
}
