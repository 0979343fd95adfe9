//! Limits, progress and output of replies, shared by `generate` and `chat`.

use super::context::context;
use super::logprobs::{self, Scored};
use super::screen::{Reasoning, Screen};
use crate::interrupt::{Doing, Interrupts};
use crate::options::Loaded;
use crate::{Failure, memory, out, progress};
use indicatif::ProgressBar;
use lowbit::{Call, Finish, GenerationOptions, Progress, SampleParams};
use serde::{Serialize, Serializer};
use std::ops::ControlFlow::{self, Break, Continue};
use std::time::Duration;

/// Prompts of fewer tokens get no progress bar.
const LONG_PROMPT: usize = 512;

/// In a session, a second Ctrl-C ends the program if the first has not stopped the reply for this
/// long.
const PATIENCE: Duration = Duration::from_secs(1);

/// Limits of a reply and what is printed about it.
#[derive(clap::Args)]
#[command(next_help_heading = "Text")]
pub struct ReplyOptions {
    /// Tokens that prompts and replies may take together; 0 takes the model's context
    /// [default: what memory holds, at most the model's context].
    #[arg(long, short, value_name = "TOKENS")]
    ctx_size: Option<usize>,
    /// End before this text; may be given several times. An empty one is ignored.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print the token that ends a reply, too.
    #[arg(long)]
    special: bool,
    /// Show or hide the model's reasoning; a terminal shows it in grey.
    #[arg(long, value_enum, default_value = "show")]
    reasoning: Reasoning,
    /// With --json: each token's log-probability, and those of the K likeliest in its place.
    #[arg(long, value_name = "K", requires = "json")]
    pub logprobs: Option<usize>,
}

impl ReplyOptions {
    /// The options as the library takes them, with [`Self::context`]'s result.
    pub fn library(&self, generation: GenerationOptions, context: usize) -> lowbit::ReplyOptions {
        lowbit::ReplyOptions::from(generation)
            .with_stops(self.stop.clone())
            .with_show_end(self.special)
            .with_context(context)
    }

    /// The context that --ctx-size names, if it names one.
    pub fn limit(&self) -> Option<usize> {
        self.ctx_size.filter(|&tokens| tokens > 0)
    }

    /// Tokens that prompts and replies may take together. A limit that was not asked for is said,
    /// and one that the model cannot meet.
    pub fn context(&self, loaded: &Loaded) -> Result<usize, Failure> {
        let (tokens, note) = context(loaded, self.ctx_size)?;
        if let Some(note) = note {
            out::note!("{note}");
        }
        Ok(tokens)
    }

    /// The screen that shows a reply while it is written.
    pub fn screen(&self) -> Screen {
        Screen::new(self.reasoning, self.special)
    }
}

/// Shows a reply while it is written, and stops it at Ctrl-C.
pub struct Watch<'a> {
    interrupts: &'a Interrupts,
    /// The screen that shows the reply while it is generated.
    screen: Option<Screen>,
    in_session: bool,
    bar: Option<ProgressBar>,
    error: Option<Failure>,
}

impl<'a> Watch<'a> {
    /// For a reply after which the program ends: Ctrl-C stops its text, but ends the program during
    /// the prompt.
    pub fn once(interrupts: &'a Interrupts, screen: Option<Screen>) -> Self {
        Self { interrupts, screen, in_session: false, bar: None, error: None }
    }

    /// For a reply of a session that goes on after it: Ctrl-C also stops the prompt.
    pub fn in_session(interrupts: &'a Interrupts, screen: Option<Screen>) -> Self {
        interrupts.enter(Doing::Writing { patience: PATIENCE });
        Self { in_session: true, ..Self::once(interrupts, screen) }
    }

    /// Handles the library's reports of progress.
    pub fn see(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        if let Progress::Prompt(done, total) = progress {
            self.prompt(done, total);
        }
        if let Some(screen) = self.screen.as_mut().filter(|_| self.error.is_none()) {
            self.error = screen.see(progress).err().map(Failure::from);
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

/// The output of `--json`.
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
    pub seed: Option<u64>,
    /// Guesses that were verified, and those of them that were right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafted_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<Scored>>,
    pub prompt_tps: f64,
    pub generation_tps: f64,
    pub load_seconds: f64,
    pub peak_memory_bytes: Option<u64>,
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
            drafted_tokens: Some(reply.speculated.drafted),
            accepted_tokens: Some(reply.speculated.accepted),
            prompt_tps: reply.prompt_tokens.len() as f64 / reply.prompt_time.as_secs_f64(),
            generation_tps: reply.tokens.len() as f64 / reply.time.as_secs_f64(),
            load_seconds: loaded.seconds,
            peak_memory_bytes: memory::peak_bytes(),
            prompt_tokens: reply.prompt_tokens,
            cached_tokens: reply.cached_tokens,
            tokens: reply.tokens,
            text: reply.text,
            reasoning: Some(reply.reasoning).filter(|text| !text.is_empty()),
            content: reply.content,
            tool_calls: reply.tool_calls,
            finish: reply.finish,
            seed: None,
        })
    }

    /// With the seed of its random choices, if there were any.
    pub fn with_seed(self, sampling: &SampleParams) -> Self {
        Self { seed: (sampling.temperature > 0.0).then_some(sampling.seed), ..self }
    }

    /// With the numbers of guesses, or without them where nothing was to guess.
    pub fn with_guesses(self, guesses: bool) -> Self {
        match guesses {
            true => self,
            false => Self { drafted_tokens: None, accepted_tokens: None, ..self },
        }
    }

    /// The limit that ended the reply, if one did: `context` tokens of prompts and replies, or
    /// `most` of this reply.
    pub fn cut(&self, context: usize, most: usize) -> Option<String> {
        match self.finish {
            Finish::Length if self.tokens.len() >= most => Some(format!("[cut by --max-tokens {most}]")),
            Finish::Length => Some(format!("[cut: the context of {context} tokens is full]")),
            Finish::Stop | Finish::Interrupted => None,
        }
    }

    /// The closing figures, on standard error.
    pub fn print_figures(&self) {
        out::note!(
            "prompt: {} tokens, {:.1} tokens/s; generation: {} tokens, {:.1} tokens/s{}",
            self.prompt_tokens.len(),
            self.prompt_tps,
            self.tokens.len(),
            self.generation_tps,
            self.peak_memory_bytes
                .map_or(String::new(), |bytes| { format!("; peak memory: {:.1} MB", bytes as f64 / 1e6) })
        );
        if let (Some(drafted), Some(accepted)) = (self.drafted_tokens, self.accepted_tokens) {
            out::note!("speculation: {drafted} guesses, {accepted} right");
        }
    }
}
