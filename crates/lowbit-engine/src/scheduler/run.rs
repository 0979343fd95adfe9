//! The passes of a step: one token of each sequence that writes, then parts of prompts.

use super::Scheduler;
use crate::runner::{BLOCK, Row, Runner, Sampled};
use crate::sequence::{Live, Sequence};
use crate::{EngineError, Event, Finish};
use std::time::Duration;

impl<R: Runner> Scheduler<R> {
    /// Runs a token of each sequence whose prompt is done. Returns their number.
    pub(super) fn decode(&mut self) -> Result<usize, EngineError> {
        self.make_rooms()?;
        let (mut rows, mut ids) = (vec![], vec![]);
        for sequence in self.running.iter_mut().filter(|sequence| sequence.is_decoding()) {
            let Sequence { id, live: Some(live), sampler: Some(sampler), text, request, .. } = sequence
            else {
                continue;
            };
            // After a preemption the next tokens are known.
            let samples = live.position + 1 == text.len();
            ids.push((*id, samples));
            let (token, logprobs) = (text[live.position], request.logprobs);
            rows.push(Row { cache: &mut live.held.cache, sampler, token, samples, logprobs });
        }
        if rows.is_empty() {
            return Ok(0);
        }
        let results = self.runner.decode(&mut rows);
        drop(rows);
        match results {
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => ids.iter().for_each(|&(id, _)| self.end(id, Err(error.clone()))),
            Ok(results) => {
                for &(id, _) in &ids {
                    if let Some(live) = self.live(id) {
                        live.position += 1;
                    }
                }
                let sampling = ids.iter().filter(|(_, samples)| *samples);
                for (&(id, _), result) in sampling.zip(results) {
                    self.sampled(id, result);
                }
            }
        }
        self.sweep();
        Ok(ids.len())
    }

    fn live(&mut self, id: u64) -> Option<&mut Live<R>> {
        self.running.iter_mut().find(|sequence| sequence.id == id)?.live.as_mut()
    }

    fn sampled(&mut self, id: u64, result: Result<Sampled, EngineError>) {
        let (now, context) = ((self.now)(), self.context);
        let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == id) else { return };
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

    /// Reads parts of prompts. While others write, for as long as the target leaves after `start`,
    /// but one block at least, so that prompts get on; otherwise one part, after which new requests
    /// have their turn.
    pub(super) fn prefill(&mut self, start: Duration, others_write: bool) -> Result<(), EngineError> {
        for part in 0.. {
            let now = (self.now)();
            let prompts = self.running.iter().enumerate().filter(|(_, sequence)| sequence.is_prefilling());
            let next = prompts.max_by_key(|(_, sequence)| sequence.rank(now, self.options.ageing));
            let Some((index, _)) = next else { break };
            let left = self.options.target_inter_token.saturating_sub(now.saturating_sub(start));
            let fitting = if others_write { self.cost.fitting(left) } else { usize::MAX };
            if part > 0 && (!others_write || fitting < BLOCK) {
                break;
            }
            self.prefill_part(index, fitting.max(BLOCK))?;
            self.sweep();
        }
        Ok(())
    }

    /// Reads at most `most` tokens of a prompt.
    fn prefill_part(&mut self, index: usize, most: usize) -> Result<(), EngineError> {
        let (before, chunk) = ((self.now)(), self.options.prefill_chunk);
        let sequence = &mut self.running[index];
        let Sequence { id, live: Some(live), sampler: Some(sampler), text, request, .. } = sequence else {
            return Ok(());
        };
        let (id, position, total) = (*id, live.position, request.prompt.len());
        let end = cut(position, total, most.min(chunk), chunk).min(live.places.first().map_or(total, |&p| p));
        let is_last = end == total;
        let samples = is_last && text.len() == total && request.options.max_tokens > 0;
        let draw = samples.then_some((sampler, request.logprobs));
        let sampled = match self.runner.prefill(&mut live.held.cache, &text[position..end], draw) {
            Ok(sampled) => sampled,
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => {
                self.end(id, Err(error));
                return Ok(());
            }
        };
        let now = (self.now)();
        self.cost.add(end - position, now.saturating_sub(before));
        self.reached(index, end, now);
        match sampled {
            Some(result) => self.sampled(id, result),
            None if is_last && self.running[index].sampled() == 0 => self.end(id, Ok(Finish::Length)),
            None => {}
        }
        Ok(())
    }

    /// A prompt was read up to `end`.
    fn reached(&mut self, index: usize, end: usize, now: Duration) {
        let is_kept = self.options.prefix_cache;
        let sequence = &mut self.running[index];
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
        let is_place = live.places.first() == Some(&end);
        if !is_place {
            return;
        }
        live.places.remove(0);
        if !self.make_free(self.sizes.fixed, None) || !self.make_mark_free() {
            return;
        }
        // Without memory for it, later requests read more of their prompts.
        if let Some(live) = &mut self.running[index].live
            && let Ok(mark) = self.runner.mark(&live.held.cache)
        {
            live.held.marks.push((end, mark));
            self.store.tree.mark(live.held.id, end);
        }
    }

    /// Evicts kept caches until there may be one mark more; false if running requests have all.
    fn make_mark_free(&mut self) -> bool {
        let running = self.running.iter().filter_map(|sequence| sequence.live.as_ref());
        let running: usize = running.map(|live| live.held.marks.len()).sum();
        while running + self.store.marks() >= self.sizes.marks {
            if !self.store.evict(None, (self.now)()) {
                return false;
            }
            self.counts.evicted += 1;
        }
        true
    }
}

/// The end of the part of a prompt from `position` on: `most` tokens on, at a multiple of a block
/// of the text, and not beyond the next multiple of `chunk`. The same text is cut at the same
/// places wherever its first part was found in the cache.
fn cut(position: usize, total: usize, most: usize, chunk: usize) -> usize {
    let end = position.saturating_add(most).min((position / chunk + 1) * chunk);
    let end = if end < total { end - end % BLOCK } else { total };
    // Blocks are whole but for the last.
    end.max((position + 1).min(total))
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
    }
}
