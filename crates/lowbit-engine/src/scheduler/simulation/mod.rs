//! The scheduler with a model that writes integers, whose memory is counted and whose clock is
//! simulated.

mod caches;
mod mixes;

use super::{Scheduler, check_size};
use crate::runner::{BLOCK, Row, Runner, Sampled, Sizes};
use crate::{EngineError, EngineOptions, Event, Finish, Request, Sink};
use lowbit_kernels::{Device, KernelError};
use lowbit_models::{GenerationOptions, ModelError};
use std::cell::Cell;
use std::ops::ControlFlow::{Break, Continue};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const CONTEXT: usize = 4096;
const STOP: u32 = 7;
/// A prompt that ends with it fails when the first token is drawn.
const POISON: u32 = 666;

/// Bytes in use, freed when dropped.
struct Bytes(usize, Rc<Cell<usize>>);

impl Bytes {
    fn new(bytes: usize, all: &Rc<Cell<usize>>) -> Self {
        all.set(all.get() + bytes);
        Self(bytes, all.clone())
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.1.set(self.1.get() - self.0);
    }
}

#[derive(Clone)]
struct Fake {
    sizes: Sizes,
    clock: Rc<Cell<Duration>>,
    bytes: Rc<Cell<usize>>,
    /// The device's bytes; allocations beyond them fail.
    memory: Rc<Cell<usize>>,
}

struct FakeCache {
    /// Tokens, and whether a prefill computed them.
    tokens: Vec<(u32, bool)>,
    capacity: usize,
    _bytes: Bytes,
}

struct FakeMark {
    tokens: Vec<(u32, bool)>,
    _bytes: Bytes,
}

/// The token that the model writes after `text`: a function of the whole text.
fn next(text: impl Iterator<Item = u32>) -> u32 {
    text.fold(1u32, |hash, id| hash.wrapping_mul(31).wrapping_add(id).rotate_left(5)) % 41
}

/// The reply to `request` when it runs alone.
fn reply(request: &Request, context: usize) -> (Vec<u32>, Finish) {
    let (mut text, mut reply) = (request.prompt.clone(), vec![]);
    while reply.len() < request.options.max_tokens {
        let (id, before) = (next(text.iter().copied()), text.len());
        if request.options.stop_ids.contains(&id) {
            return (reply, Finish::Stop);
        }
        reply.push(id);
        text.push(id);
        if before >= context {
            break;
        }
    }
    (reply, Finish::Length)
}

impl Fake {
    fn new(states: usize) -> Self {
        let sizes = Sizes { per_token: 1, states, fixed: states, marks: usize::MAX, granule: BLOCK };
        Self { sizes, clock: Rc::default(), bytes: Rc::default(), memory: Rc::new(Cell::new(usize::MAX)) }
    }

    fn takes(&self, micros: usize) {
        self.clock.set(self.clock.get() + Duration::from_micros(micros as u64));
    }

    fn scheduler(&self, options: EngineOptions) -> Scheduler<Self> {
        let clock = self.clock.clone();
        Scheduler::new(self.clone(), CONTEXT, options, Box::new(move || clock.get()))
    }
}

impl Runner for Fake {
    type Cache = FakeCache;
    type Mark = FakeMark;
    type Sampler = ();

    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn cache(&self, capacity: usize) -> Result<FakeCache, EngineError> {
        if self.bytes.get() + self.sizes.bytes(capacity) > self.memory.get() {
            let (device, problem) = ("fake".into(), "out of memory".into());
            let error = ModelError::Kernel(KernelError::Gpu { device, problem });
            return Err(EngineError::Model(Arc::new(error)));
        }
        let _bytes = Bytes::new(self.sizes.bytes(capacity), &self.bytes);
        Ok(FakeCache { tokens: vec![], capacity, _bytes })
    }

    fn fork(
        &self,
        cache: &FakeCache,
        tokens: usize,
        mark: Option<&FakeMark>,
        capacity: usize,
    ) -> Result<FakeCache, EngineError> {
        assert!(capacity >= cache.capacity);
        let mut fork = FakeCache { tokens: cache.tokens.clone(), ..self.cache(capacity)? };
        self.go_back(&mut fork, tokens, mark)?;
        Ok(fork)
    }

