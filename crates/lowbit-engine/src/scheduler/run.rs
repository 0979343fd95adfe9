//! The passes of a step: one token of each sequence that writes, then parts of prompts.

use super::Scheduler;
use crate::runner::{BLOCK, Outcome, Part, Ran, Row, Runner};
use crate::sequence::Sequence;
use crate::{EngineError, Event, Finish};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

/// While others write, passes over prompts are so many times as long as the shortest one, if the
/// target allows: an eighth of their time is what each pass costs however short it is.
const SAVED: u32 = 8;

impl<R: Runner> Scheduler<R> {
    /// Runs a token of each sequence whose prompt is done, and guesses after it. Returns their
    /// number.
    pub(super) fn decode(&mut self) -> Result<usize, EngineError> {
        self.make_rooms()?;
        let guesses = self.guesses();
        let (mut rows, mut ids) = (vec![], vec![]);
        for sequence in self.running.iter_mut().filter(|sequence| sequence.is_decoding()) {
            let Sequence { id, live: Some(live), sampler: Some(sampler), text, request, .. } = sequence
            else {
                continue;
            };
            ids.push(*id);
            // After a preemption the next tokens are known.
            let (samples, logprobs) = (live.position + 1 == text.len(), request.logprobs);
            let (text, cache) = (&text[..=live.position], &mut live.held.cache);
            let guesses = guesses.get(id).copied().unwrap_or(0);
            rows.push(Row { cache, sampler, text, samples, logprobs, guesses });
        }
        if rows.is_empty() {
            return Ok(0);
        }
        let (before, compiled) = ((self.now)(), self.runner.compilations());
        let results = self.runner.decode(&mut rows);
        drop(rows);
        let took = (self.now)().saturating_sub(before);
        self.counts.decode_passes += 1;
        self.counts.decode_rows += ids.len() as u64;
        self.counts.decode_time += took;
        match results {
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => ids.iter().for_each(|&id| self.end(id, Err(error.clone()))),
            Ok(results) => {
                // Of a pass that compiled a kernel nothing can be learned about the next ones.
                if self.runner.compilations() == compiled {
                    let drafted = results.iter().map(|ran| ran.drafted).sum();
                    self.guessing.measured(ids.len(), drafted, took);
                }
                ids.iter().zip(results).for_each(|(&id, ran)| self.ran(id, ran));
            }
        }
        self.sweep();
        Ok(ids.len())
    }

    /// The guesses that pay, of each sequence whose next token is sampled.
    fn guesses(&self) -> HashMap<u64, usize> {
        let limits = self.runner.guess_limits();
        if limits.most == 0 {
            return HashMap::new();
        }
        let (mut ids, mut each, mut count) = (vec![], vec![], 0);
        for sequence in self.running.iter().filter(|sequence| sequence.is_decoding()) {
            count += 1;
            let Some(live) = sequence.live.as_ref().filter(|live| live.position + 1 == sequence.text.len())
            else {
                continue;
            };
            // The last token of a reply is not run, nor is one that the context has no place for.
            let unwritten = sequence.request.options.max_tokens.saturating_sub(sequence.sampled() + 1);
            let room = live.held.capacity.min(self.context).saturating_sub(live.position + 1);
            ids.push(sequence.id);
            each.push((sequence.share, limits.most.min(unwritten).min(room)));
        }
        ids.into_iter().zip(self.guessing.plan(count, &each, limits)).collect()
    }

