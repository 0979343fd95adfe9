//! Steps of sequences whose next tokens are guessed.

use super::logprobs::Logprobs;
use super::passes::Passes;
use super::rows::Rows;
use super::{BatchRow, BatchSteps, bucket};
use crate::layers::{Recurrences, StateRows};
use crate::{CachePool, LogitRules, Model, ModelError, TokenLogprobs};
use lowbit_kernels::gpu::Pass;
use lowbit_kernels::ops::{self, DecodeBatch, Form, RowText, SampleKind};
use lowbit_kernels::{Device, KernelError, Tensor};

/// Rows that a pass has room for at least.
const ROWS: usize = 64;

/// A token that was drawn behind a guess, or behind the last token before all guesses.
#[derive(Debug)]
pub struct Verified {
    /// The token, or the error of this row alone.
    pub id: Result<u32, ModelError>,
    /// The log-probabilities, by the logits as the model gave them, if they were asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// True if the text ends with it: it is a stop id, or completes the grammar.
    pub ends: bool,
}

/// The results of [`BatchSteps::verify`].
#[derive(Debug)]
pub struct Verification {
    /// For each row its tokens: those of guesses that came true and one more, or none where nothing
    /// is drawn. An error is the last.
    pub drawn: Vec<Vec<Verified>>,
    /// The states behind the last norm, `[T, hidden_size]`, if they were asked for: each row's
    /// token and its guesses follow those of the row before. They are overwritten by the next pass.
    pub states: Option<Tensor>,
}

/// The rows of passes over last tokens and guesses: those of a sequence follow each other.
#[derive(Debug)]
pub(super) struct DraftBatch {
    known: Rows,
    /// A row for the draws that rules change.
    one: DecodeBatch,
    /// The sequences of a pass's recurrences: all rows of each.
    drafts: Sequences,
    /// The same with the rows of each that stay, and those that do not, which are nobody's.
    stays: Sequences,
    passes: Passes<PassKey, Output>,
}

/// The kind of a pass, in which rows and sequences that are nobody's fill up the buckets.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PassKey {
    rows: usize,
    sequences: usize,
    kind: SampleKind,
    states: bool,
}

/// The results of a pass.
#[derive(Debug)]
struct Output {
    /// f32 `[rows, vocab_size]`.
    logits: Tensor,
    /// `[rows, hidden_size]`.
    states: Option<Tensor>,
    inputs: Recurrences,
    /// Of a captured pass, once it was replayed: what moves its recurrences on.
    catch_up: Option<Pass>,
}

/// Sequences of recurrences: u32 `[S]` and `[S + 1]`, of which a pass has the first.
#[derive(Debug)]
struct Sequences {
    slots: Tensor,
    cu_seqlens: Tensor,
}

impl Sequences {
    fn new(sequences: usize, device: &Device) -> Result<Self, KernelError> {
        let zeros = |count: usize| Tensor::new(&vec![0u32; count], &[count], device);
        Ok(Self { slots: zeros(sequences)?, cu_seqlens: zeros(sequences + 1)? })
    }

    /// The slots and offsets of the first `count`.
    fn first(&self, count: usize) -> Result<[Tensor; 2], KernelError> {
        Ok([self.slots.rows(0, count)?, self.cu_seqlens.rows(0, count + 1)?])
    }

    /// The first `count` are `sequences` of so many rows each in these slots; those after them have
    /// none, and the last has what is left of `rows`, and is nobody's.
    fn write(
        &mut self,
        sequences: impl Iterator<Item = (u32, usize)>,
        (count, rows): (usize, usize),
    ) -> Result<(), KernelError> {
        let (mut slots, mut ends, mut end) = (vec![], vec![0], 0);
        for (slot, rows) in sequences {
            end += rows as u32;
            slots.push(slot);
            ends.push(end);
        }
        slots.resize(count, 0);
        ends.resize(count, end);
        ends.push(rows as u32);
        self.slots.write_at(0, &slots)?;
        self.cu_seqlens.write_at(0, &ends)
    }
}

impl DraftBatch {
    fn new(model: &Model, of: &BatchSteps) -> Result<Self, KernelError> {
        let (rows, device) = (bucket(of.capacity().max(ROWS)), model.device());
        let shape = [rows, of.known.shape()[1]];
        Ok(Self {
            known: Rows::new(shape, of.window(), model.decoder().has_windows(), device)?,
            one: DecodeBatch::new(1, of.window(), device)?,
            drafts: Sequences::new(rows + 1, device)?,
            stays: Sequences::new(2 * rows + 1, device)?,
            passes: Passes::default(),
        })
    }

    /// As [`BatchSteps::captures`].
    pub fn captures(&self) -> usize {
        self.passes.captures
    }

