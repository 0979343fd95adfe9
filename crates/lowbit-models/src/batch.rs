//! Decode steps of many sequences at once.

mod first;
mod logprobs;
mod passes;
mod predict;
mod rows;
mod verify;

pub use first::FirstRow;
pub use predict::MtpRow;
pub use verify::{Verification, Verified};

use crate::{CachePool, GenerationOptions, LogitRules, Model, ModelError, PoolCache, TokenLogprobs};
use logprobs::Logprobs;
use lowbit_kernels::ops::{self, DecodeBatch, PAGE_TOKENS, SampleKind, SampleParams};
use lowbit_kernels::{KernelError, Tensor};
use passes::{Passes, Ran};
use predict::MtpBatch;
use rows::Rows;
use verify::DraftBatch;

/// The numbers of rows that steps are captured for. Rows without a sequence fill them up.
const BUCKETS: [usize; 12] = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256];

/// Decode steps of up to 256 sequences whose caches are in a [`CachePool`]: each step runs the
/// model on every sequence's last token and samples its next one, on the device. On a GPU a step is
/// captured once for each bucket of rows, and replayed with whatever sequences there are: all that
/// changes is in tensors.
#[derive(Debug)]
pub struct BatchSteps {
    rows: Vec<Option<Occupant>>,
    known: Rows,
    /// The sampling of first tokens, which are drawn beside the rows' own.
    firsts: DecodeBatch,
    /// u32 `[rows]` and `[rows + 1]`, as [`Step::rows`](crate::layers::Step::rows) takes them.
    slots: Tensor,
    cu_seqlens: Tensor,
    /// By the number of rows, and the sampling that belongs to the pass, if any does; results are
    /// logits, f32 `[rows, vocab_size]`.
    passes: Passes<StepKey, Tensor>,
    /// Rows of guesses, once there were some.
    drafts: Option<DraftBatch>,
    /// Rows that a layer of the model guesses for, once there were some.
    predicted: Option<MtpBatch>,
}

type StepKey = (usize, Option<SampleKind>);

/// A sequence, for one step.
#[derive(Debug)]
pub struct BatchRow<'a> {
    /// A number of the sequence's own, the same in all steps.
    pub id: u64,
    /// The caches of the tokens before the one that runs, with room for it.
    pub cache: &'a mut PoolCache,
    /// All tokens up to the one that runs.
    pub text: &'a [u32],
    /// Tokens sampled before this step: the number of the next draw.
    pub sampled: u32,
    /// The sampling; limits and stop ids are the caller's.
    pub options: &'a GenerationOptions,
    /// The changes to its logits, if there are any: those of `options`.
    pub rules: Option<&'a mut LogitRules>,
    /// True if the next token is drawn; otherwise the caller knows it.
    pub draws: bool,
    /// The count of the likeliest tokens whose log-probabilities are wanted beside that of the one
    /// that is drawn, if they are: by the logits as the model gave them.
    pub logprobs: Option<usize>,
}

/// The result of a row.
#[derive(Debug)]
pub struct BatchDrawn {
    /// The token drawn, or the error of this row alone.
    pub id: Result<u32, ModelError>,
    /// The log-probabilities, if they were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// The sequence that has a row, and what the device knows of it.
#[derive(Debug)]
struct Occupant {
    id: u64,
    slot: u32,
    sampling: SampleParams,
    /// The token that the row's next step runs, its position, and the number of the draw.
    next: Option<(u32, usize, u32)>,
}

impl BatchSteps {
    /// For `rows` sequences at most (of 256) of up to `context` tokens, and penalties that look at
    /// up to `window` last tokens.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn new(model: &Model, rows: usize, context: usize, window: usize) -> Result<Self, KernelError> {
        let (rows, device) = (bucket(rows), model.device());
        let offsets: Vec<u32> = (0..=rows as u32).collect();
        let shape = [rows, context.div_ceil(PAGE_TOKENS).max(1)];
        Ok(Self {
            rows: (0..rows).map(|_| None).collect(),
            known: Rows::new(shape, window, model.decoder().has_windows(), device)?,
            firsts: DecodeBatch::new(rows, window, device)?,
            slots: Tensor::new(&vec![0u32; rows], &[rows], device)?,
            cu_seqlens: Tensor::new(&offsets, &[rows + 1], device)?,
            passes: Passes::default(),
            drafts: None,
            predicted: None,
        })
    }

