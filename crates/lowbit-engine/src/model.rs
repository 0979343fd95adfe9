//! The model behind the scheduler.

use crate::runner::{Drawing, GuessLimits, Outcome, Part, Ran, Row, Runner, Sampled, Sizes};
use crate::{EngineError, Guesses, Request};
use lowbit_kernels::ops::{Drawn, LogitBias};
use lowbit_kernels::{KernelError, Tensor};
use lowbit_models::{
    Cache, CacheSize, DraftPass, Drafter, Logits, Mark, Model, ModelError, Sequence, Steps, TokenLogprobs,
};
use std::sync::Arc;

/// A model, whose errors are sorted into those of requests and those of the device.
#[derive(Clone, Debug)]
pub(crate) struct ModelRunner {
    pub(crate) model: Model,
    pub(crate) guesses: Option<Guesses>,
    sizes: Sizes,
}

impl ModelRunner {
    pub(crate) fn new(model: Model, guesses: Option<Guesses>) -> Result<Self, EngineError> {
        let size = model.cache_size().map_err(failed)?;
        let CacheSize { mut per_token, mut windowed, mut window, fixed, granule, .. } = size;
        if let Some(guesses) = &guesses {
            // Tokens that are taken back must not have displaced others.
            (per_token, windowed, window) = (size.whole_per_token(), 0, 0);
            let of_layer = guesses.predictor().map(|layer| layer.cache_size(model.device()));
            let of_layer = of_layer.transpose().map_err(|error| failed(error.into()))?;
            // Counted as if kept caches had it, too.
            per_token += of_layer.map_or(0, |size| size.per_token);
        }
        // A mark has a window's rows alone, and is counted as if it had the room beside them.
        let mark = fixed.saturating_add(windowed.saturating_mul(window));
        let marks = usize::MAX;
        let sizes = Sizes { per_token, windowed, window, states: mark, fixed, mark, marks, granule };
        Ok(Self { model, guesses, sizes })
    }

    /// The model's context.
    pub(crate) fn context(&self) -> usize {
        self.model.config().max_position_embeddings
    }

    /// Checks all of a request that is known before it runs, but its length.
    pub(crate) fn check(&self, request: &Request) -> Result<(), EngineError> {
        let options = &request.options;
        let check = || {
            match request.prompt.is_empty() {
                true => return Err(ModelError::NoTokens),
                false => self.model.check_ids(&request.prompt)?,
            }
            self.model.check_head()?;
            options.sampling.validate()?;
            LogitBias::new(&options.logit_bias, self.model.config().vocab_size, self.model.host())?;
            Ok(())
        };
        check().map_err(|error| EngineError::Invalid(Arc::new(error)))
    }

    /// An error of a pass: the device's, if it does not answer any more.
    pub(crate) fn sorted(&self, error: ModelError) -> EngineError {
        let is_gpu = matches!(&error, ModelError::Kernel(KernelError::Gpu { .. }));
        match is_gpu && self.model.synchronize().is_err() {
            true => EngineError::DeviceLost(Arc::new(error)),
            false => failed(error),
        }
    }

    fn sample(&self, sampler: &mut Sampler, logits: &Tensor) -> Result<Drawn, ModelError> {
        sampler.steps.sample(logits)?;
        Ok(sampler.steps.drawn()?)
    }

    /// The token that was drawn for a text.
    fn taken(
        &self,
        sampler: &mut Sampler,
        id: Result<u32, ModelError>,
        logits: Option<(&Tensor, usize)>,
    ) -> Result<Sampled, EngineError> {
        let id = id.map_err(|error| self.undrawn(sampler.tokens, error))?;
        sampler.tokens += 1;
        let ends = sampler.stop_ids.contains(&id) || sampler.steps.accept(id).map_err(failed)?;
        let logprobs = logits.map(|(logits, count)| {
            let row = logits.to_device(self.model.host())?;
            Ok(TokenLogprobs::new(row.as_slice::<f32>()?, id, count))
        });
        let logprobs = logprobs.transpose().map_err(|error: KernelError| self.sorted(error.into()))?;
        Ok(Sampled { id, logprobs, ends })
    }

    /// The error of a draw after `tokens` tokens: the device's, or that row's.
    pub(crate) fn undrawn(&self, tokens: usize, error: ModelError) -> EngineError {
        match error {
            error @ ModelError::Kernel(KernelError::Gpu { .. }) => self.sorted(error),
            ModelError::Kernel(error) => failed(ModelError::Draw { tokens, error }),
            error => failed(error),
        }
    }

