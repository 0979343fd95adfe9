//! The scheduler with a model that writes integers, whose memory is counted and whose clock is
//! simulated.

mod caches;
mod guesses;
mod mixes;
mod router;

use super::fake::{CONTEXT, Fake};
use super::{Scheduler, check_size};
use crate::{CacheEvents, EngineError, EngineOptions, Event, Finish, Request, Sink};
use lowbit_kernels::Device;
use lowbit_models::GenerationOptions;
use router::Router;
use std::ops::ControlFlow::{Break, Continue};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const STOP: u32 = 7;

type Events = Arc<Mutex<Vec<(Duration, Event)>>>;

/// Simulated requests and what happened to them.
struct Simulation {
    fake: Fake,
    scheduler: Scheduler<Fake>,
    options: EngineOptions,
    requests: Vec<(Request, Events)>,
    /// The clock as sinks see it.
    clock: Arc<Mutex<Duration>>,
    router: Router,
}

impl Simulation {
    fn new(states: usize, budget: usize, change: impl Fn(EngineOptions) -> EngineOptions) -> Self {
        let fake = Fake::new(states);
        let device = Device::cpu(None).expect("a CPU");
        let events = CacheEvents::new(|_| {});
        let options = change(EngineOptions::new(&device).with_cache_bytes(budget)).with_cache_events(events);
        let scheduler = fake.scheduler(options.clone());
        Self { fake, scheduler, options, requests: vec![], clock: Arc::default(), router: Router::default() }
    }

    /// Submits a request, and returns its number; `breaks` events on, its sink wants no more.
    fn submit(&mut self, request: Request, breaks: Option<usize>) -> Result<usize, EngineError> {
        check_size(&self.fake.sizes, CONTEXT, &self.options, &request)?;
        let (events, clock) = (Events::default(), self.clock.clone());
        let told = events.clone();
        let sink: Sink = Box::new(move |event| {
            let mut told = told.lock().unwrap();
            told.push((*clock.lock().unwrap(), event));
            if Some(told.len()) == breaks { Break(()) } else { Continue(()) }
        });
        let id = self.requests.len();
        self.scheduler.submit(id as u64, request.clone(), sink, self.fake.clock.get());
        self.requests.push((request, events));
        Ok(id)
    }

    fn step(&mut self) {
        self.scheduler.step().expect("the device lives");
        *self.clock.lock().unwrap() = self.fake.clock.get();
        self.check();
    }

    /// Every byte is counted, once, and the budget holds; a router knows what is found.
    fn check(&mut self) {
        let events = self.scheduler.take_cache_events();
        let asked = if events.is_empty() { 0 } else { 4 };
        self.router.hear(events);
        for (request, _) in self.requests.iter().rev().take(asked) {
            self.router.check(&self.scheduler.store.tree, &request.prompt, self.fake.sizes.states > 0);
        }
        let stats = self.scheduler.stats();
        assert_eq!(self.fake.bytes.get(), stats.running_bytes + stats.cached_bytes);
        assert!(self.fake.bytes.get() <= self.options.cache_bytes, "{stats:?}");
    }

    /// Steps until all is done; too many mean that nothing gets on.
    fn finish(&mut self) {
        for _ in 0..100_000 {
            if self.scheduler.is_idle() {
                return;
            }
            self.step();
        }
        panic!("no end: {:?}", self.scheduler.stats());
    }

    fn events(&self, id: usize) -> Vec<Event> {
        self.requests[id].1.lock().unwrap().iter().map(|(_, event)| event.clone()).collect()
    }

    fn time(&self, id: usize, is: impl Fn(&Event) -> bool) -> Option<Duration> {
        self.requests[id].1.lock().unwrap().iter().find(|(_, event)| is(event)).map(|(time, _)| *time)
    }

    /// The times between the tokens of a reply.
    fn gaps(&self, id: usize) -> Vec<Duration> {
        let events = self.requests[id].1.lock().unwrap();
        let tokens = events.iter().filter(|(_, event)| matches!(event, Event::Token { .. }));
        let times: Vec<Duration> = tokens.map(|(time, _)| *time).collect();
        times.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// A request's result: tokens, cached tokens, and its end.
    fn outcome(&self, id: usize) -> (Vec<u32>, usize, Option<Finish>) {
        let (mut tokens, mut cached, mut end) = (vec![], 0, None);
        for event in self.events(id) {
            match event {
                Event::Token { id, .. } => tokens.push(id),
                Event::Started { cached_tokens } => cached = cached_tokens,
                Event::Finished { finish, usage, .. } => {
                    assert_eq!(usage.cached_tokens, cached);
                    end = Some(finish);
                }
                _ => {}
            }
        }
        (tokens, cached, end)
    }

    /// Runs one request to its end, and returns its cached tokens.
    fn cached(&mut self, request: Request) -> usize {
        let id = self.submit(request, None).expect("it fits");
        self.finish();
        self.outcome(id).1
    }

    /// Nothing is left once everything is evicted.
    fn empty(mut self) {
        let now = self.fake.clock.get();
        while self.scheduler.store.evict(None, now) {}
        assert_eq!((self.fake.bytes.get(), self.scheduler.store.tree.len()), (0, 0));
        self.router.hear(self.scheduler.take_cache_events());
        assert_eq!(self.router.len(), 0);
    }
}

/// A prompt of `shared` tokens that all prompts of a family have, and others of its own.
fn prompt(family: u32, shared: usize, own: u32, length: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..shared as u32).map(|i| 1000 + family * 100 + i % 50).collect();
    ids.extend((0..length.max(1) as u32).map(|i| 5000 + own * 97 + i));
    ids
}

fn asks(prompt: Vec<u32>, max_tokens: usize) -> Request {
    let options = GenerationOptions::default().with_max_tokens(max_tokens).with_stop_ids(vec![STOP]);
    Request::new(prompt).with_options(options)
}

fn without_stop(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request::new(prompt).with_options(GenerationOptions::default().with_max_tokens(max_tokens))
}
