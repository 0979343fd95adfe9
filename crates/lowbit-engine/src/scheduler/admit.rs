//! Who starts, in which memory, and who gives it back.

use super::Scheduler;
use crate::prefix::{Found, HolderId};
use crate::runner::{BLOCK, Runner};
use crate::sequence::{Live, PREEMPTIONS, Sequence};
use crate::store::Held;
use crate::{EngineError, Event, Request};
use std::cmp::Reverse;

/// The result for a request that was to start.
enum Start {
    Done,
    /// Another request is reading what its prompt begins with.
    Later,
    /// The budget is short.
    Short,
}

impl<R: Runner> Scheduler<R> {
    /// Starts waiting requests, in order of priority, of what their clients have running, and of
    /// age, until one does not fit. None overtakes one that waits for memory, or large requests
    /// would starve.
    pub(super) fn admit(&mut self) -> Result<(), EngineError> {
        let mut later = vec![];
        while self.running.len() < self.options.max_running {
            let now = (self.now)();
            let ready = self.waiting.iter().enumerate().filter(|(_, sequence)| !later.contains(&sequence.id));
            let first = ready.max_by_key(|(_, sequence)| {
                let (raised, age) = sequence.rank(now, self.options.ageing);
                (raised, Reverse(self.running_of(sequence.request.client)), age)
            });
            let Some((index, sequence)) = first else { break };
            let id = sequence.id;
            match self.start(index) {
                Ok(Start::Done) => self.sweep(),
                Ok(Start::Later) => later.push(id),
                Ok(Start::Short) => break,
                Err(error) if error.is_lost() => return Err(error),
                Err(error) => {
                    self.counts.failed += 1;
                    self.waiting.swap_remove(index).fail(error);
                }
            }
        }
        Ok(())
    }

    /// Running requests of a client.
    fn running_of(&self, client: u64) -> usize {
        self.running.iter().filter(|sequence| sequence.request.client == client).count()
    }

    /// Starts a waiting request.
    fn start(&mut self, index: usize) -> Result<Start, EngineError> {
        let sequence = &self.waiting[index];
        let capacity = self.sizes.capacity(sequence.room(self.context, self.options.reply_room));
        let mut found = Found::default();
        if self.options.prefix_cache {
            let prompt = &sequence.request.prompt;
            found = self.store.find(prompt);
            if self.coming(prompt) > found.tokens {
                return Ok(Start::Later);
            }
        }
        if sequence.sampler.is_none() {
            let sampler = self.runner.sampler(&sequence.request)?;
            self.waiting[index].sampler = Some(sampler);
        }
        let Some((held, tokens)) = self.caches(found, capacity)? else { return Ok(Start::Short) };
        let mut sequence = self.waiting.swap_remove(index);
        let now = (self.now)();
        let found = Found { tokens, ..found };
        let mut places = vec![];
        if self.options.prefix_cache {
            let Request { prompt, checkpoints, .. } = &sequence.request;
            places = self.store.places(prompt, checkpoints, found);
            self.store.tree.extend(held.id, &prompt[..tokens]);
        }
        sequence.live = Some(Live { held, position: tokens, places });
        sequence.since = now;
        if sequence.started.is_none() {
            sequence.started = Some(now);
            sequence.cached = tokens;
            self.counts.prompt_tokens += sequence.request.prompt.len() as u64;
            self.counts.cached_tokens += tokens as u64;
            sequence.emit(Event::Started { cached_tokens: tokens });
        } else {
            self.counts.recomputed_tokens += (sequence.text.len() - 1).saturating_sub(tokens) as u64;
        }
        self.running.push(sequence);
        Ok(Start::Done)
    }

    /// The tokens of a prompt that can be taken over from a prompt that is being read now, as soon
    /// as they are read: several replies to one prompt read it once.
    fn coming(&self, prompt: &[u32]) -> usize {
        let read = |sequence: &Sequence<R>| {
            let live = sequence.live.as_ref().filter(|_| sequence.is_prefilling())?;
            let same = prompt.iter().zip(&sequence.request.prompt).take_while(|(a, b)| a == b).count();
            let same = same.min(prompt.len().saturating_sub(1));
            match self.sizes.states {
                0 => Some(same - same % BLOCK),
                _ => live.places.iter().copied().rfind(|&place| place <= same),
            }
        };
        self.running.iter().filter_map(read).max().unwrap_or(0)
    }

