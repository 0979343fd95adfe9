//! Steps of sequences whose next tokens are guessed.

use super::logprobs::Logprobs;
use super::{BatchRow, BatchSteps, bucket, copy_of};
use crate::layers::{Recurrences, StateRows, Step};
use crate::{CachePool, Model, ModelError, TokenLogprobs};
use lowbit_kernels::gpu::Pass;
use lowbit_kernels::ops::{self, DecodeBatch, Form, SampleKind};
use lowbit_kernels::{Device, KernelError, Tensor};

/// The most captured passes: the one that ran least recently goes. Each keeps its activations.
const PASSES: usize = 12;

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
    state: DecodeBatch,
    /// A row for the draws that rules change.
    one: DecodeBatch,
    /// u32 `[rows, N]` each, and what was written there.
    table: Tensor,
    windows: Option<Tensor>,
    written: Vec<[Vec<u32>; 2]>,
    /// The last one ran last.
    passes: Vec<Captured>,
    /// True if the last pass was captured, which takes time.
    has_captured: bool,
}

/// The kind of a pass, in which rows and sequences that are nobody's fill up the buckets.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PassKey {
    rows: usize,
    sequences: usize,
    kind: SampleKind,
    states: bool,
}

/// A captured pass.
#[derive(Debug)]
struct Captured {
    key: PassKey,
    offsets: Offsets,
    pass: Pass,
    output: Output,
    catch_up: Option<Pass>,
}

/// The results of a pass.
#[derive(Debug)]
struct Output {
    /// f32 `[rows, vocab_size]`.
    logits: Tensor,
    /// `[rows, hidden_size]`.
    states: Option<Tensor>,
    inputs: Recurrences,
}

/// The sequences of a pass's recurrences.
#[derive(Debug)]
struct Offsets {
    /// All rows of each.
    drafts: Sequences,
    /// The rows of each that stay, and those that do not, which are nobody's.
    stays: Sequences,
}

impl Offsets {
    fn new(sequences: usize, device: &Device) -> Result<Self, KernelError> {
        let (drafts, stays) = (sequences + 1, 2 * sequences + 1);
        Ok(Self { drafts: Sequences::new(drafts, device)?, stays: Sequences::new(stays, device)? })
    }
}

/// Sequences of a recurrence: u32 `[S]` and `[S + 1]`.
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

    /// Sequences of so many rows each in these slots; those after them have none, and the last has
    /// what is left of `rows`, and is nobody's.
    fn write(
        &mut self,
        sequences: impl Iterator<Item = (u32, usize)>,
        rows: usize,
    ) -> Result<(), KernelError> {
        let count = self.slots.len();
        let (mut slots, mut ends, mut end) = (vec![], vec![0], 0);
        for (slot, rows) in sequences {
            end += rows as u32;
            slots.push(slot);
            ends.push(end);
        }
        slots.resize(count, 0);
        ends.resize(count, end);
        ends.push(rows as u32);
        self.slots.write(&slots)?;
        self.cu_seqlens.write(&ends)
    }
}

impl DraftBatch {
    fn new(model: &Model, of: &BatchSteps) -> Result<Self, KernelError> {
        let rows = bucket(of.capacity().max(ROWS));
        let (device, shape) = (model.device(), [rows, of.table.dim(1)]);
        let zeros = || Tensor::new(&vec![0u32; shape[0] * shape[1]], &shape, device);
        Ok(Self {
            state: DecodeBatch::new(rows, of.state.window(), device)?,
            one: DecodeBatch::new(1, of.state.window(), device)?,
            table: zeros()?,
            windows: of.windows.as_ref().map(|_| zeros()).transpose()?,
            written: vec![Default::default(); rows],
            passes: vec![],
            has_captured: false,
        })
    }

