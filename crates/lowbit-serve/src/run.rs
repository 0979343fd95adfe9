//! Requests in the engine, and their replies on the way back: the one path from tokens to parts
//! that all APIs share, streamed or not.

use crate::app::{App, Record, shown};
use crate::error::ApiError;
use axum::http::StatusCode;
use lowbit::files::FileError;
use lowbit::{Call, Event as Part, Piece, ReplyStream, Syntax};
use lowbit_engine::{EngineError, Event, Finish, GenerationOptions, Handle, Request, TokenLogprobs};
use std::ops::ControlFlow::{Break, Continue};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A reply that is asked for, in ids.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) prompt: Arc<[u32]>,
    pub(crate) options: GenerationOptions,
    pub(crate) logprobs: Option<usize>,
    pub(crate) checkpoints: Vec<usize>,
    pub(crate) syntax: Arc<Syntax>,
    pub(crate) stops: Vec<String>,
    /// Calls in the conversation so far.
    pub(crate) calls: usize,
    /// True if the reply ends after its first call.
    pub(crate) one_call: bool,
}

/// Why a reply ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    /// The model ended it.
    Stop,
    /// Before this text.
    StopText(String),
    /// With calls.
    Calls,
    /// It was as long as it may be.
    Length,
}

/// Tokens of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tokens {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) written: usize,
    /// Guesses that were verified, and those of them that came true.
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
    /// Those of `written` before the end of reasoning.
    pub(crate) reasoning: usize,
}

/// An event of a reply.
#[derive(Debug)]
pub(crate) enum Step {
    /// The engine has begun.
    Started(Tokens),
    /// A token, and the text and parts that are complete with it.
    Token {
        id: u32,
        piece: Piece,
        logprobs: Option<TokenLogprobs>,
    },
    /// The end, with what was held back.
    Ended {
        /// The reply's last token, where its text ended the reply.
        id: Option<u32>,
        piece: Piece,
        end: End,
        tokens: Tokens,
    },
    Failed(ApiError),
}

/// The replies to a request.
pub(crate) struct Replies<'a> {
    app: &'a App,
    record: &'a Record,
    replies: Vec<Reply<'a>>,
    events: UnboundedReceiver<(usize, Event)>,
}

struct Reply<'a> {
    stream: ReplyStream<'a>,
    one_call: bool,
    /// `None` once it has ended. Dropping it cancels the request.
    handle: Option<Handle>,
    tokens: Tokens,
    has_calls: bool,
    /// Reasoning was written; and something beside it.
    thinks: bool,
    answers: bool,
    submitted: Instant,
    last: Option<Instant>,
}

impl<'a> Replies<'a> {
    /// Submits all `jobs`, or none.
    ///
    /// # Errors
    /// 400 for what can never run, 429 and 503 for what cannot run now.
    pub(crate) fn submit(app: &'a App, record: &'a Record, jobs: &'a [Job]) -> Result<Self, ApiError> {
        let (sender, events) = unbounded_channel();
        let mut replies = vec![];
        for (index, job) in jobs.iter().enumerate() {
            let stream = ReplyStream::new(
                (&app.served.tokenizer, &job.syntax),
                &job.prompt,
                job.stops.clone(),
                job.calls,
            );
            let (tokens, limit) = (job.prompt.len(), app.context());
            if tokens > limit {
                return Err(ApiError::context(tokens, limit));
            }
            // The last token need not fit into the context: nothing follows it.
            let mut options = job.options.clone();
            options.max_tokens = options.max_tokens.min(limit - tokens + 1);
            let mut request = Request::new(job.prompt.to_vec())
                .with_options(options)
                .with_client(record.client)
                .with_checkpoints(job.checkpoints.clone());
            request.logprobs = job.logprobs;
            let sender = sender.clone();
            let submitted = Instant::now();
            let sink =
                move |event| if sender.send((index, event)).is_ok() { Continue(()) } else { Break(()) };
            let handle = app.engine.submit(request, Box::new(sink)).map_err(|error| refused(app, &error))?;
            replies.push(Reply {
                stream: stream.map_err(|error| tokenizer(app, &error))?,
                one_call: job.one_call,
                handle: Some(handle),
                tokens: Tokens { prompt: job.prompt.len(), ..Tokens::default() },
                has_calls: false,
                thinks: false,
                answers: false,
                submitted,
                last: None,
            });
        }
        Ok(Self { app, record, replies, events })
    }