    /// Caches with room for `capacity` tokens, and the tokens of the prompt that they have seen;
    /// `None` if the budget is short.
    fn caches(&mut self, found: Found, capacity: usize) -> Result<Option<(Held<R>, usize)>, EngineError> {
        if let Some(donor) = found.holder {
            // A text that goes on from all that is kept takes it over; others get a copy.
            let goes_on = self.store.get(donor).is_some() && self.store.tree.length(donor) == found.tokens;
            if !goes_on && let Some(held) = self.copied(found, donor, capacity)? {
                return Ok(Some((held, found.tokens)));
            }
            if let Some(held) = self.taken(found, donor, capacity)? {
                return Ok(Some((held, found.tokens)));
            }
        }
        if !self.make_free(self.sizes.bytes(capacity), None) {
            return Ok(None);
        }
        let cache = match self.runner.cache(capacity) {
            // The device had less memory than the budget says.
            Err(error) if !error.is_lost() && self.evict_all() => self.runner.cache(capacity)?,
            cache => cache?,
        };
        Ok(Some((Held { id: self.store.holder(), cache, capacity, marks: vec![] }, 0)))
    }

    /// Evicts all kept caches; false if there were none.
    fn evict_all(&mut self) -> bool {
        let before = self.counts.evicted;
        while self.store.evict(None, (self.now)()) {
            self.counts.evicted += 1;
        }
        self.counts.evicted > before
    }

    /// A copy of what `donor` has.
    fn copied(
        &mut self,
        found: Found,
        donor: HolderId,
        capacity: usize,
    ) -> Result<Option<Held<R>>, EngineError> {
        let Some(held) = self.held(donor) else { return Ok(None) };
        let capacity = capacity.max(held.capacity);
        if !self.make_free(self.sizes.bytes(capacity), Some(donor)) {
            return Ok(None);
        }
        let Some(held) = self.held(donor) else { return Ok(None) };
        let fork = self.runner.fork(&held.cache, found.tokens, held.mark_at(found.tokens), capacity);
        let cache = match fork {
            Err(error) if error.is_lost() => return Err(error),
            Err(_) => return Ok(None),
            Ok(cache) => cache,
        };
        self.store.touch(donor, (self.now)());
        Ok(Some(Held { id: self.store.holder(), cache, capacity, marks: vec![] }))
    }

    /// The donor's own caches, if no running request has them.
    fn taken(
        &mut self,
        found: Found,
        donor: HolderId,
        capacity: usize,
    ) -> Result<Option<Held<R>>, EngineError> {
        let Some(held) = self.store.get(donor) else { return Ok(None) };
        let (old, capacity) = (held.capacity, capacity.max(held.capacity));
        if !self.make_free(self.sizes.bytes(capacity) - self.sizes.bytes(old), Some(donor)) {
            return Ok(None);
        }
        let Some(mut held) = self.store.take(donor) else { return Ok(None) };
        self.store.tree.truncate(donor, found.tokens);
        let ready = held.go_back(&self.runner, found.tokens);
        if let Err(error) = ready.and_then(|()| self.runner.make_room(&mut held.cache, capacity)) {
            self.store.tree.remove(donor);
            return if error.is_lost() { Err(error) } else { Ok(None) };
        }
        held.capacity = capacity;
        Ok(Some(held))
    }

    /// The caches of a text, a running request's or kept ones.
    fn held(&self, id: HolderId) -> Option<&Held<R>> {
        let running = self.running.iter().filter_map(|sequence| sequence.live.as_ref());
        running.map(|live| &live.held).find(|held| held.id == id).or_else(|| self.store.get(id))
    }

