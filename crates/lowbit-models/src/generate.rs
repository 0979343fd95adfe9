mod rules;
mod speculating;
mod steps;

use crate::{Cache, Grammar, Logits, Mark, Model, ModelError, Speculated, Speculation};
use lowbit_files::GenerationConfig;
use lowbit_kernels::Tensor;
use lowbit_kernels::ops::SampleParams;
pub use rules::LogitRules;
use std::ops::ControlFlow;
use std::sync::Arc;
pub use steps::Steps;

/// Places that a session remembers at most: each takes the memory of the model's delta nets'
/// states, and of its windows.
const MARKS: usize = 4;

/// A model with a text in progress: the prompts, and all tokens sampled after them. A clone is a
/// fork: both continue from the same text, independently. (The clone does not
/// [speculate](Self::speculate) until it is told to.)
///
/// The last sampled token may not have run through the model yet; the next [`Self::prefill`] then
/// starts with it. After a device error the text cannot be continued: [`Self::clear`] starts over.
#[derive(Debug)]
pub struct Session<'m> {
    model: &'m Model,
    cache: Cache,
    tokens: Vec<u32>,
    /// Places to go back to, in the text's order.
    marks: Vec<Mark>,
    /// The last reply's, whose captured step the next ones replay.
    steps: Option<Steps>,
    speculation: Option<Speculation<'m>>,
}

impl Clone for Session<'_> {
    fn clone(&self) -> Self {
        // A captured step writes to the original's caches, and a drafter follows the original's
        // text.
        let Self { model, cache, tokens, marks, steps: _, speculation: _ } = self;
        let (cache, tokens, marks) = (cache.clone(), tokens.clone(), marks.clone());
        Self { model, cache, tokens, marks, steps: None, speculation: None }
    }
}

/// Options for sampling tokens and ending a generation: [`GenerationOptions::default`], changed by
/// its `with_` methods.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GenerationOptions {
    /// Sampling.
    pub sampling: SampleParams,
    /// The most tokens to sample.
    pub max_tokens: usize,
    /// Ids that end the text; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// The number of last tokens that penalties look at; more than the model's context means all.
    pub repetition_context: usize,
    /// Added to the logits of these ids before any penalty, see
    /// [`logit_bias`](lowbit_kernels::ops::logit_bias()).
    pub logit_bias: Vec<(u32, f32)>,
    /// The form that the text must have. It ends with [`Finish::Stop`] where it is complete.
    pub grammar: Option<Arc<dyn Grammar>>,
}

impl Default for GenerationOptions {
    /// Greedy, up to 256 tokens.
    fn default() -> Self {
        Self {
            sampling: SampleParams::default(),
            max_tokens: 256,
            stop_ids: vec![],
            repetition_context: 64,
            logit_bias: vec![],
            grammar: None,
        }
    }
}

impl GenerationOptions {
    /// The default with a checkpoint's recommended sampling: greedy if it recommends that or
    /// nothing, see [`GenerationConfig::recommended_temperature`].
    pub fn recommended(config: &GenerationConfig) -> Self {
        let default = Self::default();
        let neutral = default.sampling;
        let sampling = SampleParams {
            temperature: config.recommended_temperature().unwrap_or(neutral.temperature),
            top_k: config.top_k.map_or(neutral.top_k, |top_k| top_k as usize),
            top_p: config.top_p.unwrap_or(neutral.top_p),
            min_p: config.min_p.unwrap_or(neutral.min_p),
            repetition_penalty: config.repetition_penalty.unwrap_or(neutral.repetition_penalty),
            ..neutral
        };
        let repetition_context = config.repetition_context.unwrap_or(default.repetition_context);
        Self { sampling, repetition_context, ..default }
    }

    /// With this sampling.
    #[must_use]
    pub fn with_sampling(self, sampling: SampleParams) -> Self {
        Self { sampling, ..self }
    }

    /// With at most this many tokens.
    #[must_use]
    pub fn with_max_tokens(self, max_tokens: usize) -> Self {
        Self { max_tokens, ..self }
    }

    /// With these ids that end the text.
    #[must_use]
    pub fn with_stop_ids(self, stop_ids: Vec<u32>) -> Self {
        Self { stop_ids, ..self }
    }