    /// Draws from rows of `logits`, of which there are none where nothing is drawn.
    fn sample_all<'a>(
        &self,
        logits: Option<&Tensor>,
        drawing: impl Iterator<Item = Drawing<'a, Sampler>>,
    ) -> Result<Vec<Outcome>, EngineError> {
        // All draws are recorded before the host waits for the first. Grammars say what may be
        // drawn while a GPU still runs the pass.
        let (mut drawing, mut drawn) = (drawing.collect::<Vec<_>>(), vec![]);
        let samplers = drawing.iter_mut().map(|(_, sampler, _)| &mut sampler.steps);
        Steps::find_allowed(samplers, self.model.host());
        for (index, sampler, logprobs) in drawing {
            let logits = logits.ok_or_else(|| failed(ModelError::NoTokens))?;
            let logits = logits.rows(index, index + 1).map_err(|error| self.sorted(error.into()))?;
            let recorded = self.sample(sampler, &logits);
            drawn.push((sampler, recorded, logits, logprobs));
        }
        if drawn.is_empty() {
            // The scheduler measures how long a pass takes.
            self.model.synchronize().map_err(|error| self.sorted(error))?;
        }
        let drawn = drawn.into_iter().map(|(sampler, recorded, logits, logprobs)| {
            let id = recorded.and_then(|drawn| Ok(drawn.wait()?));
            of_row(self.taken(sampler, id, logprobs.map(|count| (&logits, count))))
        });
        drawn.collect()
    }

    /// The guesses after a row's text.
    fn drafts(&self, row: &mut Row<'_, Self>) -> Result<Vec<u32>, EngineError> {
        let Some(drafter) = row.sampler.drafter.as_mut().filter(|_| row.samples) else { return Ok(vec![]) };
        drafted(&self.model, &mut **drafter, row.text, row.guesses).map_err(|error| self.sorted(error))
    }

    /// Runs rows with these guesses after them.
    fn verify(&self, rows: &mut [Row<'_, Self>], drafts: &[Vec<u32>]) -> Result<Vec<Ran>, EngineError> {
        let wants_states = rows.iter().any(|row| row.sampler.wants_states());
        let last = rows.iter().map(|row| row.text.last().copied());
        let tokens: Vec<Vec<u32>> = last
            .zip(drafts)
            .map(|(last, drafts)| last.into_iter().chain(drafts.iter().copied()).collect())
            .collect();
        let batch = rows.iter_mut().zip(&tokens).map(|(row, tokens)| Sequence { tokens, cache: row.cache });
        let pass = self.model.forward_drafts(&mut batch.collect::<Vec<_>>(), wants_states);
        let mut pass = pass.map_err(|error| self.sorted(error))?;
        let each = rows.iter_mut().zip(&tokens).enumerate();
        each.map(|(index, (row, tokens))| self.settle(row, tokens, (&mut pass, index))).collect()
    }

    /// Draws what follows the tokens of a row, each as long as it is the next one, and keeps these.
    fn settle(
        &self,
        row: &mut Row<'_, Self>,
        tokens: &[u32],
        (pass, index): (&mut DraftPass, usize),
    ) -> Result<Ran, EngineError> {
        let mut ran = Ran { drawn: vec![], drafted: tokens.len() - 1 };
        let mut goes_on = row.samples;
        while goes_on {
            let at = ran.drawn.len();
            let logits = pass.logits(index, at).map_err(|error| self.sorted(error.into()))?;
            let id = self.sample(row.sampler, &logits).and_then(|drawn| Ok(drawn.wait()?));
            let drawn = of_row(self.taken(row.sampler, id, row.logprobs.map(|count| (&logits, count))))?;
            let came_true = |drawn: &Sampled| !drawn.ends && tokens.get(at + 1) == Some(&drawn.id);
            goes_on = drawn.as_ref().is_ok_and(came_true);
            ran.drawn.push(drawn);
        }
        let (position, kept) = (row.text.len() - 1, ran.drawn.len().max(1));
        let mut settle = || {
            if let Some(states) = pass.states(index, kept)?
                && let Some(drafter) = row.sampler.drafter.as_mut().filter(|drafter| drafter.wants_states())
            {
                drafter.see(position, &tokens[..kept], &states)?;
            }
            Ok(pass.keep(&self.model, row.cache, (index, kept))?)
        };
        settle().map_err(|error: ModelError| self.sorted(error))?;
        Ok(ran)
    }

    /// Reads a part of one prompt, whose states its drafter wants.
    fn prefill_seen(&self, part: &mut Part<'_, Self>, wanted: Logits) -> Result<Option<Tensor>, ModelError> {
        let Part { cache, tokens, sampler, .. } = part;
        let position = cache.position();
        let (logits, states) = self.model.forward_with_states(tokens, cache, wanted)?;
        if let Some(drafter) = &mut sampler.drafter {
            drafter.see(position, tokens, &states)?;
        }
        Ok(logits)
    }

    /// A step of a sequence alone: on a GPU its launches are captured once and replayed.
    fn decode_one(&self, row: &mut Row<'_, Self>) -> Result<Sampled, EngineError> {
        let Sampler { steps, .. } = &mut *row.sampler;
        let id = steps.next(&self.model, row.cache).and_then(|()| Ok(steps.drawn()?.wait()?));
        self.taken(row.sampler, id, None)
    }
}

