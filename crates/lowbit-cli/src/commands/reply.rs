//! How replies are limited, watched and printed: what `generate` and `chat` share.

use super::logprobs::{self, Scored};
use crate::interrupt::{Doing, Interrupts};
use crate::options::Loaded;
use crate::{Failure, memory, out, progress};
use indicatif::ProgressBar;
use lowbit::{Call, Finish, GenerationOptions, Progress};
use serde::{Serialize, Serializer};
use std::ops::ControlFlow::{self, Break, Continue};
use std::time::Duration;

/// Prompts of fewer tokens get no progress bar.
const LONG_PROMPT: usize = 512;

/// In a session, a second Ctrl-C ends the program if the first has not stopped the reply for this long.
const PATIENCE: Duration = Duration::from_secs(1);

/// Limits of a reply and what is printed about it.
#[derive(clap::Args)]
#[command(next_help_heading = "Text")]
pub struct ReplyOptions {
    /// Tokens that prompts and replies may take together; 0 takes the model's context.
    #[arg(long, short, value_name = "TOKENS", default_value_t = 0)]
    ctx_size: usize,
    /// End before this text; may be given several times.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Print the token that ends a reply, too.
    #[arg(long)]
    special: bool,
    /// With --json: each token's log-probability, and those of the K likeliest in its place.
    #[arg(long, value_name = "K", requires = "json")]
    logprobs: Option<usize>,
}

impl ReplyOptions {
    /// The options as the library takes them.
    pub fn library(&self, generation: GenerationOptions) -> lowbit::ReplyOptions {
        let options =
            lowbit::ReplyOptions::from(generation).with_stops(self.stop.clone()).with_show_end(self.special);
        match self.ctx_size {
            0 => options,
            size => options.with_context(size),
        }
    }

    /// Prints a note about options that the model cannot meet.
    pub fn check(&self, loaded: &Loaded) {
        let context = loaded.model.config().max_position_embeddings;
        if self.ctx_size > context {
            out::note!("note: --ctx-size {} is more than the model's context of {context}", self.ctx_size);
        }
    }
}

/// Shows a reply while it is written, and stops it at Ctrl-C.
pub struct Watch<'a> {
    interrupts: &'a Interrupts,
    /// Write the text to standard output as it is generated.
    stream: bool,
    in_session: bool,
    bar: Option<ProgressBar>,
    error: Option<Failure>,
}

impl<'a> Watch<'a> {
    /// For a reply after which the program ends: Ctrl-C stops its text, but ends the program during the prompt.
    pub fn once(interrupts: &'a Interrupts, stream: bool) -> Self {
        Self { interrupts, stream, in_session: false, bar: None, error: None }
    }

    /// For a reply of a session that goes on after it: Ctrl-C also stops the prompt.
    pub fn in_session(interrupts: &'a Interrupts, stream: bool) -> Self {
        interrupts.enter(Doing::Writing { patience: PATIENCE });
        Self { in_session: true, ..Self::once(interrupts, stream) }
    }

    /// What the library tells.
    pub fn see(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        match progress {
            Progress::Prompt(done, total) => self.prompt(done, total),
            Progress::Text(text) if self.stream && self.error.is_none() => {
                self.error = out::print(format_args!("{text}")).err().map(Failure::from);
            }
            _ => {}
        }
        if self.error.is_some() || self.interrupts.stop() { Break(()) } else { Continue(()) }
    }

    fn prompt(&mut self, done: usize, total: usize) {
        if done == 0 && total >= LONG_PROMPT {
            self.bar = Some(progress::bar("prompt", "tokens", total));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
        }
        if done == total {
            self.clear();
            if !self.in_session {
                self.interrupts.enter(Doing::Writing { patience: Duration::ZERO });
            }
        }
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// The first error of writing.
    pub fn end(mut self) -> Result<(), Failure> {
        self.clear();
        self.error.take().map_or(Ok(()), Err)
    }
}

/// What `--json` prints.
#[derive(Serialize)]
pub struct Reply {
    pub prompt_tokens: Vec<u32>,
    pub cached_tokens: usize,
    pub tokens: Vec<u32>,
    pub text: String,
    pub reasoning: Option<String>,
    pub content: String,
    pub tool_calls: Vec<Call>,
    #[serde(rename = "finish_reason", serialize_with = "finish_reason")]
    pub finish: Finish,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<Scored>>,
    pub prompt_tps: f64,
    pub generation_tps: f64,
    pub load_seconds: f64,
    pub peak_memory_bytes: u64,
}

fn finish_reason<S: Serializer>(finish: &Finish, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Interrupted => "interrupted",
    })
}

impl Reply {
    /// `reply` with its figures; `text` is all that the session has read.
    pub fn new(
        reply: lowbit::Reply,
        text: &[u32],
        loaded: &Loaded,
        options: &ReplyOptions,
    ) -> Result<Self, Failure> {
        let before = reply.cached_tokens + reply.prompt_tokens.len();
        let logprobs = options.logprobs.map(|count| {
            let text = (&text[..before + reply.tokens.len()], before);
            logprobs::score(&loaded.model, &loaded.tokenizer, text, count)
        });
        Ok(Self {
            logprobs: logprobs.transpose()?,
            prompt_tps: reply.prompt_tokens.len() as f64 / reply.prompt_time.as_secs_f64(),
            generation_tps: reply.tokens.len() as f64 / reply.time.as_secs_f64(),
            load_seconds: loaded.seconds,
            peak_memory_bytes: memory::peak_bytes().unwrap_or(0),
            prompt_tokens: reply.prompt_tokens,
            cached_tokens: reply.cached_tokens,
            tokens: reply.tokens,
            text: reply.text,
            reasoning: Some(reply.reasoning).filter(|text| !text.is_empty()),
            content: reply.content,
            tool_calls: reply.tool_calls,
            finish: reply.finish,
        })
    }

    /// The closing figures, on standard error.
    pub fn print_figures(&self) {
        out::note!(
            "prompt: {} tokens, {:.1} tokens/s; generation: {} tokens, {:.1} tokens/s; peak memory: {:.1} MB",
            self.prompt_tokens.len(),
            self.prompt_tps,
            self.tokens.len(),
            self.generation_tps,
            self.peak_memory_bytes as f64 / 1e6
        );
    }
}
