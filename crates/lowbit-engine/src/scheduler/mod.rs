//! Decides what runs next. Knows neither threads nor channels: [`Engine`](crate::Engine) calls it,
//! and so do simulations.

mod admit;
mod cost;
#[cfg(test)]
mod fake;
mod guess;
mod run;
#[cfg(test)]
mod simulation;

use crate::runner::{BLOCK, Runner, Sizes};
use crate::sequence::Sequence;
use crate::store::Store;
use crate::{CacheEvent, Dropped, EngineError, EngineOptions, Finish, Request, Sink, Stats};
use cost::Cost;
use guess::Guessing;
pub(crate) use guess::Share;
use std::time::Duration;

/// Requests, their caches, and the order in which they run.
pub(crate) struct Scheduler<R: Runner> {
    runner: R,
    sizes: Sizes,
    options: EngineOptions,
    /// The most tokens of a text.
    context: usize,
    now: Box<dyn Fn() -> Duration>,
    /// New and preempted requests.
    waiting: Vec<Sequence<R>>,
    running: Vec<Sequence<R>>,
    store: Store<R>,
    /// The time that passes over prompts take, as measured.
    cost: Cost,
    /// The same of steps with guesses and without.
    guessing: Guessing,
    /// The time that steps left for such passes, and none has taken yet.
    saved: Duration,
    counts: Stats,
}

/// The longest text that these options let a model run.
pub(crate) fn longest(sizes: &Sizes, context: usize, options: &EngineOptions) -> usize {
    sizes.fitting(context, options.cache_bytes)
}

/// That a request can run at all: its prompt and the room that it starts with fit. `context` is the
/// model's.
pub(crate) fn check_size(
    sizes: &Sizes,
    context: usize,
    options: &EngineOptions,
    request: &Request,
) -> Result<(), EngineError> {
    let tokens = request.prompt.len();
    if tokens > context {
        return Err(EngineError::ContextLength { tokens, limit: context });
    }
    let room = tokens.saturating_add(request.options.max_tokens.min(options.reply_room)).min(context);
    let (bytes, budget) = (sizes.bytes(sizes.capacity(room)), options.cache_bytes);
    if bytes > budget {
        return Err(EngineError::TooLarge { bytes, budget });
    }
    Ok(())
}

impl<R: Runner> Scheduler<R> {
    /// `context` is the model's; `now` the time since some start.
    pub(crate) fn new(
        runner: R,
        context: usize,
        options: EngineOptions,
        now: Box<dyn Fn() -> Duration>,
    ) -> Self {
        let sizes = runner.sizes();
        let options = EngineOptions {
            max_running: options.max_running.max(1),
            reply_room: options.reply_room.max(1),
            prefill_chunk: (options.prefill_chunk - options.prefill_chunk % BLOCK).max(BLOCK),
            ..options
        };
        Self {
            context: longest(&sizes, context, &options),
            counts: Stats { budget_bytes: options.cache_bytes, ..Stats::default() },
            store: Store::new(sizes, options.cache_events.is_some()),
            waiting: vec![],
            running: vec![],
            cost: Cost::default(),
            guessing: Guessing::default(),
            saved: Duration::ZERO,
            runner,
            sizes,
            options,
            now,
        }
    }

    /// Takes a request, which [`check_size`] passed. `submitted` is when it was handed in.
    pub(crate) fn submit(&mut self, id: u64, request: Request, sink: Sink, submitted: Duration) {
        self.counts.submitted += 1;
        self.waiting.push(Sequence::new(id, request, sink, submitted));
    }