/// A lost device is not one row's.
pub(crate) fn of_row(
    result: Result<Sampled, EngineError>,
) -> Result<Result<Sampled, EngineError>, EngineError> {
    match result {
        Err(error) if error.is_lost() => Err(error),
        result => Ok(result),
    }
}

/// Up to `most` guesses of ids that the model has.
pub(crate) fn drafted(
    model: &Model,
    drafter: &mut dyn Drafter,
    text: &[u32],
    most: usize,
) -> Result<Vec<u32>, ModelError> {
    if most == 0 {
        return Ok(vec![]);
    }
    let mut drafts = drafter.draft(text, most)?;
    let beyond = drafts.iter().position(|&id| id as usize >= model.config().vocab_size);
    drafts.truncate(beyond.unwrap_or(drafts.len()).min(most));
    Ok(drafts)
}

pub(crate) fn failed(error: ModelError) -> EngineError {
    EngineError::Model(Arc::new(error))
}

/// A request's sampling.
#[derive(Debug)]
pub(crate) struct Sampler {
    steps: Steps,
    /// Tokens of the text.
    tokens: usize,
    /// [`GenerationOptions::stop_ids`](lowbit_models::GenerationOptions::stop_ids).
    stop_ids: Vec<u32>,
    drafter: Option<Box<dyn Drafter>>,
}

impl Sampler {
    fn wants_states(&self) -> bool {
        self.drafter.as_ref().is_some_and(|drafter| drafter.wants_states())
    }
}

impl Runner for ModelRunner {
    type Cache = Cache;
    type Mark = Mark;
    type Sampler = Sampler;

    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn cache(&self, capacity: usize) -> Result<Cache, EngineError> {
        let mut cache = match self.guesses {
            Some(_) => self.model.cache_that_keeps_all(),
            None => self.model.cache(),
        };
        self.make_room(&mut cache, capacity)?;
        Ok(cache)
    }

    fn fork(
        &self,
        cache: &Cache,
        tokens: usize,
        mark: Option<&Mark>,
        capacity: usize,
    ) -> Result<Cache, EngineError> {
        let mut fork = self.model.fork(cache, capacity).map_err(|error| self.sorted(error))?;
        self.go_back(&mut fork, tokens, mark)?;
        Ok(fork)
    }

    fn go_back(&self, cache: &mut Cache, tokens: usize, mark: Option<&Mark>) -> Result<(), EngineError> {
        match mark {
            Some(mark) => cache.go_back(mark).map_err(|error| self.sorted(error.into()))?,
            None => assert!(cache.go_back_to(tokens), "the scheduler goes back to where the cache was"),
        }
        Ok(())
    }

    fn most_parts(&self) -> usize {
        // On a CPU several prompts at a time gained nothing.
        1
    }

    fn marks_on_the_way(&self) -> bool {
        false
    }

    fn make_room(&self, cache: &mut Cache, capacity: usize) -> Result<(), EngineError> {
        self.model.make_room(cache, capacity).map_err(|error| self.sorted(error))
    }

    fn release(&self, sampler: &mut Sampler) {
        sampler.steps.release();
    }

    fn sampler(&self, request: &Request) -> Result<Sampler, EngineError> {
        let steps = Steps::new(None, &self.model, (&request.prompt, &self.model.cache()), &request.options);
        let steps = steps.map_err(|error| self.sorted(error))?;
        let (tokens, stop_ids) = (request.prompt.len(), request.options.stop_ids.clone());
        let drafter = self.guesses.as_ref().map(|guesses| guesses.drafter(&self.model, request));
        Ok(Sampler { steps, tokens, stop_ids, drafter })
    }