    /// The numbers of rows, up to `most`, that a step can have.
    pub fn buckets(most: usize) -> impl Iterator<Item = usize> {
        BUCKETS.into_iter().filter(move |&rows| rows <= most)
    }

    /// The most last tokens that penalties look at.
    pub fn window(&self) -> usize {
        self.known.state.window()
    }

    /// Passes captured so far, each of which has taken longer than its replays.
    pub fn captures(&self) -> usize {
        let drafts = self.drafts.as_ref().map_or(0, DraftBatch::captures);
        let predicted = self.predicted.as_ref().map_or(0, MtpBatch::captures);
        self.passes.captures + drafts + predicted
    }

    /// The most sequences.
    pub fn capacity(&self) -> usize {
        self.rows.len()
    }

    /// Runs a step of each of `rows`, and waits for the tokens drawn: a result for each row, in
    /// order, whose draw was asked for. Their caches advance by a token.
    ///
    /// # Errors
    /// Those of the model's ops: then no row has run. [`ModelError::PoolIsFull`] for a cache
    /// without room.
    ///
    /// # Panics
    /// For more rows than [`Self::capacity`].
    pub fn step(
        &mut self,
        model: &Model,
        pool: &mut CachePool,
        rows: &mut [BatchRow<'_>],
    ) -> Result<Vec<BatchDrawn>, ModelError> {
        if rows.is_empty() {
            return Ok(vec![]);
        }
        let result = self.run(model, pool, rows);
        if result.is_err() {
            // Nobody knows how far it came.
            self.passes.clear();
            self.rows.iter_mut().flatten().for_each(|occupant| occupant.next = None);
        }
        result
    }

    fn run(
        &mut self,
        model: &Model,
        pool: &mut CachePool,
        rows: &mut [BatchRow<'_>],
    ) -> Result<Vec<BatchDrawn>, ModelError> {
        rows.iter_mut().try_for_each(|row| pool.make_ready(row.cache, 1))?;
        let count = bucket(rows.len());
        let places = self.places(rows, count)?;
        for (row, &place) in rows.iter().zip(&places) {
            self.update(row, place)?;
        }
        let kind = self.known.state.kind(0..count).coarse();
        let apart = rows.iter().any(|row| row.draws && row.has_rules());
        let top = rows.iter().filter(|row| row.draws).filter_map(|row| row.logprobs).max();
        let mut ran = self.forward(model, pool, count, (!apart).then_some(kind))?;
        let mut changed: Vec<_> = rows.iter().map(|_| Ok(())).collect();
        let given = match apart {
            // Rows are changed in place.
            true => top.map(|_| copy_of(&ran.results)).transpose()?,
            false => None,
        };
        if apart {
            let drawing = rows.iter_mut().filter(|row| row.draws);
            LogitRules::find_allowed(drawing.filter_map(|row| row.rules.as_deref_mut()), model.host());
            for ((row, &place), changed) in
                rows.iter_mut().zip(&places).zip(&mut changed).filter(|((row, _), _)| row.draws)
            {
                *changed = change(row.rules.as_deref_mut(), place, &mut ran.results);
            }
            ops::sample_rows(&ran.results, &mut self.known.state, kind)?;
        }
        let tokens = self.known.ids(count)?;
        let logprobs = Logprobs::new(given.as_ref().unwrap_or(&ran.results), &tokens, top)?;
        self.passes.keep(ran);
        let mut drawn: Vec<_> = self.known.state.drawn(0..count)?.wait()?.into_iter().map(Some).collect();
        let logprobs = logprobs.wait()?;
        let mut results = vec![];
        for ((row, &place), changed) in rows.iter_mut().zip(&places).zip(changed) {
            row.cache.advance(1);
            let id = drawn[place].take().unwrap_or(Ok(0)).map_err(ModelError::from);
            let id = changed.and(id);
            let next = id.as_ref().ok().filter(|_| row.draws);
            let next = next.map(|&id| (id, row.cache.position(), row.sampled + 1));
            self.rows[place].iter_mut().for_each(|occupant| occupant.next = next);
            if row.draws {
                let logprobs = logprobs.of(place, &id, row.logprobs);
                results.push(BatchDrawn { id, logprobs });
            }
        }
        Ok(results)
    }

    /// The row of each sequence among the first `count`. Rows of sequences that are not there any
    /// more are nobody's from now on.
    fn places(&mut self, rows: &[BatchRow<'_>], count: usize) -> Result<Vec<usize>, KernelError> {
        for place in 0..self.rows.len() {
            let Some(occupant) = &self.rows[place] else { continue };
            if place >= count || !rows.iter().any(|row| row.id == occupant.id) {
                self.rows[place] = None;
                self.known.clear(place)?;
                self.slots.write_at(place, &[0u32])?;
            }
        }
        let mut places = Vec::with_capacity(rows.len());
        for row in rows {
            let own = |occupant: &Option<Occupant>| occupant.as_ref().is_some_and(|it| it.id == row.id);
            let place = self.rows.iter().position(own);
            let place = place.or_else(|| self.rows.iter().position(Option::is_none)).expect("there is a row");
            if self.rows[place].is_none() {
                let sampling = row.options.sampling;
                self.rows[place] = Some(Occupant { id: row.id, slot: 0, sampling, next: None });
            }
            places.push(place);
        }
        Ok(places)
    }

    /// Tells the device what it does not know of a row.
    fn update(&mut self, row: &BatchRow<'_>, place: usize) -> Result<(), ModelError> {
        let Some(occupant) = &mut self.rows[place] else { return Ok(()) };
        let position = row.cache.position();
        if row.cache.capacity() <= position || row.text.len() != position + 1 {
            return Err(ModelError::PoolIsFull);
        }
        self.known.write_pages(place, row.cache)?;
        let slot = row.cache.slot()?;
        if occupant.slot != slot {
            occupant.slot = slot;
            self.slots.write_at(place, &[occupant.slot])?;
        }
        let wanted = Some((row.text[position], position, row.sampled));
        if occupant.next != wanted || occupant.sampling != row.options.sampling {
            let GenerationOptions { sampling, repetition_context, .. } = row.options;
            self.known.state.set_row(place, row.text, row.sampled, sampling, *repetition_context)?;
            (occupant.next, occupant.sampling) = (wanted, *sampling);
        }
        Ok(())
    }

    /// Runs the model on the first `count` rows, and samples in the same pass if `kind` says how.
    fn forward(
        &mut self,
        model: &Model,
        pool: &mut CachePool,
        count: usize,
        kind: Option<SampleKind>,
    ) -> Result<Ran<StepKey, Tensor>, KernelError> {
        let (known, passes) = (&mut self.known, &mut self.passes);
        let tables = [self.slots.rows(0, count)?, self.cu_seqlens.rows(0, count + 1)?];
        passes.run((count, kind), model.device(), || {
            let step = known.step(count, tables.each_ref())?;
            let hidden = model.decoder().run_in_pool(&known.ids(count)?, &step, pool.layers())?;
            let logits = model.decoder().logits(&hidden)?.into_tensor();
            if let Some(kind) = kind {
                ops::sample_rows(&logits, &mut known.state, kind)?;
            }
            Ok(logits)
        })
    }
}

impl BatchRow<'_> {
    /// True if its logits may be changed.
    fn has_rules(&self) -> bool {
        self.rules.as_ref().is_some_and(|rules| !rules.is_empty())
    }
}

/// Changes a row's logits as its rules say.
fn change(rules: Option<&mut LogitRules>, place: usize, logits: &mut Tensor) -> Result<(), ModelError> {
    if let Some(rules) = rules.filter(|rules| !rules.is_empty()) {
        let changed = rules.apply(&logits.rows(place, place + 1)?)?;
        ops::copy_rows(&changed, 0, logits, place)?;
    }
    Ok(())
}

/// Logits with memory of their own.
fn copy_of(logits: &Tensor) -> Result<Tensor, KernelError> {
    let mut copy = Tensor::allocate(logits.shape(), logits.dtype(), logits.device())?;
    for row in 0..logits.dim(0) {
        ops::copy_rows(logits, row, &mut copy, row)?;
    }
    Ok(copy)
}

/// The least bucket with so many rows, or the greatest.
fn bucket(rows: usize) -> usize {
    BUCKETS.into_iter().find(|&bucket| bucket >= rows).unwrap_or(BUCKETS[BUCKETS.len() - 1])
}