    /// A sequence's row has run, with guesses behind it.
    fn ran(&mut self, id: u64, Ran { drawn, drafted }: Ran) {
        let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == id) else { return };
        let Some(live) = &mut sequence.live else { return };
        live.position += drawn.len().max(1);
        if !drawn.is_empty() {
            let accepted = drawn.len() - 1;
            sequence.share.take(drafted, accepted);
            sequence.drafted += drafted;
            sequence.accepted += accepted;
            self.counts.drafted_tokens += drafted as u64;
            self.counts.accepted_tokens += accepted as u64;
        }
        // Guesses behind a reply's end are not looked at.
        drawn.into_iter().for_each(|result| self.sampled(id, result));
    }

    fn sampled(&mut self, id: u64, result: Outcome) {
        let (now, context) = ((self.now)(), self.context);
        let running = self.running.iter_mut().find(|sequence| sequence.id == id && !sequence.is_cancelled);
        let Some(sequence) = running else { return };
        let ended = match result {
            Ok(sampled) => {
                self.counts.completion_tokens += 1;
                sequence.push(sampled, context, now).map(Ok)
            }
            Err(error) => Some(Err(error)),
        };
        // Cancelled ones are swept.
        if let Some(outcome) = ended.filter(|_| !sequence.is_cancelled) {
            self.end(id, outcome);
        }
    }

    /// Reads parts of prompts. While others write, for as long as the target leaves on average
    /// after the step that began at `start`; otherwise one pass, after which new requests have
    /// their turn.
    pub(super) fn prefill(&mut self, start: Duration, others_write: bool) -> Result<(), EngineError> {
        let (now, target) = ((self.now)(), self.options.target_inter_token);
        let used = now.saturating_sub(start);
        if !others_write {
            return self.prefill_pass(self.options.prefill_chunk);
        }
        // One block at least, so that prompts get on.
        let earned = target.saturating_sub(used).max(self.cost.time(BLOCK));
        // A short pass costs hardly less than a longer one: it waits for more steps to save for it,
        // but no gap between tokens is twice the target.
        let worth = self.cost.fixed().saturating_mul(SAVED);
        let longest = worth.min((2 * target).saturating_sub(used)).max(earned);
        self.saved = (self.saved + earned).min(longest + earned);
        let mut spent = Duration::ZERO;
        loop {
            let unread = self.unread();
            let fitting = self.cost.fitting(self.saved.min(longest.saturating_sub(spent)));
            let pays = fitting >= BLOCK && fitting >= self.cost.fitting(worth).min(unread);
            let is_due = spent.is_zero() && self.saved >= longest;
            if unread == 0 || !(pays || is_due) {
                return Ok(());
            }
            let before = (self.now)();
            self.prefill_pass(fitting.clamp(BLOCK, self.options.prefill_chunk))?;
            let took = (self.now)().saturating_sub(before);
            self.saved = self.saved.saturating_sub(took);
            // A clock that stands still ends it, too.
            spent += took.max(Duration::from_nanos(1));
        }
    }

    /// Tokens of running requests' prompts that are not read yet.
    fn unread(&self) -> usize {
        let unread = |sequence: &Sequence<R>| {
            let live = sequence.live.as_ref()?;
            Some(sequence.request.prompt.len().saturating_sub(live.position))
        };
        self.running.iter().filter_map(unread).sum()
    }

    /// The prompts of the next pass, `most` tokens in all, and how far each is read: in the order
    /// of their rank as much of each as there is room for.
    fn cuts(&self, now: Duration, most: usize) -> HashMap<u64, usize> {
        let (mut cuts, mut room) = (HashMap::new(), most);
        let mut prompts: Vec<_> = self.running.iter().filter(|sequence| sequence.is_prefilling()).collect();
        prompts.sort_unstable_by_key(|sequence| Reverse(sequence.rank(now, self.options.ageing)));
        for sequence in prompts {
            let Some(live) = sequence.live.as_ref().filter(|_| cuts.len() < self.runner.most_parts()) else {
                continue;
            };
            let (position, total) = (live.position, sequence.request.prompt.len());
            let end = cut(position, total, room, self.options.prefill_chunk);
            let end = match live.places.first() {
                Some(&place) if !self.runner.marks_on_the_way() => end.min(place),
                _ => end,
            };
            // The next one's may be shorter.
            if end > position {
                room -= end - position;
                cuts.insert(sequence.id, end);
            }
        }
        cuts
    }

    /// Reads parts of prompts in one pass, `most` tokens in all.
    fn prefill_pass(&mut self, most: usize) -> Result<(), EngineError> {
        let before = (self.now)();
        let cuts = self.cuts(before, most);
        if cuts.is_empty() {
            return Ok(());
        }
        let places = self.places(&cuts);
        let (mut parts, mut read, mut tokens) = (vec![], vec![], 0);
        for sequence in &mut self.running {
            let Some(&end) = cuts.get(&sequence.id) else { continue };
            let Sequence { id, live: Some(live), sampler: Some(sampler), text, request, .. } = sequence
            else {
                continue;
            };
            let (total, wants) = (request.prompt.len(), request.options.max_tokens > 0);
            let (draws, logprobs) = (end == total && text.len() == total && wants, request.logprobs);
            tokens += end - live.position;
            read.push((*id, end, draws));
            let text = &text[live.position..end];
            let places = places.get(id).map_or(&[][..], Vec::as_slice);
            let cache = &mut live.held.cache;
            parts.push(Part { cache, tokens: text, places, marks: vec![], sampler, draws, logprobs });
        }
        let compiled = self.runner.compilations();
        let drawn = match self.runner.prefill(&mut parts) {
            Ok(drawn) => drawn,
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => {
                drop(parts);
                read.iter().for_each(|&(id, ..)| self.end(id, Err(error.clone())));
                return Ok(());
            }
        };
        let marks: Vec<_> = parts.into_iter().map(|part| part.marks).collect();
        let now = (self.now)();
        let took = now.saturating_sub(before);
        // Of a pass that compiled a kernel nothing can be learned about the next ones.
        if self.runner.compilations() == compiled {
            self.cost.add(tokens, took);
        }
        self.counts.prefill_passes += 1;
        self.counts.prefill_tokens += tokens as u64;
        self.counts.prefill_time += took;
        let mut drawn = drawn.into_iter();
        for ((id, end, draws), marks) in read.into_iter().zip(marks) {
            self.reached(id, end, now);
            self.marked(id, end, marks);
            match draws.then(|| drawn.next()).flatten() {
                Some(result) => self.sampled(id, result),
                None => self.end_without_reply(id),
            }
        }
        self.sweep();
        Ok(())
    }

    /// Ends a request whose prompt is read, if it wants no more than that.
    fn end_without_reply(&mut self, id: u64) {
        let sequence = self.running.iter().find(|sequence| sequence.id == id);
        if sequence.is_some_and(|it| it.is_decoding() && it.sampled() == 0) {
            self.end(id, Ok(Finish::Length));
        }
    }

    /// A prompt was read up to `end`.
    fn reached(&mut self, id: u64, end: usize, now: Duration) {
        let is_kept = self.options.prefix_cache;
        let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == id) else { return };
        sequence.since = now;
        if end > sequence.told {
            sequence.told = end;
            sequence.emit(Event::Prompt { done: end, total: sequence.request.prompt.len() });
        }
        let Sequence { live: Some(live), request, .. } = sequence else { return };
        live.position = end;
        if is_kept {
            self.store.tree.extend(live.held.id, &request.prompt[..end]);
        }
    }

    /// Keeps the states of a prompt that was read up to `end`, at the places before.
    fn marked(&mut self, id: u64, end: usize, marks: Vec<(usize, R::Mark)>) {
        let sequence = self.running.iter_mut().find(|sequence| sequence.id == id);
        let Some(live) = sequence.and_then(|sequence| sequence.live.as_mut()) else { return };
        live.places.retain(|&place| place > end);
        marks.iter().for_each(|(place, _)| self.store.tree.mark(live.held.id, *place));
        live.held.marks.extend(marks);
    }

    /// The places of each of these prompts at which a pass keeps the states, as far as there is
    /// memory for them.
    fn places(&mut self, cuts: &HashMap<u64, usize>) -> HashMap<u64, Vec<usize>> {
        let reached = |sequence: &Sequence<R>| {
            let (live, end) = (sequence.live.as_ref()?, *cuts.get(&sequence.id)?);
            Some((sequence.id, live.places.iter().copied().filter(|&place| place <= end).collect()))
        };
        let mut all: HashMap<u64, Vec<usize>> = self.running.iter().filter_map(reached).collect();
        let mut count = 0;
        for places in all.values_mut() {
            // Without memory for them, later requests read more of their prompts.
            places.retain(|_| {
                let fits = self.make_free((count + 1) * self.sizes.mark, None) && self.make_mark_free(count);
                count += usize::from(fits);
                fits
            });
        }
        all
    }

    /// Evicts kept caches until there may be one mark more than `planned` ones; false if running
    /// requests have all.
    fn make_mark_free(&mut self, planned: usize) -> bool {
        let running = self.running.iter().filter_map(|sequence| sequence.live.as_ref());
        let running: usize = running.map(|live| live.held.marks.len()).sum();
        while running + planned + self.store.marks() >= self.sizes.marks {
            if !self.store.evict(None, (self.now)()) {
                return false;
            }
            self.counts.evicted += 1;
        }
        true
    }
}

/// The end of the part of a prompt from `position` on, a multiple of a block: at most `most` tokens
/// on, at a multiple of a block of the text, and not beyond the next multiple of `chunk`. The same
/// text is cut at the same places wherever its first part was found in the cache. Less than a block
/// reads the end of a prompt alone, or nothing.
fn cut(position: usize, total: usize, most: usize, chunk: usize) -> usize {
    let end = position.saturating_add(most).min((position / chunk + 1) * chunk);
    if end < total { end - end % BLOCK } else { total }
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn prompts_are_cut_at_blocks_of_the_text() {
        assert_eq!(cut(0, 1000, 512, 512), 512);
        assert_eq!(cut(512, 1000, 512, 512), 1000);
        assert_eq!(cut(64, 1000, 512, 512), 512);
        assert_eq!(cut(0, 1000, 100, 512), 64);
        assert_eq!(cut(960, 1000, 64, 512), 1000);
        assert_eq!(cut(0, 30, 64, 512), 30);
        // The rest of a pass.
        assert_eq!((cut(960, 1000, 63, 512), cut(128, 1000, 63, 512)), (1000, 128));
        assert_eq!(cut(960, 1000, 39, 512), 960);
    }
}
