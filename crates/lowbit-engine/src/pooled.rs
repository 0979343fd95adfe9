//! The model behind the scheduler, on a GPU: all caches are in a pool, and a batch is one pass.

use crate::model::{ModelRunner, failed, of_row};
use crate::runner::{Outcome, Part, Row, Runner, Sampled, Sizes};
use crate::{EngineError, EngineOptions, Request};
use lowbit_kernels::{Device, KernelError, Tensor, ops};
use lowbit_models::{
    BatchDrawn, BatchRow, BatchSteps, CachePool, CacheSize, FirstRow, GenerationOptions, LogitRules,
    ModelError, PoolCache, PoolMark, PoolSequence,
};
use std::cell::{RefCell, RefMut};

/// The cut of a budget into the parts of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    /// Sequences that run at the same time.
    slots: usize,
    /// Copies of their states that are kept for later sequences.
    marks: usize,
    /// Pages of keys and values.
    pages: usize,
    /// The same in layers that keep a window.
    window_pages: usize,
}

impl Parts {
    /// Of `bytes`, running states and windows may take a quarter, and kept ones a fifth. A pass has
    /// `pass` tokens of prompts at most.
    fn of(size: &CacheSize, bytes: usize, [running, pass]: [usize; 2]) -> Self {
        let of_windows = |pages: usize| pages.saturating_mul(size.windowed * ops::PAGE_TOKENS);
        let kept = size.window_pages();
        // The page that is written to, and a part of one at each end of a pass.
        let running_pages = if size.windowed > 0 { kept + 2 } else { 0 };
        let running_bytes = size.fixed.saturating_add(of_windows(running_pages));
        let mark = mark_bytes(size);
        // One slot and one page more are nobody's.
        let slots = (bytes / 4).checked_div(running_bytes);
        let slots = slots.map_or(running, |fitting| running.min(fitting)).max(1);
        let marks = (bytes / 5).checked_div(mark).unwrap_or(0);
        let pass_pages = if size.windowed > 0 { pass.div_ceil(ops::PAGE_TOKENS) } else { 0 };
        let taken = (slots + 1).saturating_mul(running_bytes).saturating_add(marks.saturating_mul(mark));
        let left = bytes.saturating_sub(taken.saturating_add(of_windows(pass_pages)));
        let most = (u32::MAX as usize / size.widest.max(1) / ops::PAGE_TOKENS).saturating_sub(1);
        let pages = (left / (page_tokens(size) * ops::PAGE_TOKENS)).saturating_sub(1).min(most);
        let window_pages = (slots * running_pages + marks * kept + pass_pages).min(most);
        Self { slots, marks, pages, window_pages }
    }
}

/// The bytes of a token's place in a page; 1 where all layers keep a window, and pages only count
/// tokens.
fn page_tokens(size: &CacheSize) -> usize {
    size.per_token.max(1)
}

/// The bytes of the states and windows at a place of a text.
fn mark_bytes(size: &CacheSize) -> usize {
    let windows = size.windowed.saturating_mul(size.window_pages() * ops::PAGE_TOKENS);
    size.fixed.saturating_add(windows)
}

/// As [`ModelRunner`], with a pool of its own.
#[derive(Debug)]
pub(crate) struct PooledRunner {
    one: ModelRunner,
    sizes: Sizes,
    context: usize,
    pool: RefCell<CachePool>,
    steps: RefCell<BatchSteps>,
    next_id: RefCell<u64>,
}

/// A request's sampling.
#[derive(Debug)]
pub(crate) struct PooledSampler {
    id: u64,
    options: GenerationOptions,
    rules: LogitRules,
    /// The prompt's length, and all tokens.
    prompt: usize,
    text: Vec<u32>,
}

impl PooledRunner {
    /// Allocates the pool, and sets the options to what it holds.
    pub(crate) fn new(one: ModelRunner, options: &mut EngineOptions) -> Result<Self, EngineError> {
        let size = one.model.cache_size().map_err(failed)?;
        let counts = [options.max_running.max(1), options.prefill_chunk.max(ops::PAGE_TOKENS)];
        let parts = Parts::of(&size, options.cache_bytes, counts);
        let per_token = page_tokens(&size);
        let sizes = Sizes {
            per_token,
            windowed: 0,
            window: 0,
            states: mark_bytes(&size),
            fixed: 0,
            mark: 0,
            marks: parts.marks,
            granule: ops::PAGE_TOKENS,
        };
        options.cache_bytes = per_token.saturating_mul(parts.pages * ops::PAGE_TOKENS);
        let context = sizes.fitting(one.context(), options.cache_bytes);
        let Parts { slots, marks, pages, window_pages } = parts;
        let pool = CachePool::with_window_pages(&one.model, [pages, slots, marks], window_pages);
        let pool = pool.map_err(failed)?;
        let window = GenerationOptions::default().repetition_context;
        let steps = BatchSteps::new(&one.model, parts.slots, context, window);
        let steps = steps.map_err(|error| failed(error.into()))?;
        options.max_running = parts.slots.min(steps.capacity());
        Ok(Self { one, sizes, context, pool: pool.into(), steps: steps.into(), next_id: 0.into() })
    }

