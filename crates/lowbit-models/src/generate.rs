use crate::layers::Step;
use crate::{Cache, Logits, Model, ModelError};
use lowbit_kernels::gpu::Pass;
use lowbit_kernels::ops::{self, DecodeState, SampleParams};
use lowbit_kernels::{Device, KernelError, Tensor};
use std::ops::ControlFlow;

/// Prompt tokens that go through the model at a time.
fn chunk(device: &Device) -> usize {
    match device {
        Device::Cpu(_) => 512,
        // Large products keep its units busy.
        Device::Gpu(_) => 4096,
    }
}

/// A model in the middle of a text: its caches and the tokens they stand for.
#[derive(Clone, Debug)]
pub struct Session<'m> {
    model: &'m Model,
    cache: Cache,
    tokens: Vec<u32>,
}

/// How a generation goes on and when it ends.
#[derive(Clone, Debug)]
pub struct GenerationOptions {
    /// How tokens are chosen.
    pub sampling: SampleParams,
    /// Tokens to write at most.
    pub max_tokens: usize,
    /// Ids that end the text; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// The repetition penalty looks at this many last tokens.
    pub repetition_context: usize,
}

impl Default for GenerationOptions {
    /// Greedy, up to 256 tokens.
    fn default() -> Self {
        Self { sampling: SampleParams::default(), max_tokens: 256, stop_ids: vec![], repetition_context: 64 }
    }
}

/// What a generation wrote.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Ids, without the one that ended it.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model wrote a stop id.
    Stop,
    /// `max_tokens` were written, or the context is full.
    Length,
    /// The caller broke it off.
    Interrupted,
}

impl<'m> Session<'m> {
    /// An empty text.
    pub fn new(model: &'m Model) -> Self {
        Self { model, cache: model.cache(), tokens: vec![] }
    }

    /// All tokens of the text so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The caches behind it.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Runs the prompt through the model in chunks and returns the logits after its last token. `progress` is told
    /// the prompt tokens done after each chunk, and can break off (`None` is returned then).
    ///
    /// # Errors
    /// As [`Model::forward`]; a prompt that does not fit is refused before any of it is run.
    pub fn prefill(
        &mut self,
        prompt: &[u32],
        mut progress: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Option<Tensor>, ModelError> {
        let (total, limit) = (self.tokens.len() + prompt.len(), self.model.config().max_position_embeddings);
        if total > limit {
            return Err(ModelError::ContextLength { tokens: total, limit });
        }
        let mut chunks = prompt.chunks(chunk(self.model.device())).peekable();
        let mut done = 0;
        while let Some(chunk) = chunks.next() {
            let wanted = if chunks.peek().is_some() { Logits::None } else { Logits::Last };
            let logits = self.run(chunk, wanted)?;
            done += chunk.len();
            if progress(done).is_break() {
                return Ok(None);
            }
            if logits.is_some() {
                return Ok(logits);
            }
        }
        Err(ModelError::NoTokens)
    }

    /// Writes tokens from `logits` on (the last [`Self::prefill`]'s), calling `each` with every one.
    ///
    /// # Errors
    /// Those of sampling and of [`Model::forward`].
    pub fn generate(
        &mut self,
        logits: Tensor,
        options: &GenerationOptions,
        mut each: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, ModelError> {
        let mut tokens = vec![];
        if options.max_tokens == 0 {
            return Ok(Generation { tokens, finish: Finish::Length });
        }
        let mut steps = Steps::new(self.model, &self.tokens, options)?;
        let mut id = steps.first(&logits)?;
        let finish = loop {
            if options.stop_ids.contains(&id) {
                break Finish::Stop;
            }
            tokens.push(id);
            if each(id).is_break() {
                break Finish::Interrupted;
            }
            let full = self.tokens.len() == self.model.config().max_position_embeddings;
            if tokens.len() == options.max_tokens || full {
                break Finish::Length;
            }
            self.tokens.push(id);
            id = steps.next(&mut self.cache)?;
        };
        Ok(Generation { tokens, finish })
    }

    fn run(&mut self, tokens: &[u32], logits: Logits) -> Result<Option<Tensor>, ModelError> {
        let logits = self.model.forward(tokens, &mut self.cache, logits)?;
        self.tokens.extend(tokens);
        Ok(match logits {
            Some(logits) => Some(logits.reshape(&[self.model.config().vocab_size])?),
            None => None,
        })
    }
}

/// Token after token: the model on the last one, and the draw of the next, all on the device. On a GPU the step is
/// captured once and replayed.
struct Steps<'a> {
    model: &'a Model,
    sampling: &'a SampleParams,
    state: DecodeState,
    /// u32 `[0, 1]`: a step has one token.
    cu_seqlens: Tensor,
    pass: Option<Pass>,
}

impl<'a> Steps<'a> {
    /// After `tokens`.
    fn new(model: &'a Model, tokens: &[u32], options: &'a GenerationOptions) -> Result<Self, ModelError> {
        let device = model.device();
        Ok(Self {
            model,
            sampling: &options.sampling,
            state: DecodeState::new(tokens, options.repetition_context, device)?,
            cu_seqlens: Tensor::new(&[0u32, 1], &[2], device)?,
            pass: None,
        })
    }

    /// Draws from the prompt's logits.
    fn first(&mut self, logits: &Tensor) -> Result<u32, ModelError> {
        ops::sample_next(logits, &mut self.state, self.sampling)?;
        Ok(self.state.drawn()?.wait()?)
    }

    /// Runs the model on the token drawn last and draws the next one.
    fn next(&mut self, cache: &mut Cache) -> Result<u32, ModelError> {
        // A cache without room is about to move away from where a captured pass writes.
        self.pass.take_if(|_| !cache.has_room(1));
        let model = self.model;
        match (model.device(), &self.pass) {
            (_, Some(pass)) => {
                pass.replay()?;
                cache.advance(1);
            }
            (device @ Device::Cpu(_), None) => device.run(|| self.step(cache))?,
            (Device::Gpu(gpu), None) => {
                model.reserve(cache, 2)?;
                let before = cache.position();
                self.pass = Some(gpu.capture(|| {
                    // What is recorded second is for the steps that follow, and does not run now.
                    let result = self.step(cache);
                    cache.set_position(before + 1);
                    result
                })?);
            }
        }
        Ok(self.state.drawn()?.wait()?)
    }

    fn step(&mut self, cache: &mut Cache) -> Result<(), KernelError> {
        let step = Step { positions: self.state.position().clone(), cu_seqlens: self.cu_seqlens.clone() };
        let logits = self.model.decode(self.state.token(), &step, cache)?;
        ops::sample_next(&logits, &mut self.state, self.sampling)
    }
}
