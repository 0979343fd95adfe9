//! Runs a prompt through a session and answers it: text, reasoning, content and tool calls.

use crate::parse::{Call, Event, Syntax};
use crate::reply_stream::{Piece, ReplyStream};
use crate::{Error, ModelError};
use lowbit_files::{FileError, Tokenizer};
use lowbit_kernels::Tensor;
use lowbit_models::{Finish, GenerationOptions, Session, Speculated};
use std::ops::ControlFlow::{self, Break};
use std::time::{Duration, Instant};

/// Options for sampling and ending a reply: [`ReplyOptions::default`], changed by its `with_`
/// methods.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ReplyOptions {
    /// Options for sampling tokens. The tokenizer's end-of-text ids are stop ids beside these.
    pub generation: GenerationOptions,
    /// Texts that end the reply, and are not part of it. Empty ones are ignored.
    pub stops: Vec<String>,
    /// Tokens that prompts and replies may take together, at most the model's context.
    pub context: Option<usize>,
    /// True if the tokenizer's end-of-text ids are ordinary tokens.
    pub ignore_eos: bool,
    /// True if the token that ended the reply is part of its text.
    pub show_end: bool,
    /// The form of the reply, and what compiles it for the model.
    #[cfg(feature = "grammar")]
    pub form: Option<(std::sync::Arc<crate::Grammars>, crate::ReplyForm)>,
}

impl From<GenerationOptions> for ReplyOptions {
    fn from(generation: GenerationOptions) -> Self {
        Self { generation, ..Self::default() }
    }
}

impl ReplyOptions {
    /// With this choice of tokens and this limit.
    #[must_use]
    pub fn with_generation(self, generation: GenerationOptions) -> Self {
        Self { generation, ..self }
    }

    /// With these texts that end the reply.
    #[must_use]
    pub fn with_stops(self, stops: Vec<String>) -> Self {
        Self { stops, ..self }
    }

    /// With at most this many tokens of prompts and replies together.
    #[must_use]
    pub fn with_context(self, tokens: usize) -> Self {
        Self { context: Some(tokens), ..self }
    }

    /// With end-of-text ids as ordinary tokens.
    #[must_use]
    pub fn with_ignore_eos(self, ignore_eos: bool) -> Self {
        Self { ignore_eos, ..self }
    }

    /// With the token that ended the reply as part of its text.
    #[must_use]
    pub fn with_show_end(self, show_end: bool) -> Self {
        Self { show_end, ..self }
    }

    /// With this form, compiled by the model's own [`Grammars`](crate::Grammars).
    #[cfg(feature = "grammar")]
    #[must_use]
    pub fn with_form(self, grammars: std::sync::Arc<crate::Grammars>, form: crate::ReplyForm) -> Self {
        Self { form: Some((grammars, form)), ..self }
    }

    /// The options of a reply after the tokens `before`, the prompt's included: with the
    /// tokenizer's end-of-text ids and the special tokens that are stop texts as stop ids, as many
    /// tokens as the context has room for, and the reply's form. `context` is the model's.
    ///
    /// # Errors
    /// [`Error::Model`] where `before` is too long; [`Error::Form`] for a form that cannot be
    /// enforced.
    pub fn generation(
        &self,
        tokenizer: &Tokenizer,
        context: usize,
        before: &[u32],
    ) -> Result<GenerationOptions, Error> {
        let mut generation = self.generation.clone();
        if !self.ignore_eos {
            generation.stop_ids.extend(tokenizer.eos_ids());
        }
        // A special token is seen by its id before it is text.
        let ids = self.stops.iter().filter_map(|stop| tokenizer.id(stop));
        generation.stop_ids.extend(ids.filter(|&id| tokenizer.is_special(id)));
        let limit = self.context.map_or(context, |tokens| tokens.min(context));
        let tokens = before.len();
        if tokens > limit {
            return Err(ModelError::ContextLength { tokens, limit }.into());
        }
        // The last token need not fit into the context: nothing follows it.
        generation.max_tokens = generation.max_tokens.min(limit - tokens + 1);
        #[cfg(feature = "grammar")]
        if let Some((grammars, form)) = &self.form {
            generation.grammar = Some(grammars.compile(form, Some(before))?);
        }
        Ok(generation)
    }
}

/// Events while a model answers, in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Progress<'a> {
    /// The number of the prompt's tokens that were read, and of all of them; the first event has
    /// read none.
    Prompt(usize, usize),
    /// A token was sampled.
    Token(u32),
    /// The next piece of [`Reply::text`].
    Text(&'a str),
    /// The next part of the reply.
    Event(&'a Event),
}

/// A model's answer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Reply {
    /// All text, with special tokens spelled out, but without the token or text that ended it.
    pub text: String,
    /// Its token ids, without the one that ended it.
    pub tokens: Vec<u32>,
    /// The model's reasoning before its answer, without its markers.
    pub reasoning: String,
    /// The text without reasoning and calls.
    pub content: String,
    /// The tool calls.
    pub tool_calls: Vec<Call>,
    /// Why it ended.
    pub finish: Finish,
    /// The prompt's tokens that were read for this reply, after the [`Self::cached_tokens`].
    pub prompt_tokens: Vec<u32>,
    /// Tokens that the session had read before.
    pub cached_tokens: usize,
    /// The guesses that were verified, if the session speculates.
    pub speculated: Speculated,
    /// The time that the prompt took.
    pub prompt_time: Duration,
    /// The time from the prompt's end on: sampling, and the passes of all tokens but the first.
    pub time: Duration,
}

impl Reply {
    /// True if the caller stopped it before the prompt was read.
    pub fn is_unread(&self) -> bool {
        self.finish == Finish::Interrupted && self.tokens.is_empty()
    }
}

