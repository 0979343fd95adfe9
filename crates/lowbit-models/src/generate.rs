use crate::{Cache, Logits, Model, ModelError};
use lowbit_kernels::Tensor;
use lowbit_kernels::ops::{self, SampleParams};
use std::ops::ControlFlow;

/// Prompt tokens that go through the model at a time.
const PREFILL_CHUNK: usize = 512;

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
        let mut chunks = prompt.chunks(PREFILL_CHUNK).peekable();
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
        mut logits: Tensor,
        options: &GenerationOptions,
        mut each: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, ModelError> {
        let mut tokens = vec![];
        let mut finish = Finish::Length;
        while tokens.len() < options.max_tokens {
            let history = &self.tokens[self.tokens.len().saturating_sub(options.repetition_context)..];
            let id = ops::sample(&logits, history, &options.sampling, tokens.len() as u64)?;
            if options.stop_ids.contains(&id) {
                finish = Finish::Stop;
                break;
            }
            tokens.push(id);
            if each(id).is_break() {
                finish = Finish::Interrupted;
                break;
            }
            if tokens.len() == options.max_tokens
                || self.tokens.len() == self.model.config().max_position_embeddings
            {
                break;
            }
            match self.run(&[id], Logits::Last)? {
                Some(next) => logits = next,
                None => break,
            }
        }
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