    fn go_back(
        &self,
        cache: &mut FakeCache,
        tokens: usize,
        mark: Option<&FakeMark>,
    ) -> Result<(), EngineError> {
        assert_eq!(mark.is_some(), self.sizes.states > 0, "states need a mark");
        assert!(mark.is_none_or(|mark| mark.tokens == cache.tokens[..tokens]), "the mark is of this place");
        cache.tokens.truncate(tokens);
        assert!(cache.tokens.iter().all(|&(_, prefilled)| prefilled), "steps' keys are not for others");
        Ok(())
    }

    fn mark(&self, cache: &FakeCache) -> Result<FakeMark, EngineError> {
        Ok(FakeMark { tokens: cache.tokens.clone(), _bytes: Bytes::new(self.sizes.states, &self.bytes) })
    }

    fn make_room(&self, cache: &mut FakeCache, capacity: usize) -> Result<(), EngineError> {
        // In place.
        self.bytes.set(self.bytes.get() - self.sizes.bytes(cache.capacity));
        let grown = self.cache(capacity);
        self.bytes.set(self.bytes.get() + self.sizes.bytes(cache.capacity));
        let tokens = cache.tokens.clone();
        *cache = FakeCache { tokens, ..grown? };
        Ok(())
    }

    fn release(&self, (): &mut ()) {}

    fn sampler(&self, _: &Request) -> Result<(), EngineError> {
        Ok(())
    }

    fn prefill(
        &self,
        cache: &mut FakeCache,
        tokens: &[u32],
        sampler: Option<(&mut (), Option<usize>)>,
    ) -> Result<Option<Result<Sampled, EngineError>>, EngineError> {
        assert!(cache.tokens.len().is_multiple_of(BLOCK), "prompts are cut at blocks");
        cache.tokens.extend(tokens.iter().map(|&id| (id, true)));
        assert!(cache.tokens.len() <= cache.capacity, "there is room");
        self.takes(1000 + 10 * tokens.len());
        let id = next(cache.tokens.iter().map(|&(id, _)| id));
        let drawn = match tokens.last() {
            Some(&POISON) => Err(EngineError::Panicked { message: "NaN".into() }),
            _ => Ok(Sampled { id, logprobs: None, ends: false }),
        };
        Ok(sampler.map(|_| drawn))
    }

    fn decode(&self, rows: &mut [Row<'_, Self>]) -> Result<Vec<Result<Sampled, EngineError>>, EngineError> {
        self.takes(2000 + 100 * rows.len());
        let mut sampled = vec![];
        for row in rows {
            row.cache.tokens.push((row.token, false));
            assert!(row.cache.tokens.len() <= row.cache.capacity, "there is room");
            if row.samples {
                let id = next(row.cache.tokens.iter().map(|&(id, _)| id));
                sampled.push(Ok(Sampled { id, logprobs: None, ends: false }));
            }
        }
        Ok(sampled)
    }
}

type Events = Arc<Mutex<Vec<(Duration, Event)>>>;

/// Simulated requests and what happened to them.
struct Simulation {
    fake: Fake,
    scheduler: Scheduler<Fake>,
    options: EngineOptions,
    requests: Vec<(Request, Events)>,
    /// The clock as sinks see it.
    clock: Arc<Mutex<Duration>>,
}

impl Simulation {
    fn new(states: usize, budget: usize, change: impl Fn(EngineOptions) -> EngineOptions) -> Self {
        let fake = Fake::new(states);
        let device = Device::cpu(None).expect("a CPU");
        let options = change(EngineOptions::new(&device).with_cache_bytes(budget));
        let scheduler = fake.scheduler(options.clone());
        Self { fake, scheduler, options, requests: vec![], clock: Arc::default() }
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

    /// Every byte is counted, once, and the budget holds.
    fn check(&self) {
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
