//! `generate --prompts`: many prompts, whose replies the engine writes side by side.

use super::logprobs::Scored;
use super::reply::Reply;
use crate::interrupt::{Doing, Interrupted, Interrupts};
use crate::options::Loaded;
use crate::{Failure, habits, json, memory};
use lowbit::{Call, Finish, Piece, ReplyOptions, ReplyStream, Syntax};
use lowbit_engine::{Backend, Engine, EngineOptions, Event, Handle, Request, Times, TokenLogprobs};
use lowbit_files::shown_path;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// The time after which Ctrl-C is seen.
const PATIENCE: Duration = Duration::from_millis(50);

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: String,
}

/// The prompts of a file: an object with a `prompt` per line; empty lines are skipped.
///
/// # Errors
/// A file that cannot be read or has no prompts; a line that is no such object.
pub fn read(file: &Path) -> Result<Vec<String>, Failure> {
    let (content, mut prompts) = (habits::read_marked_text(file)?, vec![]);
    for (number, line) in content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line: Line = serde_json::from_str(line).map_err(|error| {
            format!("{}: line {}: {error}; {{\"prompt\": \"..\"}} is wanted", shown_path(file), number + 1)
        })?;
        prompts.push(line.prompt);
    }
    match prompts.is_empty() {
        true => Err(format!("{}: there are no prompts", shown_path(file)).into()),
        false => Ok(prompts),
    }
}

/// The parts that many prompts have in common.
pub struct Batch<'a> {
    pub loaded: &'a Loaded,
    pub options: &'a ReplyOptions,
    /// The number of likeliest tokens that are printed beside each token.
    pub logprobs: Option<usize>,
}

impl Batch<'_> {
    /// Answers the prompts and prints the replies in their order. `taken` is called when all
    /// prompts are known to fit.
    ///
    /// # Errors
    /// A prompt that cannot be answered; Ctrl-C.
    pub fn answer(
        &self,
        interrupts: &Interrupts,
        prompts: &[(Vec<u32>, Syntax)],
        taken: impl FnOnce(),
    ) -> Result<(), Failure> {
        let model = &self.loaded.model;
        let mut options = EngineOptions::new(model.device()).with_max_waiting(prompts.len());
        // No less than one text of the whole context takes, beside the states of several.
        let whole = model.cache_size()?.bytes(self.options.context.unwrap_or(0)).saturating_mul(2);
        options = options.clone().with_cache_bytes(options.cache_bytes.max(whole));
        let engine = Engine::start(model.clone(), options)?;
        let (sender, events) = channel();
        let mut asked = vec![];
        for (index, (prompt, syntax)) in prompts.iter().enumerate() {
            let sender = sender.clone();
            let sink =
                move |event| if sender.send((index, event)).is_ok() { Continue(()) } else { Break(()) };
            let handle = self.request(prompt).and_then(|request| Ok(engine.submit(request, Box::new(sink))?));
            asked.push(self.asked(prompt, syntax, handle.map_err(|error| of_prompt(index, &error))?)?);
        }
        taken();
        interrupts.enter(Doing::Writing { patience: Duration::ZERO });
        self.print_all(interrupts, &events, asked)
    }

    fn request(&self, prompt: &[u32]) -> Result<Request, Failure> {
        let Loaded { model, tokenizer, .. } = self.loaded;
        let context = model.config().max_position_embeddings;
        let options = self.options.generation(tokenizer, context, prompt)?;
        let request = Request::new(prompt.to_vec()).with_options(options);
        Ok(match self.logprobs {
            Some(count) => request.with_logprobs(count),
            None => request,
        })
    }

    fn asked<'s>(
        &'s self,
        prompt: &'s [u32],
        syntax: &'s Syntax,
        handle: Handle,
    ) -> Result<Asked<'s>, Failure> {
        let stream = (&self.loaded.tokenizer, syntax);
        Ok(Asked {
            stream: ReplyStream::new(stream, prompt, self.options.stops.clone(), 0)?,
            handle: Some(handle),
            prompt,
            parts: Parts::default(),
            end: None,
        })
    }

    fn print_all(
        &self,
        interrupts: &Interrupts,
        events: &Receiver<(usize, Event)>,
        mut asked: Vec<Asked<'_>>,
    ) -> Result<(), Failure> {
        let mut printed = 0;
        while printed < asked.len() {
            if interrupts.stop() {
                return Err(Interrupted.into());
            }
            match events.recv_timeout(PATIENCE) {
                Ok((index, event)) => asked[index].see(event).map_err(|error| of_prompt(index, &error))?,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Err("the engine ended early".into()),
            }
            while let Some(end) = asked.get(printed).and_then(|asked| asked.end) {
                let reply = self.reply(&mut asked[printed], end);
                json::print("generate", &Numbered { index: printed, reply: &reply })?;
                printed += 1;
            }
        }
        Ok(())
    }

    fn reply(&self, asked: &mut Asked<'_>, (finish, times): (Finish, Times)) -> Reply {
        let Parts { cached, tokens, scores, text, reasoning, content, tool_calls } =
            std::mem::take(&mut asked.parts);
        let tokenizer = &self.loaded.tokenizer;
        let scores = scores.into_iter().map(|scores| Scored::new(tokenizer, scores)).collect();
        let prompt_tokens = asked.prompt[cached..].to_vec();
        let reply = Reply {
            drafted_tokens: None,
            accepted_tokens: None,
            prompt_tps: prompt_tokens.len() as f64 / times.prompt.as_secs_f64(),
            generation_tps: tokens.len() as f64 / times.decode.as_secs_f64(),
            prompt_tokens,
            cached_tokens: cached,
            tokens,
            text,
            reasoning: Some(reasoning).filter(|text| !text.is_empty()),
            content,
            tool_calls,
            finish,
            seed: None,
            logprobs: self.logprobs.map(|_| scores),
            load_seconds: self.loaded.seconds,
            peak_memory_bytes: memory::peak_bytes(),
        };
        reply.with_seed(&self.options.generation.sampling)
    }
}