    /// Evicts kept caches, `but` that one, until `bytes` are free. Evicts none if all of them were
    /// too few.
    pub(super) fn make_free(&mut self, bytes: usize, but: Option<HolderId>) -> bool {
        let spared = but.and_then(|id| self.store.get(id)).map_or(0, |held| held.bytes(&self.sizes));
        if self.free() + self.store.bytes() - spared < bytes {
            return false;
        }
        while self.free() < bytes {
            if !self.store.evict(but, (self.now)()) {
                return false;
            }
            self.counts.evicted += 1;
        }
        true
    }

    /// Makes room for the next token of each sequence that writes, the oldest first. The youngest
    /// give their caches back where the budget is short.
    pub(super) fn make_rooms(&mut self) -> Result<(), EngineError> {
        let mut ids: Vec<(Reverse<i32>, u64)> = vec![];
        for sequence in self.running.iter().filter(|sequence| sequence.is_decoding()) {
            ids.push((Reverse(sequence.request.priority), sequence.id));
        }
        ids.sort_unstable();
        for (_, id) in ids {
            match self.make_room(id) {
                Ok(()) => {}
                Err(error) if error.is_lost() => return Err(error),
                Err(error) => self.end(id, Err(error)),
            }
        }
        Ok(())
    }

    fn make_room(&mut self, id: u64) -> Result<(), EngineError> {
        // Preempted on the way: by an older one, or by itself.
        while let Some(index) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = &self.running[index];
            let Some(live) = sequence.live.as_ref().filter(|live| live.position >= live.held.capacity) else {
                break;
            };
            let needed = live.position + 1;
            let reply = sequence.request.options.max_tokens;
            let most = sequence.request.prompt.len().saturating_add(reply).min(self.context);
            let ahead = live.position.saturating_add(self.options.reply_room).min(most);
            let grown = self.grow(index, ahead.max(needed))? || self.grow(index, needed)?;
            if !grown && !self.drop_marks() && !self.preempt() {
                // Those that may not be preempted have all room that they need.
                let bytes = self.sizes.bytes(self.sizes.capacity(needed));
                return Err(EngineError::TooLarge { bytes, budget: self.options.cache_bytes });
            }
        }
        Ok(())
    }

    /// Makes room for `tokens` tokens of a running request; false if the budget or the device is
    /// short.
    fn grow(&mut self, index: usize, tokens: usize) -> Result<bool, EngineError> {
        let capacity = self.sizes.capacity(tokens);
        let old = self.running[index].live.as_ref().map_or(capacity, |live| live.held.capacity);
        if !self.make_free(self.sizes.bytes(capacity) - self.sizes.bytes(old), None) {
            return Ok(false);
        }
        loop {
            let Sequence { live: Some(Live { held, .. }), sampler, .. } = &mut self.running[index] else {
                return Ok(false);
            };
            sampler.iter_mut().for_each(|sampler| self.runner.release(sampler));
            match self.runner.make_room(&mut held.cache, capacity) {
                Ok(()) => {
                    held.capacity = capacity;
                    return Ok(true);
                }
                Err(error) if error.is_lost() => return Err(error),
                Err(_) if self.evict_all() => {}
                Err(_) => return Ok(false),
            }
        }
    }

    /// Drops the states that running requests keep for later ones; false if there are none.
    fn drop_marks(&mut self) -> bool {
        let mut any = false;
        for live in self.running.iter_mut().filter_map(|sequence| sequence.live.as_mut()) {
            for (place, _) in live.held.marks.drain(..) {
                self.store.tree.unmark(live.held.id, place);
                any = true;
            }
        }
        any
    }

    /// The youngest running request of the lowest priority gives its caches back, of those that may
    /// have to; false if there is none.
    fn preempt(&mut self) -> bool {
        let youngest = self.running.iter().enumerate().filter(|(_, it)| it.preemptions < PREEMPTIONS);
        let youngest = youngest.min_by_key(|(_, it)| (it.request.priority, Reverse(it.id)));
        let Some((index, _)) = youngest else { return false };
        let mut sequence = self.retire(index);
        sequence.sampler.iter_mut().for_each(|sampler| self.runner.release(sampler));
        sequence.preemptions += 1;
        sequence.since = (self.now)();
        self.counts.preempted += 1;
        self.waiting.push(sequence);
        true
    }
}