    /// Tells the device the rows of these sequences. Later rows, to `count`, are nobody's.
    fn update(&mut self, rows: &[BatchRow<'_>], drafts: &[Vec<u32>], count: usize) -> Result<(), ModelError> {
        // The tokens that count for a sequence's first row, and its guesses.
        let mut texts = vec![];
        for (row, drafts) in rows.iter().zip(drafts) {
            let start = row.text.len().saturating_sub(row.options.repetition_context.max(1));
            texts.push([&row.text[start..], drafts].concat());
        }
        let mut ends = vec![];
        for ((row, drafts), text) in rows.iter().zip(drafts).zip(&texts) {
            for guesses in 0..=drafts.len() {
                ends.push(RowText {
                    tokens: &text[..text.len() - drafts.len() + guesses],
                    length: row.text.len() + guesses,
                    step: row.sampled + guesses as u32,
                    params: &row.options.sampling,
                    window: row.options.repetition_context,
                });
            }
        }
        self.known.state.set_rows(0, &ends)?;
        let mut place = 0;
        for (row, drafts) in rows.iter().zip(drafts) {
            for _ in 0..=drafts.len() {
                self.known.write_pages(place, row.cache)?;
                place += 1;
            }
        }
        Ok((place..count).try_for_each(|place| self.known.clear(place))?)
    }

    /// Draws after the token of each row, and after its guesses as long as each is the next token.
    fn draw(
        &mut self,
        rows: &mut [BatchRow<'_>],
        drafts: &[Vec<u32>],
        logits: &Tensor,
    ) -> Result<Vec<Vec<Verified>>, ModelError> {
        let count = rows.len() + drafts.iter().map(Vec::len).sum::<usize>();
        let top = rows.iter().filter(|row| row.draws).filter_map(|row| row.logprobs).max();
        let apart = rows.iter().any(|row| row.draws && row.has_rules());
        let given = logits.rows(0, count)?;
        // At once, unless rules may change the tokens that the pass has drawn.
        let early = match apart {
            true => None,
            false => Some(Logprobs::new(&given, &self.known.ids(count)?, top)?),
        };
        let mut known = self.known.state.drawn(0..count)?.wait()?.into_iter();
        let (mut place, mut all, mut ids) = (0, vec![], vec![0; count]);
        for (row, drafts) in rows.iter_mut().zip(drafts) {
            let mut drawn: Vec<Verified> = vec![];
            for (at, known) in known.by_ref().take(1 + drafts.len()).enumerate() {
                let goes_on = |last: &Verified| {
                    !last.ends && last.id.as_ref().is_ok_and(|&id| drafts.get(at - 1) == Some(&id))
                };
                if row.draws && drawn.len() == at && drawn.last().is_none_or(goes_on) {
                    let verified = self.verified(row, (&drafts[..at], place), logits, known)?;
                    ids[place] = *verified.id.as_ref().unwrap_or(&0);
                    drawn.push(verified);
                }
                place += 1;
            }
            all.push(drawn);
        }
        let logprobs = match early {
            Some(early) => early,
            None => Logprobs::new(&given, &Tensor::new(&ids, &[count], given.device())?, top)?,
        };
        let (logprobs, mut first) = (logprobs.wait()?, 0);
        for ((row, drafts), drawn) in rows.iter().zip(drafts).zip(&mut all) {
            for (place, verified) in (first..).zip(drawn) {
                verified.logprobs = logprobs.of(place, &verified.id, row.logprobs);
            }
            first += 1 + drafts.len();
        }
        Ok(all)
    }

    /// The token after these guesses, whose row of `logits` is `place`: the one that the pass has
    /// drawn, unless rules change its logits.
    fn verified(
        &mut self,
        row: &mut BatchRow<'_>,
        (guesses, place): (&[u32], usize),
        logits: &Tensor,
        known: Result<u32, KernelError>,
    ) -> Result<Verified, ModelError> {
        let id = match row.rules.as_deref_mut().filter(|rules| !rules.is_empty()) {
            None => known.map_err(ModelError::from),
            Some(rules) => match rules.apply(&logits.rows(place, place + 1)?) {
                Ok(changed) => self.redrawn(row, guesses, &changed)?,
                Err(error) => Err(error),
            },
        };
        let mut verified = Verified { id, logprobs: None, ends: false };
        if let Ok(id) = verified.id {
            let accept = |rules: &mut &mut LogitRules| rules.accept(id);
            match row.options.stop_ids.contains(&id) {
                true => verified.ends = true,
                false => match row.rules.as_mut().map_or(Ok(false), accept) {
                    Ok(complete) => verified.ends = complete,
                    Err(error) => verified.id = Err(error),
                },
            }
        }
        Ok(verified)
    }

    /// Draws from one row's changed logits.
    fn redrawn(
        &mut self,
        row: &BatchRow<'_>,
        guesses: &[u32],
        logits: &Tensor,
    ) -> Result<Result<u32, ModelError>, ModelError> {
        let window = row.options.repetition_context;
        let tokens = [&row.text[row.text.len().saturating_sub(window.max(1))..], guesses].concat();
        let (length, step) = (row.text.len() + guesses.len(), row.sampled + guesses.len() as u32);
        let params = &row.options.sampling;
        self.one.set_rows(0, &[RowText { tokens: &tokens, length, step, params, window }])?;
        let kind = self.one.kind(0..1);
        ops::sample_rows(logits, &mut self.one, kind)?;
        let id = self.one.drawn(0..1)?.wait()?.pop().unwrap_or(Ok(0));
        Ok(id.map_err(ModelError::from))
    }
}

impl BatchSteps {
    /// Runs each row's token and the tokens guessed after it, `drafts`, in one pass, and waits for
    /// the tokens drawn. Caches have room for the guesses; they advance by the tokens that stay:
    /// the row's own, and those guesses that were drawn. All else is as if the others had never
    /// run. Rules take the tokens that are drawn.
    ///
    /// # Errors
    /// As [`Self::step`].
    ///
    /// # Panics
    /// For more rows and guesses than 64 or [`Self::capacity`], whichever is more.
    pub fn verify(
        &mut self,
        model: &Model,
        pool: &mut CachePool,
        (rows, drafts): (&mut [BatchRow<'_>], &[Vec<u32>]),
        wants_states: bool,
    ) -> Result<Verification, ModelError> {
        let mut batch = match self.drafts.take() {
            Some(batch) => batch,
            None => DraftBatch::new(model, self)?,
        };
        let result = batch.verify(model, pool, (rows, drafts), wants_states);
        if result.is_err() {
            // Nobody knows how far it came.
            batch.passes.clear();
        }
        self.drafts = Some(batch);
        result
    }
}

impl DraftBatch {
    fn verify(
        &mut self,
        model: &Model,
        pool: &mut CachePool,
        (rows, drafts): (&mut [BatchRow<'_>], &[Vec<u32>]),
        states: bool,
    ) -> Result<Verification, ModelError> {
        for (row, drafts) in rows.iter_mut().zip(drafts) {
            pool.make_ready(row.cache, 1 + drafts.len())?;
            let end = row.cache.position() + 1 + drafts.len();
            if row.cache.capacity() < end || row.text.len() != row.cache.position() + 1 {
                return Err(ModelError::PoolIsFull);
            }
        }
        let count = bucket(rows.len() + drafts.iter().map(Vec::len).sum::<usize>());
        self.update(rows, drafts, count)?;
        let (kind, sequences) = (self.known.state.kind(0..count).coarse(), bucket(rows.len()));
        let key = PassKey { rows: count, sequences, kind, states };
        let slots: Vec<u32> = rows.iter().map(|row| row.cache.slot()).collect::<Result<_, _>>()?;
        let each = slots.iter().zip(drafts);
        let each = each.map(|(&slot, drafts)| (slot, 1 + drafts.len()));
        self.drafts.write(each, (sequences + 1, count))?;
        let (of_all, known) = (self.drafts.first(sequences + 1)?, &mut self.known);
        let mut ran = self.passes.run(key, model.device(), || record(known, model, pool, (key, &of_all)))?;
        let (logits, of_rows) = (ran.results.logits.clone(), ran.results.states.clone());
        let drawn = self.draw(rows, drafts, &logits)?;
        let kept: Vec<usize> = drawn.iter().map(|drawn| drawn.len().max(1)).collect();
        let each = slots.iter().zip(&kept).zip(drafts);
        let each = each.flat_map(|((&slot, &kept), drafts)| [(slot, kept), (0, 1 + drafts.len() - kept)]);
        self.stays.write(each, (2 * sequences + 1, count))?;
        let (stays, is_replay) = (self.stays.first(2 * sequences + 1)?, ran.is_replay());
        let Output { inputs, catch_up: captured, .. } = &mut ran.results;
        match captured {
            Some(pass) => pass.replay()?,
            None if is_replay && !inputs.is_empty() => {
                *captured = model.device().capture(|| catch_up(model, pool, inputs, &stays))?;
                self.passes.captures += 1;
            }
            None => catch_up(model, pool, inputs, &stays)?,
        }
        rows.iter_mut().zip(kept).for_each(|(row, kept)| row.cache.advance(kept));
        self.passes.keep(ran);
        Ok(Verification { drawn, states: of_rows })
    }
}

/// Runs the model on the first rows, as `key` says.
fn record(
    known: &mut Rows,
    model: &Model,
    pool: &mut CachePool,
    (key, [slots, cu_seqlens]): (PassKey, &[Tensor; 2]),
) -> Result<Output, KernelError> {
    let decoder = model.decoder();
    let step = known.step(key.rows, [slots, cu_seqlens])?.of_drafts();
    let hidden = decoder.run_in_pool(&known.ids(key.rows)?, &step, pool.layers())?;
    let states = key.states.then(|| decoder.normed(&hidden)).transpose()?;
    let logits = decoder.logits(&hidden)?.into_tensor();
    ops::sample_rows(&logits, &mut known.state, key.kind)?;
    let (states, inputs) = (states.map(|states| states.into_tensor()), step.recurrences_in_pool());
    Ok(Output { logits, states, inputs, catch_up: None })
}

/// Moves recurrences on by the rows that stay.
fn catch_up(
    model: &Model,
    pool: &mut CachePool,
    inputs: &[Vec<Tensor>],
    [slots, cu_seqlens]: &[Tensor; 2],
) -> Result<(), KernelError> {
    let rows = StateRows { slots: Some(slots), form: Form::Recurrent, ..StateRows::of(cu_seqlens) };
    model.decoder().catch_up_in_pool(inputs, rows, pool.layers())
}