    fn prefill(&self, parts: &mut [Part<'_, Self>]) -> Result<Vec<Outcome>, EngineError> {
        let wanted = Part::logits(parts);
        let logits = match &mut *parts {
            [part] if part.sampler.wants_states() => self.prefill_seen(part, wanted),
            parts => {
                let batch = parts.iter_mut().map(|Part { tokens, cache, .. }| Sequence { tokens, cache });
                self.model.forward_batch(&mut batch.collect::<Vec<_>>(), wanted)
            }
        };
        let logits = logits.map_err(|error| self.sorted(error))?;
        for part in &mut *parts {
            let mark = |&place: &usize| Ok((place, part.cache.mark()?));
            let marks: Result<_, KernelError> = part.places.iter().map(mark).collect();
            part.marks = marks.map_err(|error| self.sorted(error.into()))?;
        }
        self.sample_all(logits.as_ref(), Part::drawing(parts))
    }

    fn guess_limits(&self) -> GuessLimits {
        self.guesses.as_ref().map_or_else(GuessLimits::default, |it| it.limits(self.model.device()))
    }

    fn decode(&self, rows: &mut [Row<'_, Self>]) -> Result<Vec<Ran>, EngineError> {
        let drafts = rows.iter_mut().map(|row| self.drafts(row)).collect::<Result<Vec<_>, _>>()?;
        if drafts.iter().any(|drafts| !drafts.is_empty()) || rows.iter().any(|row| row.sampler.wants_states())
        {
            return self.verify(rows, &drafts);
        }
        // To capture a step takes room for two.
        if let [row @ Row { samples: true, logprobs: None, .. }] = rows
            && row.cache.has_room(2)
        {
            return Ok(vec![Ran::one(of_row(self.decode_one(row))?)]);
        }
        rows.iter_mut().for_each(|row| self.release(row.sampler));
        let mut batch: Vec<Sequence<'_>> = rows
            .iter_mut()
            .map(|Row { text, cache, .. }| Sequence { tokens: &text[text.len() - 1..], cache })
            .collect();
        let logits = self.model.forward_batch(&mut batch, Logits::Last);
        let logits = logits.map_err(|error| self.sorted(error))?;
        let samples: Vec<bool> = rows.iter().map(|row| row.samples).collect();
        let drawing = rows.iter_mut().enumerate().filter(|(_, row)| row.samples);
        let drawing = drawing.map(|(index, row)| (index, &mut *row.sampler, row.logprobs));
        let mut drawn = self.sample_all(logits.as_ref(), drawing)?.into_iter();
        let of_row = |samples| Ran { drawn: drawn.by_ref().take(usize::from(samples)).collect(), drafted: 0 };
        Ok(samples.into_iter().map(of_row).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowbit_files::Checkpoint;
    use lowbit_kernels::Device;
    use std::path::Path;

    #[test]
    fn the_scheduler_counts_the_bytes_that_caches_have() {
        for name in ["qwen3", "qwen3_5", "gemma4", "mistral"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models").join(name);
            let checkpoint = Checkpoint::open(&folder).unwrap();
            let model = Model::load(&checkpoint, &Device::cpu(Some(1)).unwrap()).unwrap();
            let runner = ModelRunner::new(model, None).unwrap();
            let mut sampler = runner.sampler(&Request::new(vec![1])).unwrap();
            let sizes = runner.sizes();
            let bytes = |cache: &Cache, tokens| {
                assert_eq!(cache.size_bytes(), sizes.bytes(sizes.capacity(tokens)), "{name}: {tokens}");
            };
            let mut read = |cache: &mut Cache, tokens: &[u32], places: &[usize]| {
                let (sampler, marks, draws, logprobs) = (&mut sampler, vec![], false, None);
                let mut parts = [Part { cache, tokens, places, marks, sampler, draws, logprobs }];
                assert!(runner.prefill(&mut parts).unwrap().is_empty());
                let [part] = parts;
                part.marks.into_iter().next().map(|(_, mark)| mark)
            };
            let mut cache = runner.cache(100).unwrap();
            bytes(&cache, 100);
            let mark = read(&mut cache, &[1; 64], if sizes.states > 0 { &[64] } else { &[] });
            read(&mut cache, &[2; 64], &[]);
            runner.make_room(&mut cache, 257).unwrap();
            bytes(&cache, 257);
            // Longer than windows keep.
            read(&mut cache, &[3; 256], &[]);
            runner.make_room(&mut cache, 512).unwrap();
            bytes(&cache, 512);
            let fork = runner.fork(&cache, 64, mark.as_ref(), 700).unwrap();
            bytes(&fork, 700);
            assert_eq!((cache.position(), fork.position()), (384, 64));
        }
    }
}
