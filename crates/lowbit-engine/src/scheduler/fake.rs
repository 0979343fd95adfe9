//! A model for simulations: it writes integers, and its memory and its time are counted.

use super::Scheduler;
use crate::runner::{BLOCK, GuessLimits, Outcome, Part, Ran, Row, Runner, Sampled, Sizes};
use crate::{EngineError, EngineOptions, Finish, Request};
use lowbit_kernels::KernelError;
use lowbit_models::ModelError;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

pub(super) const CONTEXT: usize = 4096;
/// A prompt that ends with it fails when the first token is drawn.
pub(super) const POISON: u32 = 666;
/// A pass that reads it fails.
pub(super) const BROKEN: u32 = 667;

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
pub(super) struct Fake {
    pub sizes: Sizes,
    pub clock: Rc<Cell<Duration>>,
    pub bytes: Rc<Cell<usize>>,
    /// The device's bytes; allocations beyond them fail.
    pub memory: Rc<Cell<usize>>,
    /// The tokens of each part of each pass over prompts.
    pub passes: Rc<RefCell<Vec<Vec<usize>>>>,
    /// The microseconds of such a pass however short it is.
    pub fixed: Rc<Cell<usize>>,
    /// True if a pass keeps states between its tokens.
    pub on_the_way: Rc<Cell<bool>>,
    /// The most parts of a pass.
    pub most_parts: Rc<Cell<usize>>,
    /// Kernels that the next pass over prompts compiles, which takes a second, and those compiled
    /// so far.
    pub uncompiled: Rc<Cell<usize>>,
    pub compiled: Rc<Cell<usize>>,
    pub limits: Rc<Cell<GuessLimits>>,
    /// The tenths of guesses that are right.
    pub right: Rc<Cell<u32>>,
    /// The microseconds of a row of a step.
    pub row: Rc<Cell<usize>>,
}

pub(super) struct FakeCache {
    /// Tokens, and whether a prefill computed them.
    tokens: Vec<(u32, bool)>,
    capacity: usize,
    _bytes: Bytes,
}

pub(super) struct FakeMark {
    tokens: Vec<(u32, bool)>,
    _bytes: Bytes,
}

/// The token that the model writes after `text`: a function of the whole text.
fn next(text: impl Iterator<Item = u32>) -> u32 {
    text.fold(1u32, |hash, id| hash.wrapping_mul(31).wrapping_add(id).rotate_left(5)) % 41
}

/// The reply to `request` when it runs alone.
pub(super) fn reply(request: &Request, context: usize) -> (Vec<u32>, Finish) {
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
    pub fn new(states: usize) -> Self {
        let marks = usize::MAX;
        let (windowed, window) = (0, 0);
        let (fixed, mark) = (states, states);
        let sizes = Sizes { per_token: 1, windowed, window, states, fixed, mark, marks, granule: BLOCK };
        let (memory, fixed) = (Rc::new(Cell::new(usize::MAX)), Rc::new(Cell::new(1000)));
        let (clock, bytes, passes, on_the_way) = Default::default();
        let most_parts = Rc::new(Cell::new(usize::MAX));
        let (uncompiled, compiled) = Default::default();
        let (limits, right, row) = (Rc::default(), Rc::new(Cell::new(7)), Rc::new(Cell::new(100)));
        Self {
            sizes,
            clock,
            bytes,
            memory,
            passes,
            fixed,
            on_the_way,
            most_parts,
            uncompiled,
            compiled,
            limits,
            right,
            row,
        }
    }

    fn takes(&self, micros: usize) {
        self.clock.set(self.clock.get() + Duration::from_micros(micros as u64));
    }

    pub fn scheduler(&self, options: EngineOptions) -> Scheduler<Self> {
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

    fn most_parts(&self) -> usize {
        self.most_parts.get()
    }

    fn marks_on_the_way(&self) -> bool {
        self.on_the_way.get()
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

    fn prefill(&self, parts: &mut [Part<'_, Self>]) -> Result<Vec<Outcome>, EngineError> {
        let tokens: Vec<usize> = parts.iter().map(|part| part.tokens.len()).collect();
        assert!(!tokens.contains(&0) && !tokens.is_empty(), "each part gets on");
        self.takes(self.fixed.get() + 10 * tokens.iter().sum::<usize>());
        self.passes.borrow_mut().push(tokens);
        self.takes(1_000_000 * self.uncompiled.get());
        self.compiled.set(self.compiled.get() + self.uncompiled.take());
        if parts.iter().any(|part| part.tokens.contains(&BROKEN)) {
            return Err(EngineError::Panicked { message: "the pass failed".into() });
        }
        let mut drawn = vec![];
        for Part { cache, tokens, places, marks, draws, .. } in parts {
            let start = cache.tokens.len();
            assert!(cache.tokens.len().is_multiple_of(BLOCK), "prompts are cut at blocks");
            cache.tokens.extend(tokens.iter().map(|&id| (id, true)));
            assert!(cache.tokens.len() <= cache.capacity, "there is room");
            for &place in places.iter() {
                assert!(place > start && place % BLOCK == 0 && place <= cache.tokens.len());
                assert!(self.on_the_way.get() || place == cache.tokens.len());
                let tokens = cache.tokens[..place].to_vec();
                marks.push((place, FakeMark { tokens, _bytes: Bytes::new(self.sizes.states, &self.bytes) }));
            }
            let id = next(cache.tokens.iter().map(|&(id, _)| id));
            drawn.extend(draws.then(|| match tokens.last() {
                Some(&POISON) => Err(EngineError::Panicked { message: "NaN".into() }),
                _ => Ok(Sampled { id, logprobs: None, ends: false }),
            }));
        }
        Ok(drawn)
    }

    fn compilations(&self) -> usize {
        self.compiled.get()
    }

    fn guess_limits(&self) -> GuessLimits {
        self.limits.get()
    }

    fn decode(&self, rows: &mut [Row<'_, Self>]) -> Result<Vec<Ran>, EngineError> {
        let guesses: usize = rows.iter().map(|row| row.guesses).sum();
        assert!(guesses == 0 || rows.len() + guesses <= self.limits.get().rows);
        self.takes(2000 + self.row.get() * (rows.len() + guesses));
        let mut all = vec![];
        for Row { cache, text, samples, guesses, .. } in rows {
            assert_eq!(cache.tokens.len() + 1, text.len());
            cache.tokens.push((text[text.len() - 1], false));
            assert!(cache.tokens.len() + *guesses <= cache.capacity, "there is room");
            let mut ran = Ran { drawn: vec![], drafted: *guesses };
            let mut goes_on = *samples;
            while goes_on {
                let id = next(cache.tokens.iter().map(|&(id, _)| id));
                ran.drawn.push(Ok(Sampled { id, logprobs: None, ends: false }));
                let place = cache.tokens.len() as u32;
                let is_right = place.wrapping_mul(2_654_435_761).rotate_left(9) % 10 < self.right.get();
                goes_on = is_right && ran.drawn.len() <= *guesses;
                cache.tokens.extend(goes_on.then_some((id, false)));
            }
            all.push(ran);
        }
        Ok(all)
    }
}