    fn full(&self) -> EngineError {
        failed(ModelError::PoolIsFull)
    }

    /// The token that was drawn for a text.
    fn taken(&self, sampler: &mut PooledSampler, drawn: BatchDrawn) -> Result<Sampled, EngineError> {
        let PooledSampler { options, rules, text, .. } = sampler;
        let BatchDrawn { id, logprobs } = drawn;
        let id = id.map_err(|error| self.one.undrawn(text.len(), error))?;
        text.push(id);
        let ends = options.stop_ids.contains(&id) || rules.accept(id).map_err(failed)?;
        Ok(Sampled { id, logprobs, ends })
    }

    fn kernel(&self, error: KernelError) -> EngineError {
        self.one.sorted(error.into())
    }

    /// The steps, for penalties that look at so many last tokens.
    fn steps(&self, window: usize) -> Result<RefMut<'_, BatchSteps>, EngineError> {
        let mut steps = self.steps.borrow_mut();
        if window > steps.window() {
            let (capacity, window) = (steps.capacity(), window.next_power_of_two());
            let wider = BatchSteps::new(&self.one.model, capacity, self.context, window);
            *steps = wider.map_err(|error| self.kernel(error))?;
        }
        Ok(steps)
    }

    /// Draws the first tokens of the parts that end their prompts, from the logits of all parts.
    fn first(&self, logits: Tensor, parts: &mut [Part<'_, Self>]) -> Result<Vec<Outcome>, EngineError> {
        let mut drawing: Vec<_> = Part::drawing(parts).collect();
        let windows = drawing.iter().map(|(_, sampler, _)| sampler.options.repetition_context);
        let mut steps = self.steps(windows.max().unwrap_or(0))?;
        let mut rows = vec![];
        for (row, sampler, logprobs) in &mut drawing {
            let PooledSampler { options, rules, text, .. } = &mut **sampler;
            let (row, logprobs) = (*row, *logprobs);
            rows.push(FirstRow { row, text, options, rules: Some(rules), logprobs });
        }
        let drawn = steps.first(logits, &mut rows).map_err(|error| self.one.sorted(error))?;
        let results = drawing.into_iter().zip(drawn);
        let results = results.map(|((_, sampler, _), drawn)| of_row(self.taken(sampler, drawn)));
        results.collect()
    }
}

impl Runner for PooledRunner {
    type Cache = PoolCache;
    type Mark = PoolMark;
    type Sampler = PooledSampler;

    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn cache(&self, capacity: usize) -> Result<PoolCache, EngineError> {
        let mut pool = self.pool.borrow_mut();
        let mut cache = pool.cache().map_err(|error| self.kernel(error))?.ok_or_else(|| self.full())?;
        match pool.make_room(&mut cache, capacity) {
            true => Ok(cache),
            false => Err(self.full()),
        }
    }

    fn fork(
        &self,
        cache: &PoolCache,
        tokens: usize,
        mark: Option<&PoolMark>,
        capacity: usize,
    ) -> Result<PoolCache, EngineError> {
        let fork = self.pool.borrow_mut().fork(cache, (tokens, mark), capacity);
        fork.map_err(|error| self.kernel(error))?.ok_or_else(|| self.full())
    }

    fn go_back(
        &self,
        cache: &mut PoolCache,
        tokens: usize,
        mark: Option<&PoolMark>,
    ) -> Result<(), EngineError> {
        self.pool.borrow_mut().go_back(cache, tokens, mark).map_err(|error| self.one.sorted(error))
    }

    fn most_parts(&self) -> usize {
        usize::MAX
    }

    fn marks_on_the_way(&self) -> bool {
        true
    }

    fn park(&self, cache: &mut PoolCache, tokens: usize, _: usize) -> usize {
        cache.park(tokens);
        cache.capacity()
    }

    fn make_room(&self, cache: &mut PoolCache, capacity: usize) -> Result<(), EngineError> {
        match self.pool.borrow().make_room(cache, capacity) {
            true => Ok(()),
            false => Err(self.full()),
        }
    }

    fn release(&self, _: &mut PooledSampler) {
        // A captured step reads where caches are.
    }

    fn sampler(&self, request: &Request) -> Result<PooledSampler, EngineError> {
        // No text is longer than the context.
        let window = request.options.repetition_context.min(self.context);
        let options = request.options.clone().with_repetition_context(window);
        let rules = LogitRules::new(&options, &self.one.model).map_err(|error| self.one.sorted(error))?;
        let mut next = self.next_id.borrow_mut();
        *next += 1;
        let (prompt, text) = (request.prompt.len(), request.prompt.clone());
        Ok(PooledSampler { id: *next, options, rules, prompt, text })
    }