    /// Tells the device the rows of these sequences. Later rows, to `count`, are nobody's.
    fn update(&mut self, rows: &[BatchRow<'_>], drafts: &[Vec<u32>], count: usize) -> Result<(), ModelError> {
        let mut filled = 0;
        for (row, drafts) in rows.iter().zip(drafts) {
            let text = [row.text, drafts].concat();
            for guesses in 0..=drafts.len() {
                let (text, step) = (&text[..row.text.len() + guesses], row.sampled + guesses as u32);
                let (sampling, window) = (&row.options.sampling, row.options.repetition_context);
                self.state.set_row(filled, text, step, sampling, window)?;
                filled += 1;
            }
        }
        (filled..count).try_for_each(|row| self.state.clear_row(row))?;
        let mut place = 0;
        for (row, drafts) in rows.iter().zip(drafts) {
            let pages =
                [row.cache.pages().collect(), row.cache.window_pages().map_or(vec![], Iterator::collect)];
            for _ in 0..=drafts.len() {
                self.write_pages(place, &pages)?;
                place += 1;
            }
        }
        (place..count).try_for_each(|place| Ok(self.write_pages(place, &[vec![0], vec![0]])?))
    }

    /// Writes the tables' rows, as far as they have changed.
    fn write_pages(&mut self, place: usize, pages: &[Vec<u32>; 2]) -> Result<(), KernelError> {
        let tables = [Some(&mut self.table), self.windows.as_mut()];
        for ((table, pages), written) in tables.into_iter().zip(pages).zip(&mut self.written[place]) {
            if let Some(table) = table.filter(|_| pages != written) {
                table.write_at(place * table.dim(1), pages)?;
                written.clone_from(pages);
            }
        }
        Ok(())
    }

    /// The results of a pass. On a GPU what is recorded for later ones, too.
    fn run(
        &mut self,
        model: &Model,
        pool: &mut CachePool,
        (key, drafts): (PassKey, &Sequences),
    ) -> Result<(Output, Option<(Pass, Output)>), KernelError> {
        let mut runs = vec![];
        let pass = model.device().capture(|| {
            runs.push(self.record(model, pool, key, drafts)?);
            Ok(())
        });
        // As `BatchSteps::forward`: the first run is this pass, the second one is recorded.
        let mut runs = runs.into_iter();
        match (runs.next(), pass) {
            (Some(output), pass) => Ok((output, pass.ok().flatten().zip(runs.next()))),
            (None, pass) => Err(pass.err().unwrap_or_else(|| unreachable!("a capture runs its work"))),
        }
    }

    fn record(
        &mut self,
        model: &Model,
        pool: &mut CachePool,
        key: PassKey,
        Sequences { slots, cu_seqlens }: &Sequences,
    ) -> Result<Output, KernelError> {
        let (decoder, count) = (model.decoder(), key.rows);
        let positions = self.state.positions().rows(0, count)?;
        let windows = self.windows.as_ref().map(|windows| windows.rows(0, count)).transpose()?;
        let tables = (self.table.rows(0, count)?, windows);
        let step = Step::rows(positions, tables, slots.clone(), cu_seqlens.clone()).of_drafts();
        let ids = self.state.tokens().rows(0, count)?;
        let hidden = decoder.run_in_pool(&ids, &step, pool.layers())?;
        let states = key.states.then(|| decoder.normed(&hidden)).transpose()?;
        let logits = decoder.logits(&hidden)?.into_tensor();
        ops::sample_rows(&logits, &mut self.state, key.kind)?;
        let (states, inputs) = (states.map(|states| states.into_tensor()), step.recurrences_in_pool());
        Ok(Output { logits, states, inputs })
    }

    /// Draws after the token of each row, and after its guesses as long as each is the next token.
    fn draw(
        &mut self,
        rows: &mut [BatchRow<'_>],
        drafts: &[Vec<u32>],
        logits: &Tensor,
    ) -> Result<Vec<Vec<Verified>>, ModelError> {
        let count = rows.len() + drafts.iter().map(Vec::len).sum::<usize>();
        let mut known = self.state.drawn(0..count)?.wait()?.into_iter();
        let (mut first, mut all) = (0, vec![]);
        for (row, drafts) in rows.iter_mut().zip(drafts) {
            let mut drawn: Vec<Verified> = vec![];
            for (at, known) in known.by_ref().take(1 + drafts.len()).enumerate() {
                let goes_on = |last: &Verified| {
                    !last.ends && last.id.as_ref().is_ok_and(|&id| drafts.get(at - 1) == Some(&id))
                };
                if row.draws && drawn.len() == at && drawn.last().is_none_or(goes_on) {
                    let place = (&drafts[..at], first + at);
                    drawn.push(self.verified(row, place, logits, known)?);
                }
            }
            first += 1 + drafts.len();
            all.push(drawn);
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
        let given = row.logprobs.map(|_| copy_of(&logits.rows(place, place + 1)?)).transpose()?;
        let id = match row.rules.as_deref_mut().filter(|rules| !rules.is_empty()) {
            None => known.map_err(ModelError::from),
            Some(rules) => match rules.apply(&logits.rows(place, place + 1)?) {
                Ok(changed) => self.redrawn(row, guesses, &changed)?,
                Err(error) => Err(error),
            },
        };
        let logprobs = match (&given, &id) {
            (Some(given), &Ok(token)) => {
                let tokens = Tensor::new(&[token], &[1], given.device())?;
                Logprobs::new(given, &tokens, row.logprobs)?.wait()?.of(0, &id, row.logprobs)
            }
            _ => None,
        };
        let mut verified = Verified { id, logprobs, ends: false };
        if let Ok(id) = verified.id {
            let accept = |rules: &mut &mut crate::LogitRules| rules.accept(id);
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
        let (text, step) = ([row.text, guesses].concat(), row.sampled + guesses.len() as u32);
        self.one.set_row(0, &text, step, &row.options.sampling, row.options.repetition_context)?;
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
        self.captures += usize::from(std::mem::take(&mut batch.has_captured));
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
        let (kind, sequences) = (self.state.kind(0..count).coarse(), bucket(rows.len()));
        let key = PassKey { rows: count, sequences, kind, states };
        let known = self.passes.iter().position(|pass| pass.key == key).map(|at| self.passes.remove(at));
        let (mut offsets, mut captured) = match known {
            Some(Captured { offsets, pass, output, catch_up, .. }) => {
                (offsets, Some((pass, output, catch_up)))
            }
            None => (Offsets::new(sequences, model.device())?, None),
        };
        let slots: Vec<u32> = rows.iter().map(|row| row.cache.slot()).collect::<Result<_, _>>()?;
        let each = slots.iter().zip(drafts);
        offsets.drafts.write(each.map(|(&slot, drafts)| (slot, 1 + drafts.len())), count)?;
        let mut fresh = None;
        match &captured {
            Some((pass, ..)) => pass.replay()?,
            None => {
                let (output, recorded) = self.run(model, pool, (key, &offsets.drafts))?;
                fresh = Some(output);
                captured = recorded.map(|(pass, output)| (pass, output, None));
                self.has_captured = true;
            }
        }
        let output = fresh.as_ref().or(captured.as_ref().map(|(_, output, _)| output));
        let output = output.unwrap_or_else(|| unreachable!("a pass has run"));
        let (logits, of_rows) = (output.logits.clone(), output.states.clone());
        let drawn = self.draw(rows, drafts, &logits)?;
        let kept: Vec<usize> = drawn.iter().map(|drawn| drawn.len().max(1)).collect();
        let each = slots.iter().zip(&kept).zip(drafts);
        let each = each.flat_map(|((&slot, &kept), drafts)| [(slot, kept), (0, 1 + drafts.len() - kept)]);
        offsets.stays.write(each, count)?;
        match (fresh, &mut captured) {
            (Some(output), _) => catch_up(model, pool, &output.inputs, &offsets.stays)?,
            (None, Some((_, _, Some(pass)))) => pass.replay()?,
            (None, Some((_, output, pass))) if !output.inputs.is_empty() => {
                let catch_up = || catch_up(model, pool, &output.inputs, &offsets.stays);
                *pass = model.device().capture(catch_up)?;
                self.has_captured = true;
            }
            (None, _) => {}
        }
        rows.iter_mut().zip(kept).for_each(|(row, kept)| row.cache.advance(kept));
        if let Some((pass, output, catch_up)) = captured {
            self.passes.drain(..usize::from(self.passes.len() == PASSES));
            self.passes.push(Captured { key, offsets, pass, output, catch_up });
        }
        Ok(Verification { drawn, states: of_rows })
    }
}

/// Moves recurrences on by the rows that stay.
fn catch_up(
    model: &Model,
    pool: &mut CachePool,
    inputs: &[Vec<Tensor>],
    Sequences { slots, cu_seqlens }: &Sequences,
) -> Result<(), KernelError> {
    let rows = StateRows { slots: Some(slots), form: Form::Recurrent, ..StateRows::of(cu_seqlens) };
    model.decoder().catch_up_in_pool(inputs, rows, pool.layers())
}
