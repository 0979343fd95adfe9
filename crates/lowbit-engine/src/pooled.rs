//! The model behind the scheduler, on a GPU: all caches are in a pool, and a batch is one pass.

use crate::model::{ModelRunner, drafted, failed, of_row};
use crate::runner::{GuessLimits, Outcome, Part, Ran, Row, Runner, Sampled, Sizes};
use crate::{EngineError, EngineOptions, Guesses, Request};
use lowbit_kernels::{Device, KernelError, Tensor, ops};
use lowbit_models::{
    BatchDrawn, BatchRow, BatchSteps, CachePool, CacheSize, Drafter, FirstRow, GenerationOptions, LogitRules,
    ModelError, MtpRow, PoolCache, PoolMark, PoolSequence, Predictor, Verified,
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
    /// The layer that guesses, if one does.
    predictor: Option<Predictor>,
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
    drafter: Option<Box<dyn Drafter>>,
    /// The states before tokens that the layer for multi-token prediction has not seen,
    /// `[m, hidden_size]`, and the position of the first of these tokens.
    states: Option<(usize, Tensor)>,
}

impl PooledSampler {
    fn wants_states(&self) -> bool {
        self.drafter.as_ref().is_some_and(|drafter| drafter.wants_states())
    }
}

impl PooledRunner {
    /// Allocates the pool, and sets the options to what it holds.
    pub(crate) fn new(one: ModelRunner, options: &mut EngineOptions) -> Result<Self, EngineError> {
        let mut size = one.model.cache_size().map_err(failed)?;
        let predictor = one.guesses.as_ref().and_then(Guesses::predictor).cloned();
        if let Some(predictor) = &predictor {
            let of_layer = predictor.cache_size(one.model.device()).map_err(|error| failed(error.into()))?;
            size.per_token += of_layer.per_token;
        }
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
        let pool = match &predictor {
            Some(predictor) => pool.and_then(|pool| pool.with_predictor(&one.model, predictor)),
            None => pool,
        };
        let pool = pool.map_err(failed)?;
        let window = GenerationOptions::default().repetition_context;
        let steps = BatchSteps::new(&one.model, parts.slots, context, window);
        let steps = steps.map_err(|error| failed(error.into()))?;
        options.max_running = parts.slots.min(steps.capacity());
        let (pool, steps, next_id) = (pool.into(), steps.into(), 0.into());
        Ok(Self { one, sizes, context, pool, steps, next_id, predictor })
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

    /// The guesses after the rows' texts.
    fn drafts(&self, rows: &mut [Row<'_, Self>]) -> Result<Vec<Vec<u32>>, EngineError> {
        let Some(predictor) = &self.predictor else {
            return rows.iter_mut().map(|row| self.drafts_of(row)).collect();
        };
        let mut drafts = vec![vec![]; rows.len()];
        if rows.iter().all(|row| row.guesses == 0) {
            return Ok(drafts);
        }
        let (mut steps, mut places, mut known) = (self.steps(widest(rows))?, vec![], vec![]);
        for (place, row) in rows.iter_mut().enumerate() {
            let states = row.sampler.states.take().filter(|(at, it)| at + it.dim(0) == row.text.len());
            if let Some((_, states)) = states.filter(|_| row.samples) {
                places.push(place);
                known.push(MtpRow { cache: &*row.cache, text: row.text, states, most: row.guesses });
            }
        }
        let pool = &mut self.pool.borrow_mut();
        let guesses = steps.guess((&self.one.model, predictor), pool, &known);
        let guesses = guesses.map_err(|error| self.one.sorted(error))?;
        places.into_iter().zip(guesses).for_each(|(place, guesses)| drafts[place] = guesses);
        Ok(drafts)
    }

    /// The guesses of a row's own drafter.
    fn drafts_of(&self, row: &mut Row<'_, Self>) -> Result<Vec<u32>, EngineError> {
        let Some(drafter) = row.sampler.drafter.as_mut().filter(|_| row.samples) else { return Ok(vec![]) };
        let drafts = drafted(&self.one.model, &mut **drafter, row.text, row.guesses);
        drafts.map_err(|error| self.one.sorted(error))
    }

    /// Runs rows with these guesses after them.
    fn verify(&self, rows: &mut [Row<'_, Self>], drafts: &[Vec<u32>]) -> Result<Vec<Ran>, EngineError> {
        let wants_states = self.wants_states(rows);
        let (mut steps, model) = (self.steps(widest(rows))?, &self.one.model);
        let mut batch: Vec<BatchRow<'_>> = rows.iter_mut().map(batch_row).collect();
        let pool = &mut self.pool.borrow_mut();
        let verified = steps.verify(model, pool, (&mut batch, drafts), wants_states);
        let verified = verified.map_err(|error| self.one.sorted(error))?;
        drop(batch);
        let (mut first, mut all) = (0, vec![]);
        for ((row, drafts), drawn) in rows.iter_mut().zip(drafts).zip(verified.drawn) {
            if let Some(states) = &verified.states {
                let kept = drawn.len().max(1);
                let states = states.rows(first, first + kept).map_err(|error| self.kernel(error))?;
                self.seen(row, &drafts[..kept - 1], &states)?;
            }
            first += 1 + drafts.len();
            let drawn = drawn.into_iter().map(|verified| of_row(self.settled(row, verified)));
            all.push(Ran { drawn: drawn.collect::<Result<_, _>>()?, drafted: drafts.len() });
        }
        Ok(all)
    }

    /// True if something that guesses reads the states of this step.
    fn wants_states(&self, rows: &[Row<'_, Self>]) -> bool {
        let guesses = self.predictor.is_some() && rows.iter().any(|row| row.guesses > 0);
        guesses || rows.iter().any(|row| row.sampler.wants_states())
    }

    /// Tells what guesses the states of a row's token and of the guesses that stay.
    fn seen(&self, row: &mut Row<'_, Self>, guesses: &[u32], states: &Tensor) -> Result<(), EngineError> {
        if self.predictor.is_some() {
            row.sampler.states = Some((row.text.len(), states.clone()));
        }
        let drafter = row.sampler.drafter.as_mut().filter(|drafter| drafter.wants_states());
        let (Some(drafter), Some((&last, before))) = (drafter, row.text.split_last()) else { return Ok(()) };
        let tokens = [&[last], guesses].concat();
        drafter.see(before.len(), &tokens, states).map_err(|error| self.one.sorted(error))
    }

    /// A token that was verified, which rules have taken.
    fn settled(&self, row: &mut Row<'_, Self>, verified: Verified) -> Result<Sampled, EngineError> {
        let Verified { id, logprobs, ends } = verified;
        let text = &mut row.sampler.text;
        let id = id.map_err(|error| self.one.undrawn(text.len(), error))?;
        text.push(id);
        Ok(Sampled { id, logprobs, ends })
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

/// The state before a part's first token, if it is known.
fn state_before(part: &mut Part<'_, PooledRunner>) -> Option<Tensor> {
    let (at, state) = part.sampler.states.take()?;
    (at == part.cache.position() && state.dim(0) == 1).then_some(state)
}

/// The longest window of these rows' penalties.
fn widest(rows: &[Row<'_, PooledRunner>]) -> usize {
    rows.iter().map(|row| row.sampler.options.repetition_context).max().unwrap_or(0)
}

fn batch_row<'a>(row: &'a mut Row<'_, PooledRunner>) -> BatchRow<'a> {
    let PooledSampler { id, options, rules, prompt, .. } = &mut *row.sampler;
    BatchRow {
        id: *id,
        sampled: (row.text.len() - *prompt) as u32,
        text: row.text,
        cache: row.cache,
        options,
        rules: Some(rules),
        draws: row.samples,
        logprobs: row.logprobs.filter(|_| row.samples),
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
        let guesses = self.one.guesses.as_ref().filter(|_| self.predictor.is_none());
        let drafter = guesses.map(|guesses| guesses.drafter(&self.one.model, request));
        Ok(PooledSampler { id: *next, options, rules, prompt, text, drafter, states: None })
    }

    fn prefill(&self, parts: &mut [Part<'_, Self>]) -> Result<Vec<Outcome>, EngineError> {
        let (wanted, model) = (Part::logits(parts), &self.one.model);
        let mut pool = self.pool.borrow_mut();
        // If marks are short, later requests read more of their prompts.
        let reserved =
            |part: &Part<'_, Self>| part.places.iter().map_while(|&at| pool.mark_at(at).ok()).collect();
        let marks: Vec<Vec<PoolMark>> = parts.iter().map(reserved).collect();
        let mut before: Vec<Option<Tensor>> = parts.iter_mut().map(state_before).collect();
        let mut batch = vec![];
        for (Part { tokens, cache, .. }, marks) in parts.iter_mut().zip(&marks) {
            batch.push(PoolSequence { tokens, cache, marks });
        }
        let predictor = self.predictor.as_ref().map(|predictor| (predictor, &mut before[..]));
        let logits = model.forward_batch_predicting(&mut pool, &mut batch, wanted, predictor);
        drop(batch);
        for (part, state) in parts.iter_mut().zip(before) {
            part.sampler.states = state.map(|state| (part.cache.position(), state));
        }
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
        let compilations = match self.one.model.device() {
            Device::Gpu(gpu) => gpu.compilations(),
            Device::Cpu(_) => 0,
        };
        compilations + self.steps.borrow().captures()
    }

    fn guess_limits(&self) -> GuessLimits {
        self.one.guess_limits()
    }

    fn decode(&self, rows: &mut [Row<'_, Self>]) -> Result<Vec<Ran>, EngineError> {
        let drafts = self.drafts(rows)?;
        if drafts.iter().any(|drafts| !drafts.is_empty()) || self.wants_states(rows) {
            return self.verify(rows, &drafts);
        }
        let (mut steps, model) = (self.steps(widest(rows))?, &self.one.model);
        let mut batch: Vec<BatchRow<'_>> = rows.iter_mut().map(batch_row).collect();
        let drawn = steps.step(model, &mut self.pool.borrow_mut(), &mut batch);
        let drawn = drawn.map_err(|error| self.one.sorted(error))?;
        drop(batch);
        let mut drawn = drawn.into_iter();
        let ran = |row: &mut Row<'_, Self>| {
            let Some(drawn) = row.samples.then(|| drawn.next()).flatten() else { return Ok(Ran::default()) };
            of_row(self.taken(row.sampler, drawn)).map(Ran::one)
        };
        rows.iter_mut().map(ran).collect()
    }
}

#[cfg(test)]
mod tests;