    /// With penalties that look at this many last tokens.
    #[must_use]
    pub fn with_repetition_context(self, repetition_context: usize) -> Self {
        Self { repetition_context, ..self }
    }

    /// With these numbers added to the logits of these ids.
    #[must_use]
    pub fn with_logit_bias(self, logit_bias: Vec<(u32, f32)>) -> Self {
        Self { logit_bias, ..self }
    }

    /// With this form, which the text must have: only tokens that it allows are sampled. The ids
    /// that end the text must be those that the grammar knows as such.
    #[must_use]
    pub fn with_grammar(self, grammar: Arc<dyn Grammar>) -> Self {
        Self { grammar: Some(grammar), ..self }
    }
}

/// The result of a generation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Generation {
    /// Ids, without the stop id.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// The guesses that were verified, if the session speculates.
    pub speculated: Speculated,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model sampled a stop id, or the text is complete in its grammar.
    Stop,
    /// `max_tokens` were sampled, or the context is full.
    Length,
    /// The caller interrupted it.
    Interrupted,
}

impl<'m> Session<'m> {
    /// An empty text.
    pub fn new(model: &'m Model) -> Self {
        Self { model, cache: model.cache(), tokens: vec![], marks: vec![], steps: None, speculation: None }
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Guesses tokens from now on and verifies several in one pass, or stops to do so. What is
    /// written does not depend on guesses. On a CPU it is what is written without, if the model's
    /// weights are quantised and not [exact](crate::Target::with_exact): each row of a pass has the
    /// bits of a step of its own. Elsewhere products of several rows add up in another order than
    /// those of one, and a draw between two tokens that are almost equally likely may differ.
    ///
    /// Layers whose queries see a window keep everything then: a pass writes rows that are taken
    /// back. Guesses after a text that was read without them make it read again.
    pub fn speculate(&mut self, speculation: Option<Speculation<'m>>) {
        if speculation.is_some() && self.cache.position() == 0 {
            (self.cache, self.steps) = (self.model.cache_that_keeps_all(), None);
        }
        self.speculation = speculation;
    }

    /// Reads the text again into a cache that keeps all of it, if this one forgets.
    fn keep_all(&mut self) -> Result<(), ModelError> {
        if self.cache.forgets() {
            let mut cache = self.model.cache_that_keeps_all();
            self.model.forward(&self.tokens[..self.cache.position()], &mut cache, Logits::None)?;
            (self.cache, self.steps) = (cache, None);
            self.marks.clear();
        }
        Ok(())
    }

    /// Empties the text, and keeps the memory and the step that the last reply captured.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] when a GPU fails.
    pub fn clear(&mut self) -> Result<(), ModelError> {
        self.tokens.clear();
        self.marks.clear();
        Ok(self.cache.clear()?)
    }

    /// True if [`Self::go_back`] reaches every place without a [mark](Self::mark), as in models of
    /// attention to the whole text alone.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] when a GPU fails.
    pub fn goes_back_anywhere(&mut self) -> Result<bool, ModelError> {
        self.model.reserve(&mut self.cache, 0)?;
        Ok(self.cache.goes_back_anywhere())
    }

    /// Marks this place for [`Self::go_back`]. Only models with states that cannot go back by
    /// themselves (gated delta nets'), or with windows, need marks; for others this does nothing.
    /// Four places are kept: the first, often the end of a long system message, and the last three.
    /// Each takes the memory of the states and of the windows.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] when a GPU has no such memory left.
    pub fn mark(&mut self) -> Result<(), ModelError> {
        let position = self.cache.position();
        let is_known = self.marks.iter().any(|mark| mark.position() == position);
        if position == 0 || is_known || self.cache.goes_back_anywhere() {
            return Ok(());
        }
        if self.marks.len() == MARKS {
            self.marks.remove(1);
        }
        self.marks.push(self.cache.mark()?);
        Ok(())
    }

    /// Goes back to the first `tokens` tokens of the text, or to the last place before that it can
    /// reach: a [mark](Self::mark), or the start. Returns the number of tokens that the text then
    /// has.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] when a GPU fails.
    pub fn go_back(&mut self, tokens: usize) -> Result<usize, ModelError> {
        let (tokens, position) = (tokens.min(self.tokens.len()), self.cache.position());
        if tokens < position {
            self.marks.retain(|mark| mark.position() <= tokens);
            if !self.cache.go_back_to(tokens) {
                let Some(mark) = self.marks.last() else {
                    self.clear()?;
                    return Ok(0);
                };
                self.cache.go_back(mark)?;
            }
            self.tokens.truncate(self.cache.position());
        } else {
            // The token drawn last has not run.
            self.tokens.truncate(tokens);
        }
        Ok(self.tokens.len())
    }

    /// All tokens of the text so far: prompts and all sampled tokens, the ids that ended replies
    /// included.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The most tokens that the text may have: the model's context.
    pub fn context(&self) -> usize {
        self.model.config().max_position_embeddings
    }

    /// The session's caches, which have seen all tokens, or all but the last sampled one.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Runs the prompt through the model in chunks and returns the logits after its last token.
    /// `progress` is called after each chunk with the number of prompt tokens done; if it returns
    /// `Break`, the result is `None`.
    ///
    /// # Errors
    /// As [`Model::forward`], also for an empty prompt after a reply. A prompt that cannot run is
    /// refused before any of it runs.
    pub fn prefill(
        &mut self,
        prompt: &[u32],
        mut progress: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Option<Tensor>, ModelError> {
        let (total, limit) = (self.tokens.len() + prompt.len(), self.context());
        if total > limit {
            return Err(ModelError::ContextLength { tokens: total, limit });
        }
        if prompt.is_empty() {
            return Err(ModelError::NoTokens);
        }
        self.model.check_ids(prompt)?;
        let pending = self.tokens.get(self.cache.position()..).unwrap_or_default();
        let (before, tokens) = (pending.len(), [pending, prompt].concat());
        if !self.cache.has_room(tokens.len()) {
            // The caches are about to be reallocated: the captured step is useless, and would keep
            // the old memory alive.
            self.steps = None;
        }
        let mut chunks = tokens.chunks(self.model.device().plan().prompt_tokens).peekable();
        let (mut done, mut logits) = (0, None);
        while let Some(chunk) = chunks.next() {
            let wanted = if chunks.peek().is_some() { Logits::None } else { Logits::Last };
            logits = self.run(chunk, wanted)?;
            done += chunk.len();
            if progress(done.saturating_sub(before)).is_break() {
                return Ok(None);
            }
        }
        Ok(logits)
    }

    /// Generates tokens from `logits` (the last [`Self::prefill`]'s) and calls `each` with every
    /// one. All sampled tokens become part of the text, stop ids too. A GPU already samples the
    /// next token while `each` runs, unless a grammar says first what it may be.
    ///
    /// # Errors
    /// Those of [`Model::forward`]; [`ModelError::Draw`] with those of sampling, for instance for
    /// logits that are NaN or infinite (-inf beside finite logits is allowed, and never sampled);
    /// [`ModelError::Grammar`].
    pub fn generate(
        &mut self,
        logits: Tensor,
        options: &GenerationOptions,
        mut each: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, ModelError> {
        let mut tokens = vec![];
        if options.max_tokens == 0 {
            return Ok(Generation { tokens, finish: Finish::Length, speculated: Speculated::default() });
        }
        options.sampling.validate()?;
        if self.speculation.is_some() {
            return self.generate_speculating(&logits, options, &mut each);
        }
        let text = (&self.tokens[..], &self.cache);
        let mut steps = Steps::new(self.steps.take(), self.model, text, options)?;
        let limit = self.context();
        let after = |tokens: usize| {
            move |error: ModelError| match error {
                ModelError::Kernel(error) => ModelError::Draw { tokens, error },
                error => error,
            }
        };
        steps.sample(&logits).map_err(after(self.tokens.len()))?;
        let finish = loop {
            let drawn = steps.drawn()?;
            let goes_on = tokens.len() + 1 < options.max_tokens && self.tokens.len() < limit;
            // The next step is queued before the host waits for this one's token, so that the
            // device does not wait.
            let ahead = goes_on && steps.is_captured(&self.cache);
            if ahead {
                // It runs the token that is still being sampled.
                steps.next(self.model, &mut self.cache).map_err(after(self.tokens.len() + 1))?;
            }
            let id = drawn.wait().map_err(|error| after(self.tokens.len())(error.into()))?;
            self.tokens.push(id);
            if options.stop_ids.contains(&id) {
                break Finish::Stop;
            }
            tokens.push(id);
            let is_complete = steps.accept(id)?;
            if each(id).is_break() {
                break Finish::Interrupted;
            }
            if is_complete {
                break Finish::Stop;
            }
            if !goes_on {
                break Finish::Length;
            }
            if !ahead {
                steps.next(self.model, &mut self.cache).map_err(after(self.tokens.len()))?;
            }
        };
        self.steps = Some(steps);
        Ok(Generation { tokens, finish, speculated: Speculated::default() })
    }

    /// Runs tokens after those that the caches have seen.
    fn run(&mut self, tokens: &[u32], logits: Logits) -> Result<Option<Tensor>, ModelError> {
        let position = self.cache.position();
        self.tokens.truncate(position);
        let logits = match &mut self.speculation {
            Some(speculation) if speculation.drafter.wants_states() => {
                let (logits, states) = self.model.forward_with_states(tokens, &mut self.cache, logits)?;
                speculation.drafter.see(position, tokens, &states)?;
                logits
            }
            _ => self.model.forward(tokens, &mut self.cache, logits)?,
        };
        self.tokens.extend(tokens);
        Ok(match logits {
            Some(logits) => Some(logits.reshape(&[self.model.config().vocab_size])?),
            None => None,
        })
    }
}

#[cfg(all(test, any(feature = "cuda", feature = "vulkan", feature = "metal")))]
mod gpu_tests {
    use super::*;
    use crate::support::{gpu, load, root};
    use lowbit_formats::FloatType;
    use std::ops::ControlFlow::Continue;

    /// True if the next reply's first step is a replay.
    fn replays(session: &mut Session<'_>, options: &GenerationOptions) -> bool {
        let (last, text) = (session.steps.take(), (&session.tokens[..], &session.cache));
        let steps = Steps::new(last, session.model, text, options).unwrap();
        let is_captured = steps.is_captured(&session.cache);
        session.steps = Some(steps);
        is_captured
    }

    #[test]
    fn what_a_reply_captured_is_replayed_where_it_suits() {
        let model = load(&root().join("models/demo-4bit"), &gpu(), FloatType::F32);
        let options = GenerationOptions { max_tokens: 3, ..Default::default() };
        let mut session = Session::new(&model);
        let reply = |session: &mut Session<'_>, tokens: usize| {
            let logits = session.prefill(&vec![7; tokens], |_| Continue(())).unwrap().unwrap();
            session.generate(logits, &options, |_| Continue(())).unwrap();
        };
        reply(&mut session, 40);
        assert!(replays(&mut session, &options));
        session.prefill(&[1, 2, 3], |_| Continue(())).unwrap();
        assert!(replays(&mut session, &options), "a prompt stays in place");
        let mut fork = session.clone();
        fork.prefill(&[4], |_| Continue(())).unwrap();
        assert!(replays(&mut session, &options), "the fork took its own memory when it wrote");
        assert!(!replays(&mut fork, &options));
        session.clear().unwrap();
        reply(&mut session, 20);
        session.clear().unwrap();
        session.prefill(&[1, 2, 3], |_| Continue(())).unwrap();
        assert!(replays(&mut session, &options), "a cleared text stays in place");

        let fork = session.clone();
        assert!(!replays(&mut session, &options), "a fork would be written to");
        drop(fork);
        reply(&mut session, 1);
        assert!(replays(&mut session, &options));
        let window = GenerationOptions { repetition_context: 5, ..options.clone() };
        assert!(!replays(&mut session, &window), "the ring has another length");
        reply(&mut session, 1);
        let sampling = SampleParams { seed: 1, ..options.sampling };
        assert!(!replays(&mut session, &GenerationOptions { sampling, ..options.clone() }));
        reply(&mut session, 1);
        let biased = options.clone().with_logit_bias(vec![(3, 1.0)]);
        assert!(!replays(&mut session, &biased), "the step has no bias");
        reply(&mut session, 1);
        session.prefill(&[1; 300], |_| Continue(())).unwrap();
        assert!(!replays(&mut session, &options), "the caches have grown");
    }
}