    /// The next thing that happens to any of the replies, by its index; `None` once all have ended.
    pub(crate) async fn next(&mut self) -> Option<(usize, Step)> {
        while self.replies.iter().any(|reply| reply.handle.is_some()) {
            let Some((index, event)) = self.events.recv().await else {
                // The engine has dropped a sink without a last event.
                let open = self.replies.iter().position(|reply| reply.handle.is_some())?;
                return Some((open, self.failed(open, ApiError::internal())));
            };
            if self.replies[index].handle.is_none() {
                continue;
            }
            if let Some(step) = self.step(index, event) {
                return Some((index, step));
            }
        }
        None
    }

    fn step(&mut self, index: usize, event: Event) -> Option<Step> {
        match event {
            Event::Started { cached_tokens } => {
                let reply = &mut self.replies[index];
                reply.tokens.cached = cached_tokens;
                self.app.metrics.queued(&self.app.served.name, reply.submitted.elapsed());
                Some(Step::Started(reply.tokens))
            }
            Event::Token { id, logprobs } => Some(self.token(index, id, logprobs)),
            Event::Finished { finish: Finish::Interrupted, .. } => {
                Some(self.failed(index, ApiError::stopping()))
            }
            Event::Finished { finish, usage, .. } => {
                let tokens = &mut self.replies[index].tokens;
                tokens.written = usage.completion_tokens;
                (tokens.drafted, tokens.accepted) = (usage.drafted_tokens, usage.accepted_tokens);
                let end = if finish == Finish::Length { End::Length } else { End::Stop };
                Some(self.ended(index, None, Piece::default(), end))
            }
            Event::Failed(error) => Some(self.failed(index, refused(self.app, &error))),
            _ => None,
        }
    }

    fn token(&mut self, index: usize, id: u32, logprobs: Option<TokenLogprobs>) -> Step {
        let reply = &mut self.replies[index];
        let now = Instant::now();
        let (metrics, name) = (&self.app.metrics, &self.app.served.name);
        match reply.last.replace(now) {
            None => metrics.first_token(name, self.record.start.elapsed()),
            Some(last) => metrics.between_tokens(name, now - last),
        }
        if reply.tokens.written == 0 && index == 0 {
            self.record.say(format!("first {}", shown(self.record.start.elapsed())));
        }
        reply.tokens.written += 1;
        let piece = match reply.stream.push(id) {
            Ok(piece) => reply.take(piece),
            Err(error) => {
                let error = tokenizer(self.app, &error);
                return self.failed(index, error);
            }
        };
        if !reply.answers {
            reply.tokens.reasoning = reply.tokens.written;
        }
        match reply.stream.stop().map(String::from) {
            Some(stop) => self.ended(index, Some(id), piece, End::StopText(stop)),
            None if reply.one_call && reply.has_calls => self.ended(index, Some(id), piece, End::Stop),
            None => Step::Token { id, piece, logprobs },
        }
    }

    /// Ends a reply, whose last piece is `piece`, of token `id` if of any, and what was held back.
    fn ended(&mut self, index: usize, id: Option<u32>, mut piece: Piece, end: End) -> Step {
        let reply = &mut self.replies[index];
        reply.handle = None;
        let rest = match reply.stream.finish() {
            Ok(rest) => reply.take(rest),
            Err(error) => {
                let error = tokenizer(self.app, &error);
                return self.failed(index, error);
            }
        };
        piece.text.push_str(&rest.text);
        piece.events.extend(rest.events);
        let end = if end == End::Stop && reply.has_calls { End::Calls } else { end };
        if !reply.thinks {
            reply.tokens.reasoning = 0;
        }
        let tokens = reply.tokens;
        let Tokens { prompt, cached, written, drafted, accepted, .. } = tokens;
        let why = match end {
            End::Length => "length",
            End::Calls => "calls",
            End::Stop | End::StopText(_) => "stop",
        };
        self.app.metrics.replied(&self.app.served.name, why, self.record.start.elapsed());
        let guesses = match drafted {
            0 => String::new(),
            _ => format!(" guessed {drafted} right {accepted}"),
        };
        self.record.say(format!("prompt {prompt} cached {cached} written {written}{guesses} {why}"));
        Step::Ended { id, piece, end, tokens }
    }