fn of_prompt(index: usize, error: &dyn std::fmt::Display) -> Failure {
    format!("prompt {index}: {error}").into()
}

/// A reply, as it is printed.
#[derive(Serialize)]
struct Numbered<'a> {
    index: usize,
    #[serde(flatten)]
    reply: &'a Reply,
}

/// A prompt and its reply so far.
struct Asked<'a> {
    prompt: &'a [u32],
    stream: ReplyStream<'a>,
    /// None once a stop text has ended the reply.
    handle: Option<Handle>,
    parts: Parts,
    end: Option<(Finish, Times)>,
}

#[derive(Default)]
struct Parts {
    cached: usize,
    tokens: Vec<u32>,
    scores: Vec<TokenLogprobs>,
    text: String,
    reasoning: String,
    content: String,
    tool_calls: Vec<Call>,
}

impl Asked<'_> {
    fn see(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Started { cached_tokens } => self.parts.cached = cached_tokens,
            // Tokens may still come after a stop text was found.
            Event::Token { id, logprobs } if self.handle.is_some() => {
                self.parts.tokens.push(id);
                self.parts.scores.extend(logprobs);
                let piece = self.stream.push(id)?;
                self.parts.add(piece);
                if self.stream.stop().is_some() {
                    self.handle = None;
                }
            }
            Event::Finished { finish, times, .. } => {
                let piece = self.stream.finish()?;
                self.parts.add(piece);
                self.end = Some((if self.handle.is_none() { Finish::Stop } else { finish }, times));
            }
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
        Ok(())
    }
}

impl Parts {
    fn add(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        for event in piece.events {
            match event {
                lowbit::Event::Reasoning(text) => self.reasoning.push_str(&text),
                lowbit::Event::Content(text) => self.content.push_str(&text),
                lowbit::Event::Call(call) => self.tool_calls.push(call),
            }
        }
    }
}