    /// Cancels a request; one that has ended is none.
    pub(crate) fn cancel(&mut self, id: u64) {
        if let Some(index) = self.waiting.iter().position(|sequence| sequence.id == id) {
            let sequence = self.waiting.swap_remove(index);
            self.end_cancelled(sequence);
        } else if let Some(index) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.retire(index);
            self.end_cancelled(sequence);
        }
    }

    fn end_cancelled(&mut self, mut sequence: Sequence<R>) {
        self.counts.cancelled += 1;
        let now = (self.now)();
        sequence.finish(Finish::Interrupted, now);
    }

    /// True if there is nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// One step: starts what fits, a token for each sequence that writes, then parts of prompts for
    /// as long as the target allows.
    ///
    /// # Errors
    /// [`EngineError::DeviceLost`]: the caller must end with [`Self::fail_all`].
    pub(crate) fn step(&mut self) -> Result<(), EngineError> {
        let start = (self.now)();
        self.counts.steps += 1;
        self.admit()?;
        let decoded = self.decode()?;
        self.counts.last_batch = decoded;
        self.prefill(start, decoded > 0)
    }

    /// Ends all requests with `error`, and forgets all caches.
    pub(crate) fn fail_all(&mut self, error: &EngineError) {
        for mut sequence in self.waiting.drain(..).chain(self.running.drain(..)) {
            self.counts.failed += 1;
            sequence.live = None;
            sequence.fail(error.clone());
        }
        self.store.clear();
    }

    /// Takes a running request out and keeps its caches for later ones: what its prefill computed.
    fn retire(&mut self, index: usize) -> Sequence<R> {
        let mut sequence = self.running.swap_remove(index);
        if let Some(live) = sequence.live.take() {
            if self.options.prefix_cache {
                self.store.keep(&self.runner, live.held, (self.now)());
            } else {
                self.store.tree.remove(live.held.id);
            }
        }
        sequence
    }

    /// Ends those whose callers want no more.
    fn sweep(&mut self) {
        while let Some(index) = self.running.iter().position(|sequence| sequence.is_cancelled) {
            self.retire(index);
            self.counts.cancelled += 1;
        }
    }

    fn end(&mut self, id: u64, outcome: Result<Finish, EngineError>) {
        let Some(index) = self.running.iter().position(|sequence| sequence.id == id) else { return };
        let now = (self.now)();
        if outcome.is_err() {
            // Caches of a failed pass are not for others.
            if let Some(live) = self.running[index].live.take() {
                self.store.tree.remove(live.held.id);
            }
        }
        let mut sequence = self.retire(index);
        // Told when its memory is free again.
        match outcome {
            Ok(finish) => {
                self.counts.finished += 1;
                sequence.finish(finish, now);
            }
            Err(error) => {
                self.counts.failed += 1;
                sequence.fail(error);
            }
        }
    }

    /// Drops all caches that no request runs on.
    pub(crate) fn drop_kept(&mut self) -> Dropped {
        let dropped = Dropped { texts: self.store.len(), bytes: self.store.bytes() };
        while self.store.evict(None, (self.now)()) {}
        dropped
    }

    /// Changes of what prompts can find, since the last call.
    pub(crate) fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.store.tree.take_events()
    }

    fn running_bytes(&self) -> usize {
        self.running.iter().map(|sequence| sequence.bytes(&self.sizes)).sum()
    }

    /// Bytes of the budget that nothing has.
    fn free(&self) -> usize {
        self.options.cache_bytes.saturating_sub(self.running_bytes() + self.store.bytes())
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            running_bytes: self.running_bytes(),
            cached_bytes: self.store.bytes(),
            cached_texts: self.store.len(),
            cached_states: self.store.states(),
            running_states: self
                .running
                .iter()
                .filter_map(|it| it.live.as_ref())
                .map(|it| it.held.states())
                .sum(),
            token_bytes: self.sizes.per_token,
            state_bytes: self.sizes.states,
            block_tokens: BLOCK,
            ..self.counts.clone()
        }
    }

    /// Requests that wait and have never run: those that the queue's bound counts.
    pub(crate) fn queued(&self) -> usize {
        self.waiting.iter().filter(|sequence| sequence.started.is_none()).count()
    }
}
