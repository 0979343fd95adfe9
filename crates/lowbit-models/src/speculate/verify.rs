//! Passes that verify drafts.

use super::DraftPass;
use super::pass::catch_up;
use crate::generate::LogitRules;
use crate::layers::{Recurrences, Step};
use crate::{Cache, GenerationOptions, Model, ModelError, Sequence};
use lowbit_kernels::gpu::Pass;
use lowbit_kernels::ops::{self, DecodeBatch, RowText, SampleKind, SampleParams};
use lowbit_kernels::{KernelError, Tensor};

/// The draws of one text, token after token.
#[derive(Debug)]
pub(crate) struct Draws {
    row: DecodeBatch,
    rules: LogitRules,
    sampling: SampleParams,
    /// Last tokens that penalties look at.
    window: usize,
}

impl Draws {
    pub fn new(options: &GenerationOptions, model: &Model) -> Result<Self, ModelError> {
        let window = options.repetition_context.min(model.config().max_position_embeddings);
        Ok(Self {
            row: DecodeBatch::new(1, window, model.device())?,
            rules: LogitRules::new(options, model)?,
            sampling: options.sampling,
            window,
        })
    }

    /// Draws the token after `text`, of which so many were drawn, from its logits `[1, V]`.
    ///
    /// # Errors
    /// As [`ops::sample_rows`]; [`ModelError::Grammar`].
    pub fn draw(&mut self, logits: &Tensor, text: &[u32], drawn: usize) -> Result<u32, ModelError> {
        let logits = self.rules.apply(logits)?;
        self.row.set_row(0, text, drawn as u32, &self.sampling, self.window)?;
        let kind = self.row.kind(0..1);
        ops::sample_rows(&logits, &mut self.row, kind)?;
        let mut token = self.row.drawn(0..1)?.wait()?;
        Ok(token.pop().expect("a row was asked for")?)
    }

    /// As [`LogitRules::accept`].
    pub fn accept(&mut self, id: u32) -> Result<bool, ModelError> {
        self.rules.accept(id)
    }
}

/// The results of a pass on a GPU.
#[derive(Debug)]
struct Run {
    /// f32 `[T, V]`.
    logits: Tensor,
    /// The states behind the last norm, `[T, hidden_size]`, if they were asked for.
    states: Option<Tensor>,
    /// Of recurrences, see [`crate::layers::DraftRows`].
    inputs: Recurrences,
}

/// The tokens that a pass draws: known for all rows, or to be drawn from their logits one by one.
#[derive(Debug)]
pub(crate) enum RowDraws {
    Known(Vec<Result<u32, KernelError>>),
    Logits(Tensor),
}

/// Passes over the last token and those drafted after it. On a GPU all have the same number of
/// rows, whatever the number of drafts, so that a token's bits do not depend on them, and one pass
/// is captured and replayed.
#[derive(Debug)]
pub(crate) struct Verifier {
    wants_states: bool,
    on_gpu: Option<OnGpu>,
    /// On a GPU, unless it was the captured one.
    last: Option<Run>,
    /// Elsewhere.
    on_cpu: Option<DraftPass>,
}

/// The part of a [`Verifier`] for GPUs.
#[derive(Debug)]
struct OnGpu {
    /// A row for each token of a pass.
    batch: DecodeBatch,
    sampling: SampleParams,
    window: usize,
    /// True if rows are drawn together in the pass: no rule changes their logits.
    draws: bool,
    /// u32 `[0, rows that stay]`.
    stays: Tensor,
    /// True if the cache has memory of its own: a pass has run.
    has_run: bool,
    captured: Option<(Pass, Run)>,
    catch_up: Option<Pass>,
}

/// Rows that a pass can have. A token in as many last places of a cache is run in a larger one on a
/// GPU: attention is cut by the capacity there, which must follow from a token's place, not from
/// the place where a pass begins.
const SPARE: usize = 16;