    fn failed(&mut self, index: usize, error: ApiError) -> Step {
        self.replies[index].handle = None;
        self.record.say(format!("failed: {}", error.message));
        Step::Failed(error)
    }
}

impl Reply<'_> {
    /// Looks at a piece, which loses all calls but the first of the reply where one is wanted.
    fn take(&mut self, mut piece: Piece) -> Piece {
        piece.events.retain(|part| {
            let is_call = matches!(part, Part::Call(_));
            let stays = !(is_call && self.one_call && self.has_calls);
            self.has_calls |= is_call;
            stays
        });
        self.thinks |= piece.events.iter().any(|part| matches!(part, Part::Reasoning(_)));
        self.answers |= piece.events.iter().any(|part| !matches!(part, Part::Reasoning(_)));
        piece
    }
}

/// A reply's parts, whole.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) ids: Vec<u32>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) end: Option<End>,
    pub(crate) tokens: Tokens,
}

impl Whole {
    fn add(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        for part in piece.events {
            match part {
                Part::Reasoning(text) => self.reasoning.push_str(&text),
                Part::Content(text) => self.content.push_str(&text),
                Part::Call(call) => self.calls.push(call),
            }
        }
    }

    /// The reply to the only job.
    ///
    /// # Errors
    /// Its failure.
    pub(crate) async fn one(replies: Replies<'_>) -> Result<Self, ApiError> {
        Self::all(replies).await?.pop().ok_or_else(ApiError::internal)
    }

    /// All replies, in the order of the jobs.
    ///
    /// # Errors
    /// The first failure of any of them.
    pub(crate) async fn all(mut replies: Replies<'_>) -> Result<Vec<Self>, ApiError> {
        let mut all: Vec<Self> = replies.replies.iter().map(|_| Self::default()).collect();
        while let Some((index, step)) = replies.next().await {
            let whole = &mut all[index];
            match step {
                Step::Started(_) => {}
                Step::Token { id, piece, logprobs } => {
                    whole.ids.push(id);
                    whole.logprobs.extend(logprobs);
                    whole.add(piece);
                }
                Step::Ended { id, piece, end, tokens } => {
                    whole.ids.extend(id);
                    whole.add(piece);
                    (whole.end, whole.tokens) = (Some(end), tokens);
                }
                Step::Failed(error) => return Err(error),
            }
        }
        Ok(all)
    }
}

/// An error of the engine, for the client.
pub(crate) fn refused(app: &App, error: &EngineError) -> ApiError {
    let status = |status, code| ApiError::new(status, code, error.to_string());
    match error {
        EngineError::Overloaded { .. } => {
            ApiError::busy(StatusCode::TOO_MANY_REQUESTS, "overloaded", &error.to_string())
        }
        EngineError::ContextLength { tokens, limit } => ApiError::context(*tokens, *limit),
        EngineError::TooLarge { .. } => status(StatusCode::BAD_REQUEST, "too_large"),
        EngineError::Draining => ApiError::stopping(),
        EngineError::Invalid(_) => status(StatusCode::BAD_REQUEST, "invalid_value"),
        EngineError::Model(_) => status(StatusCode::INTERNAL_SERVER_ERROR, "model_failed"),
        EngineError::DeviceLost(_) => status(StatusCode::SERVICE_UNAVAILABLE, "device_lost"),
        other => {
            (app.log)(&format!("error: {other}"));
            ApiError::internal()
        }
    }
}

fn tokenizer(app: &App, error: &FileError) -> ApiError {
    (app.log)(&format!("error: {error}"));
    ApiError::internal()
}
