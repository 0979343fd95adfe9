use crate::layers::Step;
use crate::{Cache, GenerationOptions, Model, ModelError};
use lowbit_kernels::gpu::Pass;
use lowbit_kernels::ops::{self, DecodeState, Drawn, LogitBias, SampleParams};
use lowbit_kernels::{Device, KernelError, Tensor};

/// Decode steps: each runs the model on the last token and samples the next one, all on the device.
/// On a GPU the step is captured once and replayed, also in later replies if it still fits them.
#[derive(Debug)]
pub struct Steps {
    sampling: SampleParams,
    /// The token ids and values that `bias` was made of.
    biases: Vec<(u32, f32)>,
    bias: Option<LogitBias>,
    state: DecodeState,
    /// u32 `[0, 1]`: a step has one token.
    cu_seqlens: Tensor,
    pass: Option<Pass>,
}

impl Steps {
    /// Steps after `tokens`. The step that `last`, those of the previous reply, captured is
    /// replayed if it still fits: same sampling, same memory of `cache`, which no fork shares.
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
            last.sampling == sampling && last.biases == options.logit_bias && last.state.window() == window
        };
        if let Some(mut steps) = last.filter(suits) {
            steps.state.restart(tokens)?;
            let state = steps.state.tensors();
            steps.pass.take_if(|pass| !cache.tensors().chain(state).all(|tensor| pass.uses(tensor)));
            return Ok(steps);
        }
        Ok(Self {
            sampling,
            biases: options.logit_bias.clone(),
            bias: LogitBias::new(&options.logit_bias, model.config().vocab_size, device)?,
            state: DecodeState::new(tokens, window, device)?,
            cu_seqlens: Tensor::new(&[0u32, 1], &[2], device)?,
            pass: None,
        })
    }

    /// Samples a token: from the prompt's logits, to begin with.
    ///
    /// # Errors
    /// As [`ops::sample_next`].
    pub fn sample(&mut self, logits: &Tensor) -> Result<(), KernelError> {
        match &self.bias {
            None => ops::sample_next(logits, &mut self.state, &self.sampling),
            Some(bias) => ops::sample_next(&ops::logit_bias(logits, bias)?, &mut self.state, &self.sampling),
        }
    }

    /// A handle to the token sampled last. To be taken before the next step is recorded.
    ///
    /// # Errors
    /// [`KernelError::Gpu`].
    pub fn drawn(&self) -> Result<Drawn, KernelError> {
        self.state.drawn()
    }

    /// True if [`Self::next`] only queues a replay, without waiting for anything.
    pub fn is_captured(&self, cache: &Cache) -> bool {
        self.pass.is_some() && cache.has_room(1)
    }

    /// Forgets the captured step: the cache that it writes to is about to move.
    pub fn release(&mut self) {
        self.pass = None;
    }

    /// Runs the model on the token sampled last and samples the next one. `cache` is always the
    /// same, unless [`Self::release`] is called before it is another one or its memory moves.
    ///
    /// # Errors
    /// Those of the model's ops, and of [`ops::sample_next`].
    pub fn next(&mut self, model: &Model, cache: &mut Cache) -> Result<(), KernelError> {
        // A cache without room is about to move away from where a captured pass writes.
        self.pass.take_if(|_| !cache.has_room(1));
        match (model.device(), &self.pass) {
            (_, Some(pass)) => {
                pass.replay()?;
                cache.advance(1);
            }
            (Device::Cpu(_), None) => self.step(model, cache)?,
            (Device::Gpu(gpu), None) => {
                model.reserve(cache, 2)?;
                let before = cache.position();
                self.pass = Some(gpu.capture(|| {
                    // The second recording is for the following steps and does not run now.
                    let result = self.step(model, cache);
                    cache.set_position(before + 1);
                    result
                })?);
            }
        }
        Ok(())
    }

    fn step(&mut self, model: &Model, cache: &mut Cache) -> Result<(), KernelError> {
        let step = Step::one(self.state.position().clone(), self.cu_seqlens.clone());
        let logits = model.decode(self.state.token(), &step, cache)?;
        self.sample(&logits)
    }
}