impl Verifier {
    /// For passes of up to `rows` rows in a reply with these draws. The pass that `last`, the
    /// previous reply's, captured is replayed if it still fits: rows are drawn alike, and `cache`
    /// is in the same memory, which no fork shares.
    pub fn after(
        last: Option<Self>,
        (model, cache): (&Model, &Cache),
        (rows, wants_states): (usize, bool),
        draws: &Draws,
    ) -> Result<Self, ModelError> {
        let suits = |last: &Self| {
            let on_gpu = last.on_gpu.as_ref().filter(|on_gpu| on_gpu.suits(rows, draws));
            on_gpu.is_some() && last.wants_states == wants_states
        };
        let Some(mut verifier) = last.filter(suits) else {
            return Self::new(model, rows, draws, wants_states);
        };
        if let Some(on_gpu) = &mut verifier.on_gpu {
            on_gpu.sampling = draws.sampling;
            let uses = |(pass, _): &(Pass, Run)| cache.captured().all(|tensor| pass.uses(tensor));
            if !on_gpu.captured.as_ref().is_some_and(uses) {
                (on_gpu.captured, on_gpu.catch_up, on_gpu.has_run) = (None, None, false);
            }
        }
        Ok(verifier)
    }

    fn new(model: &Model, rows: usize, draws: &Draws, wants_states: bool) -> Result<Self, ModelError> {
        if !model.device().plan().captures {
            return Ok(Self { wants_states, on_gpu: None, last: None, on_cpu: None });
        }
        let on_gpu = OnGpu {
            batch: DecodeBatch::new(rows, draws.window, model.device())?,
            sampling: draws.sampling,
            window: draws.window,
            draws: draws.rules.is_empty(),
            stays: Tensor::new(&[0u32, 0], &[2], model.device())?,
            has_run: false,
            captured: None,
            catch_up: None,
        };
        Ok(Self { wants_states, on_gpu: Some(on_gpu), last: None, on_cpu: None })
    }

    /// The most rows that a pass over the next tokens may use.
    pub fn most_rows(&mut self, model: &Model, cache: &mut Cache) -> Result<usize, KernelError> {
        let Some(on_gpu) = &mut self.on_gpu else { return Ok(usize::MAX) };
        if !cache.has_room(SPARE + 1) {
            // The memory moves away from where captured passes write.
            (on_gpu.captured, on_gpu.catch_up) = (None, None);
            model.reserve(cache, SPARE + 1)?;
        }
        let end = cache.capacity().and_then(|tokens| tokens.checked_sub(SPARE));
        let rows = end.and_then(|end| end.checked_sub(cache.position())).filter(|&rows| rows > 0);
        Ok(rows.unwrap_or(usize::MAX))
    }

    /// Runs the tokens of `text` that `cache` has not seen: the last one, and drafts. `drawn`
    /// tokens were drawn before.
    ///
    /// # Errors
    /// Those of the model's ops and of sampling.
    pub fn run(
        &mut self,
        model: &Model,
        cache: &mut Cache,
        text: &mut Vec<u32>,
        drawn: usize,
    ) -> Result<RowDraws, ModelError> {
        let states = self.wants_states;
        match &mut self.on_gpu {
            None => {
                let tokens = &text[cache.position()..];
                let pass = model.forward_drafts(&mut [Sequence { tokens, cache }], states)?;
                let draws = RowDraws::Logits(pass.all_logits().clone());
                self.on_cpu = Some(pass);
                Ok(draws)
            }
            Some(on_gpu) => {
                let (result, run) = on_gpu.run(model, cache, (text, drawn), states)?;
                self.last = run;
                Ok(result)
            }
        }
    }

    /// The states behind the last norm of the last pass's first `rows` rows, if they were asked
    /// for.
    pub fn states(&self, rows: usize) -> Result<Option<Tensor>, KernelError> {
        if let Some(pass) = &self.on_cpu {
            return pass.states(0, rows);
        }
        let captured = self.on_gpu.as_ref().and_then(|on_gpu| on_gpu.captured.as_ref());
        let run = self.last.as_ref().or(captured.map(|(_, run)| run));
        run.and_then(|run| run.states.as_ref()).map(|states| states.rows(0, rows)).transpose()
    }

    /// Keeps the first `rows` rows of the last pass, which began after `position` tokens: all else
    /// is as if the others had never run.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn keep(
        &mut self,
        model: &Model,
        cache: &mut Cache,
        (position, rows): (usize, usize),
    ) -> Result<(), KernelError> {
        match &mut self.on_gpu {
            None => match self.on_cpu.take() {
                Some(mut pass) => pass.keep(model, cache, (0, rows)),
                None => Ok(()),
            },
            Some(on_gpu) => {
                on_gpu.stays.write(&[0, rows as u32])?;
                on_gpu.catch_up(model, cache, self.last.take())?;
                cache.set_position(position + rows);
                Ok(())
            }
        }
    }
}

