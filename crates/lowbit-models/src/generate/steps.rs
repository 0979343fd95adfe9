use super::LogitRules;
use crate::layers::Step;
use crate::{Cache, GenerationOptions, Model, ModelError};
use lowbit_kernels::gpu::Pass;
use lowbit_kernels::ops::{self, DecodeState, Drawn, SampleParams};
use lowbit_kernels::{Device, KernelError, Tensor};

/// Decode steps: each runs the model on the last token and samples the next one, all on the device.
/// On a GPU the step is captured once and replayed, also in later replies if it still fits them.
///
/// A grammar must know a token before it says what may follow. The model runs on the token
/// meanwhile: only its pass is captured, and the draw is recorded behind it.
#[derive(Debug)]
pub struct Steps {
    sampling: SampleParams,
    rules: LogitRules,
    state: DecodeState,
    /// u32 `[0, 1]`: a step has one token.
    cu_seqlens: Tensor,
    pass: Option<Pass>,
    /// The logits that the captured pass writes, where a grammar comes between it and the draw.
    logits: Option<Tensor>,
}

impl Steps {
    /// Steps after `tokens`. The step that `last`, those of the previous reply, captured is
    /// replayed if it still fits: same sampling, same memory of `cache`, which no fork shares, and
    /// no grammar.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for no tokens, a bias of an id outside the vocabulary, or when a GPU
    /// fails.
    pub fn new(
        last: Option<Self>,
        model: &Model,
        (tokens, cache): (&[u32], &Cache),
        options: &GenerationOptions,
    ) -> Result<Self, ModelError> {
        let (sampling, device) = (options.sampling, model.device());
        // No text is longer than the model's context.
        let window = options.repetition_context.min(model.config().max_position_embeddings);
        let suits = |last: &Self| {
            last.sampling == sampling && last.rules.are_of(options) && last.state.window() == window
        };
        if let Some(mut steps) = last.filter(suits) {
            steps.state.restart(tokens)?;
            let state = steps.state.tensors();
            steps.pass.take_if(|pass| !cache.captured().chain(state).all(|tensor| pass.uses(tensor)));
            return Ok(steps);
        }
        Ok(Self {
            sampling,
            rules: LogitRules::new(options, model)?,
            state: DecodeState::new(tokens, window, device)?,
            cu_seqlens: Tensor::new(&[0u32, 1], &[2], device)?,
            pass: None,
            logits: None,
        })
    }

    /// Samples a token: from the prompt's logits, to begin with.
    ///
    /// # Errors
    /// As [`ops::sample_next`]; [`ModelError::Grammar`].
    pub fn sample(&mut self, logits: &Tensor) -> Result<(), ModelError> {
        let logits = self.rules.apply(logits)?;
        Ok(ops::sample_next(&logits, &mut self.state, &self.sampling)?)
    }

    /// As [`LogitRules::find_allowed`], for the next [`Self::sample`] of several texts.
    pub fn find_allowed<'a>(texts: impl Iterator<Item = &'a mut Self>, host: &Device) {
        LogitRules::find_allowed(texts.map(|text| &mut text.rules), host);
    }

    /// Takes the token that was sampled last, unless it ended the text; true if the text is
    /// complete in its grammar.
    ///
    /// # Errors
    /// [`ModelError::Grammar`].
    pub fn accept(&mut self, id: u32) -> Result<bool, ModelError> {
        self.rules.accept(id)
    }

    /// A handle to the token sampled last. To be taken before the next step is recorded.
    ///
    /// # Errors
    /// [`KernelError::Gpu`].
    pub fn drawn(&self) -> Result<Drawn, KernelError> {
        self.state.drawn()
    }

    /// True if [`Self::next`] only queues a replay, without waiting for anything, and need not know
    /// the token sampled last.
    pub fn is_captured(&self, cache: &Cache) -> bool {
        self.pass.is_some() && !self.rules.has_grammar() && cache.has_room(1)
    }

    /// Forgets the captured step: the cache that it writes to is about to move.
    pub fn release(&mut self) {
        self.pass = None;
    }

    /// Runs the model on the token sampled last and samples the next one. `cache` is always the
    /// same, unless [`Self::release`] is called before it is another one or its memory moves. With
    /// a grammar, [`Self::accept`] must have taken the token.
    ///
    /// # Errors
    /// Those of the model's ops, and of [`Self::sample`].
    pub fn next(&mut self, model: &Model, cache: &mut Cache) -> Result<(), ModelError> {
        // A cache without room is about to move away from where a captured pass writes.
        self.pass.take_if(|_| !cache.has_room(1));
        match &self.pass {
            Some(pass) => {
                // Windows that are full move on, where they are.
                model.reserve(cache, 1)?;
                pass.replay()?;
                cache.advance(1);
                let logits = self.logits.clone().filter(|_| self.rules.has_grammar());
                logits.map_or(Ok(()), |logits| self.sample(&logits))
            }
            None => {
                // The second recording is for the following steps and does not run now.
                let recordings = 1 + usize::from(model.device().plan().captures);
                model.reserve(cache, recordings)?;
                let before = cache.position();
                let mut recorded = vec![];
                self.pass = model.device().capture(|| {
                    let result = self.record(model, cache, &mut recorded);
                    cache.set_position(cache.position().min(before + 1));
                    result
                })?;
                let mut recorded = recorded.into_iter();
                let first = recorded.next();
                self.logits = recorded.next();
                first.map_or(Ok(()), |logits| self.sample(&logits))
            }
        }
    }

    /// Records the pass, and the draw, too, if it needs no grammar; else the logits come to
    /// `recorded`.
    fn record(
        &mut self,
        model: &Model,
        cache: &mut Cache,
        recorded: &mut Vec<Tensor>,
    ) -> Result<(), KernelError> {
        let logits = self.forward(model, cache)?;
        if self.rules.has_grammar() {
            recorded.push(logits);
            return Ok(());
        }
        ops::sample_next(&self.rules.biased(&logits)?, &mut self.state, &self.sampling)
    }

    fn forward(&self, model: &Model, cache: &mut Cache) -> Result<Tensor, KernelError> {
        let step = Step::one(self.state.position().clone(), self.cu_seqlens.clone());
        model.decode(self.state.token(), &step, cache)
    }
}