    fn prefill(&self, parts: &mut [Part<'_, Self>]) -> Result<Vec<Outcome>, EngineError> {
        let (wanted, model) = (Part::logits(parts), &self.one.model);
        let mut pool = self.pool.borrow_mut();
        // If marks are short, later requests read more of their prompts.
        let reserved =
            |part: &Part<'_, Self>| part.places.iter().map_while(|&at| pool.mark_at(at).ok()).collect();
        let marks: Vec<Vec<PoolMark>> = parts.iter().map(reserved).collect();
        let mut batch = vec![];
        for (Part { tokens, cache, .. }, marks) in parts.iter_mut().zip(&marks) {
            batch.push(PoolSequence { tokens, cache, marks });
        }
        let logits = model.forward_batch_in(&mut pool, &mut batch, wanted);
        for (part, marks) in parts.iter_mut().zip(marks) {
            part.marks = marks.into_iter().map(|mark| (mark.position(), mark)).collect();
        }
        match logits.map_err(|error| self.one.sorted(error))? {
            Some(logits) => self.first(logits, parts),
            None => {
                // The scheduler measures how long a pass takes.
                model.synchronize().map_err(|error| self.one.sorted(error))?;
                Ok(vec![])
            }
        }
    }

    fn compilations(&self) -> usize {
        match self.one.model.device() {
            Device::Gpu(gpu) => gpu.compilations(),
            Device::Cpu(_) => 0,
        }
    }

    fn decode(&self, rows: &mut [Row<'_, Self>]) -> Result<Vec<Outcome>, EngineError> {
        let widest = rows.iter().map(|row| row.sampler.options.repetition_context).max().unwrap_or(0);
        let (mut steps, model) = (self.steps(widest)?, &self.one.model);
        let mut batch: Vec<BatchRow<'_>> = rows
            .iter_mut()
            .map(|row| {
                let PooledSampler { id, options, rules, prompt, text } = &mut *row.sampler;
                let text = &text[..=row.cache.position()];
                BatchRow {
                    id: *id,
                    sampled: (text.len() - *prompt) as u32,
                    text,
                    cache: row.cache,
                    options,
                    rules: Some(rules),
                    draws: row.samples,
                    logprobs: row.logprobs,
                }
            })
            .collect();
        let drawn = steps.step(model, &mut self.pool.borrow_mut(), &mut batch);
        let drawn = drawn.map_err(|error| self.one.sorted(error))?;
        drop(batch);
        let drawing = rows.iter_mut().filter(|row| row.samples);
        drawing.zip(drawn).map(|(row, drawn)| of_row(self.taken(row.sampler, drawn))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_cut_into_states_and_pages() {
        let size = |per_token, fixed| {
            let mut size = CacheSize::default();
            (size.per_token, size.fixed, size.widest) = (per_token, fixed, 1024);
            size
        };
        // 9B: 32 KiB a token, 50 MiB of states; 48 GiB hold what the budget says, less a fifth.
        let (token, states) = (32 << 10, 50 << 20);
        let parts = Parts::of(&size(token, states), 48 << 30, [64, 4096]);
        let some = |slots, marks, pages| Parts { slots, marks, pages, window_pages: 0 };
        assert_eq!(parts, some(64, 196, 18_050));
        let bytes = (parts.slots + 1 + parts.marks) * states + (parts.pages + 1) * 64 * token;
        assert!(bytes <= 48 << 30 && bytes + 64 * token > 48 << 30);
        // A small budget runs fewer; one that is far too small runs none of any length.
        let of = |size: CacheSize, bytes| Parts::of(&size, bytes, [64, 4096]);
        assert_eq!(of(size(token, states), 1 << 30), some(5, 4, 261));
        assert_eq!(of(size(token, states), 1 << 20), some(1, 0, 0));
        // Attention alone takes all for pages, as many as 32 bits count elements of.
        assert_eq!(of(size(token, 0), 4 << 30), some(64, 0, 2047));
        assert_eq!(of(size(token, 0), 1 << 50).pages, 65_534);
        // Gemma 4 31B: 50 layers of 16 KiB a token that keep 18 pages for windows of 1,024, and
        // 10 of 8 KiB that keep all.
        let mut windowed = size(80 << 10, 0);
        (windowed.windowed, windowed.window) = (800 << 10, 1344);
        let parts = of(windowed, 48 << 30);
        let window_pages = parts.slots * 20 + parts.marks * 18 + 64;
        assert_eq!(parts, Parts { slots: 12, marks: 10, pages: 4789, window_pages });
        let bytes = ((parts.pages + 1) * (80 << 10) + (window_pages + 20) * (800 << 10)) * 64;
        assert!(bytes <= 48 << 30 && bytes + 64 * (80 << 10) > 48 << 30, "{bytes}");
    }
}