impl OnGpu {
    /// True if passes of so many rows draw as these draws are made.
    fn suits(&self, rows: usize, draws: &Draws) -> bool {
        let kinds = [&self.sampling, &draws.sampling].map(SampleKind::of);
        let same = (self.window, self.draws) == (draws.window, draws.rules.is_empty());
        same && self.batch.rows() == rows && kinds[0] == kinds[1]
    }

    /// As [`Verifier::run`]; the run's results, unless they are the captured pass's.
    fn run(
        &mut self,
        model: &Model,
        cache: &mut Cache,
        (text, drawn): (&mut Vec<u32>, usize),
        states: bool,
    ) -> Result<(RowDraws, Option<Run>), ModelError> {
        let (position, length) = (cache.position(), text.len());
        let rows = self.batch.rows();
        // Rows without a draft run the last token; nobody looks at what they give.
        text.resize(position + rows, text.last().copied().unwrap_or(0));
        let limit = model.config().max_position_embeddings;
        let of_row = |row: usize| {
            // The last place of a context is written by all rows that would stand behind it: by its
            // own first, which is the only one that reads it.
            let length = (position + row + 1).min(limit);
            let (step, params, window) = ((drawn + row) as u32, &self.sampling, self.window);
            RowText { tokens: &text[..length], length, step, params, window }
        };
        self.batch.set_rows(0, &(0..rows).map(of_row).collect::<Vec<_>>())?;
        text.truncate(length);
        let run = self.replay_or_run(model, cache, states)?;
        cache.set_position(position + rows);
        let logits = match (&run, &self.captured) {
            (Some(run), _) | (None, Some((_, run))) => run.logits.clone(),
            (None, None) => unreachable!("a pass has run"),
        };
        let draws = match self.draws {
            true => RowDraws::Known(self.batch.drawn(0..rows)?.wait()?),
            false => RowDraws::Logits(logits),
        };
        Ok((draws, run))
    }

    fn replay_or_run(
        &mut self,
        model: &Model,
        cache: &mut Cache,
        states: bool,
    ) -> Result<Option<Run>, ModelError> {
        let position = cache.position();
        if let Some((pass, _)) = &self.captured {
            pass.replay()?;
            return Ok(None);
        }
        let step = Step::drafts(self.batch.positions())?;
        if !std::mem::replace(&mut self.has_run, true) {
            // Forks share the memory of states until they are first written, which this pass's
            // `catch_up` does.
            return Ok(Some(self.record(model, cache, (&step, states))?));
        }
        let mut runs = vec![];
        let pass = model.device().capture(|| {
            runs.push(self.record(model, cache, (&step, states))?);
            // Counted, but not run yet.
            cache.set_position(position);
            Ok(())
        })?;
        let mut runs = runs.into_iter();
        let run = runs.next();
        self.captured = pass.zip(runs.next());
        Ok(run)
    }

    fn record(
        &mut self,
        model: &Model,
        cache: &mut Cache,
        (step, states): (&Step, bool),
    ) -> Result<Run, KernelError> {
        let rows = self.batch.rows();
        let run = forward(model, cache, (self.batch.tokens(), step), states)?;
        if self.draws {
            let kind = self.batch.kind(0..rows);
            ops::sample_rows(&run.logits, &mut self.batch, kind)?;
        }
        Ok(run)
    }

    /// Moves recurrences on by the rows that stay, of this run or of the captured one.
    fn catch_up(&mut self, model: &Model, cache: &mut Cache, run: Option<Run>) -> Result<(), KernelError> {
        if let Some(run) = &run {
            return catch_up(model, cache, &run.inputs, &self.stays);
        }
        if let Some(pass) = &self.catch_up {
            return pass.replay();
        }
        let Some((_, run)) = &self.captured else { return Ok(()) };
        if !run.inputs.is_empty() {
            self.catch_up = model.device().capture(|| catch_up(model, cache, &run.inputs, &self.stays))?;
        }
        Ok(())
    }
}

/// A pass over rows of one sequence with these ids.
fn forward(
    model: &Model,
    cache: &mut Cache,
    (ids, step): (&Tensor, &Step),
    states: bool,
) -> Result<Run, KernelError> {
    let decoder = model.decoder();
    let hidden = decoder.run(ids, step, &mut [cache])?;
    let states = states.then(|| decoder.normed(&hidden)).transpose()?.map(|states| states.into_tensor());
    let logits = decoder.logits(&hidden)?.into_tensor();
    let inputs = step.recurrences().pop().unwrap_or_default();
    Ok(Run { logits, states, inputs })
}
