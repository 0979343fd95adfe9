//! A request on its way through the scheduler.

use crate::runner::{Runner, Sampled, Sizes};
use crate::scheduler::Share;
use crate::store::Held;
use crate::{EngineError, Event, Finish, Request, Sink, Times, Usage};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Times that a request gives its caches back to others. Then it starts with room for all that it
/// may need, and keeps it.
pub(crate) const PREEMPTIONS: u32 = 2;

pub(crate) struct Sequence<R: Runner> {
    pub id: u64,
    pub request: Request,
    sink: Sink,
    /// The prompt and the tokens sampled so far.
    pub text: Vec<u32>,
    /// None before the first start. A preempted request keeps it: its next draw is the same.
    pub sampler: Option<R::Sampler>,
    /// The caches of a running request.
    pub live: Option<Live<R>>,
    pub preemptions: u32,
    /// Prompt tokens found in the prefix cache at the first start.
    pub cached: usize,
    /// Prompt tokens that the caller knows to be done.
    pub told: usize,
    /// The share of its guesses that come true.
    pub share: Share,
    /// Guesses that were verified, and those of them that came true.
    pub drafted: usize,
    pub accepted: usize,
    /// True once the caller wants no more events.
    pub is_cancelled: bool,
    pub submitted: Duration,
    pub started: Option<Duration>,
    first: Option<Duration>,
    /// When it last waited its turn: since its submission, its preemption, or its last part of the
    /// prompt.
    pub since: Duration,
}

/// The caches of a running request.
pub(crate) struct Live<R: Runner> {
    pub held: Held<R>,
    /// Tokens that have run.
    pub position: usize,
    /// Places ahead at which the states will be kept.
    pub places: Vec<usize>,
}

impl<R: Runner> Sequence<R> {
    pub(crate) fn new(id: u64, request: Request, sink: Sink, now: Duration) -> Self {
        Self {
            id,
            text: request.prompt.clone(),
            request,
            sink,
            sampler: None,
            live: None,
            preemptions: 0,
            cached: 0,
            told: 0,
            share: Share::default(),
            drafted: 0,
            accepted: 0,
            is_cancelled: false,
            submitted: now,
            started: None,
            first: None,
            since: now,
        }
    }

    /// The request's priority and the time it has waited.
    pub(crate) fn rank(&self, now: Duration, ageing: Duration) -> (i64, std::cmp::Reverse<(Duration, u64)>) {
        let waited = now.saturating_sub(self.since).as_nanos() / ageing.as_nanos().max(1);
        let raised =
            i64::from(self.request.priority).saturating_add(i64::try_from(waited).unwrap_or(i64::MAX));
        (raised, std::cmp::Reverse((self.since, self.id)))
    }

    pub(crate) fn sampled(&self) -> usize {
        self.text.len() - self.request.prompt.len()
    }

    /// Tokens that its cache must hold when it starts, `context` at most: of the reply,
    /// `reply_room`, or all if it may not be preempted again.
    pub(crate) fn room(&self, context: usize, reply_room: usize) -> usize {
        let reply = self.request.options.max_tokens;
        let reply = if self.preemptions < PREEMPTIONS { reply.min(reply_room) } else { reply };
        let text = self.request.prompt.len().saturating_add(reply).max(self.text.len() + 1);
        // A prompt without a reply has no more tokens than itself.
        text.min(context.max(self.request.prompt.len()))
    }

    pub(crate) fn is_prefilling(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.position < self.request.prompt.len())
    }

    pub(crate) fn is_decoding(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.position >= self.request.prompt.len())
    }

    pub(crate) fn bytes(&self, sizes: &Sizes) -> usize {
        self.live.as_ref().map_or(0, |live| live.held.bytes(sizes))
    }

    /// Tells the caller. A caller that panics gets no more events, and others are unharmed.
    pub(crate) fn emit(&mut self, event: Event) {
        if self.is_cancelled {
            return;
        }
        let told = catch_unwind(AssertUnwindSafe(|| (self.sink)(event)));
        self.is_cancelled = !matches!(told, Ok(flow) if flow.is_continue());
    }

    /// Takes a sampled token. Returns why the reply ends with it, if it does.
    pub(crate) fn push(&mut self, sampled: Sampled, context: usize, now: Duration) -> Option<Finish> {
        let Sampled { id, logprobs, ends } = sampled;
        let before = self.text.len();
        self.text.push(id);
        self.first.get_or_insert(now);
        if self.request.options.stop_ids.contains(&id) {
            return Some(Finish::Stop);
        }
        self.emit(Event::Token { id, logprobs });
        if ends {
            return Some(Finish::Stop);
        }
        let is_full = self.sampled() >= self.request.options.max_tokens || before >= context;
        is_full.then_some(Finish::Length)
    }

    /// The last event of a reply.
    pub(crate) fn finish(&mut self, finish: Finish, now: Duration) {
        let usage = Usage {
            prompt_tokens: self.request.prompt.len(),
            cached_tokens: self.cached,
            completion_tokens: self.sampled(),
            drafted_tokens: self.drafted,
            accepted_tokens: self.accepted,
        };
        let started = self.started.unwrap_or(now);
        let first = self.first.unwrap_or(now);
        let times = Times {
            queued: started.saturating_sub(self.submitted),
            prompt: first.saturating_sub(started),
            decode: now.saturating_sub(first),
        };
        self.emit(Event::Finished { finish, usage, times });
    }

    pub(crate) fn fail(&mut self, error: EngineError) {
        self.emit(Event::Failed(error));
    }
}