/// The request that a reply answers.
pub(crate) struct Asked<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) syntax: &'a Syntax,
    /// Token ids after the session's.
    pub(crate) prompt: &'a [u32],
    /// The number of these after which the session marks its place, see [`Session::mark`].
    pub(crate) mark: Option<usize>,
    /// Calls in the conversation so far.
    pub(crate) calls: usize,
}

/// Runs `prompt` after the tokens of `session`, and answers it in the syntax of its model. `each`
/// is called with what happens, and ends the prompt or the reply by returning `Break`.
///
/// # Errors
/// [`Error::Model`] when the prompt is empty or does not fit the context, which is checked before
/// any of it runs; [`Error::File`] when the tokenizer refuses to decode; [`Error::Kernel`] when a
/// GPU fails, or for sampling options that make no sense.
pub fn reply(
    session: &mut Session<'_>,
    (tokenizer, syntax): (&Tokenizer, &Syntax),
    prompt: &[u32],
    options: &ReplyOptions,
    each: impl FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Reply, Error> {
    answer(session, &Asked { tokenizer, syntax, prompt, mark: None, calls: 0 }, options, each)
}

pub(crate) fn answer(
    session: &mut Session<'_>,
    asked: &Asked<'_>,
    options: &ReplyOptions,
    mut each: impl FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Reply, Error> {
    let Asked { tokenizer, syntax, prompt, .. } = *asked;
    let cached_tokens = session.tokens().len();
    let before = [session.tokens(), prompt].concat();
    let generation = options.generation(tokenizer, session.context(), &before)?;
    let start = Instant::now();
    let logits = read(session, asked, &mut each)?;
    let prompt_time = start.elapsed();

    let stream = ReplyStream::new((tokenizer, syntax), session.tokens(), options.stops.clone(), asked.calls)?;
    let mut writing = Writing { stream, parts: Parts::default(), failed: None, each };
    let start = Instant::now();
    let (tokens, finish, speculated) = match logits {
        Some(logits) => {
            let written = session.generate(logits, &generation, |id| writing.token(id))?;
            (written.tokens, written.finish, written.speculated)
        }
        None => (vec![], Finish::Interrupted, Speculated::default()),
    };
    let time = start.elapsed();
    let is_stopped = writing.stream.stop().is_some();
    let end = session.tokens().last().filter(|_| options.show_end && finish == Finish::Stop && !is_stopped);
    let Parts { text, reasoning, content, tool_calls } =
        writing.end(end.map(|&id| tokenizer.decode(&[id])))?;
    Ok(Reply {
        text,
        tokens,
        reasoning,
        content,
        tool_calls,
        finish: if is_stopped { Finish::Stop } else { finish },
        prompt_tokens: prompt.to_vec(),
        cached_tokens,
        speculated,
        prompt_time,
        time,
    })
}

/// Reads the prompt; `None` when `each` stopped it.
fn read(
    session: &mut Session<'_>,
    asked: &Asked<'_>,
    each: &mut impl FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Option<Tensor>, Error> {
    let (prompt, total) = (asked.prompt, asked.prompt.len());
    if each(Progress::Prompt(0, total)).is_break() {
        return Ok(None);
    }
    let mark = asked.mark.filter(|&mark| mark < total).unwrap_or(0);
    let (first, rest) = prompt.split_at(mark);
    if !first.is_empty() {
        let Some(_) = session.prefill(first, |done| each(Progress::Prompt(done, total)))? else {
            return Ok(None);
        };
    }
    if asked.mark.is_some() {
        session.mark()?;
    }
    Ok(session.prefill(rest, |done| each(Progress::Prompt(mark + done, total)))?)
}

/// A reply's parts so far.
#[derive(Debug, Default)]
struct Parts {
    text: String,
    reasoning: String,
    content: String,
    tool_calls: Vec<Call>,
}

impl Parts {
    fn add(&mut self, event: &Event) {
        match event {
            Event::Reasoning(text) => self.reasoning.push_str(text),
            Event::Content(text) => self.content.push_str(text),
            Event::Call(call) => self.tool_calls.push(call.clone()),
        }
    }
}

/// A reply that is being written, and what went wrong with it.
struct Writing<'a, F> {
    stream: ReplyStream<'a>,
    parts: Parts,
    failed: Option<FileError>,
    each: F,
}

impl<F: FnMut(Progress<'_>) -> ControlFlow<()>> Writing<'_, F> {
    fn token(&mut self, id: u32) -> ControlFlow<()> {
        let goes_on = (self.each)(Progress::Token(id));
        let piece = match self.stream.push(id) {
            Ok(piece) => piece,
            Err(error) => {
                self.failed = Some(error);
                return Break(());
            }
        };
        self.tell(&piece)?;
        if self.stream.stop().is_some() { Break(()) } else { goes_on }
    }

    fn tell(&mut self, Piece { text, events }: &Piece) -> ControlFlow<()> {
        self.parts.text.push_str(text);
        events.iter().for_each(|event| self.parts.add(event));
        if !text.is_empty() {
            (self.each)(Progress::Text(text))?;
        }
        events.iter().try_for_each(|event| (self.each)(Progress::Event(event)))
    }

    /// All parts, held-back text included, and the spelling of the token that ended the reply.
    fn end(mut self, end: Option<Result<String, FileError>>) -> Result<Parts, FileError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let rest = self.stream.finish()?;
        // The reply ends here whatever the caller says.
        let _ = self.tell(&rest);
        let text = end.transpose()?.unwrap_or_default();
        let _ = self.tell(&Piece { text, events: vec![] });
        Ok(self.parts)
    }
}
