//! A prompt through the model and its answer onto standard output, timed: what `generate` and `chat` share.

use super::logprobs::{self, Scored};
use super::stop::StopTexts;
use crate::interrupt::{Doing, Interrupts};
use crate::options::Loaded;
use crate::{Failure, memory, out, progress};
use lowbit::{Finish, GenerationOptions, Session, TokenStream};
use lowbit_models::ModelError;
use serde::{Serialize, Serializer};
use std::ops::ControlFlow::{self, Break, Continue};
use std::time::{Duration, Instant};

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
    /// With --json: each token's log-probability, and those of the K likeliest in its place.
    #[arg(long, value_name = "K", requires = "json")]
    logprobs: Option<usize>,
}

/// A prompt and how it is answered.
pub struct Asked<'a> {
    pub prompt: &'a [u32],
    pub generation: GenerationOptions,
    pub options: &'a ReplyOptions,
    /// Write the answer to standard output as it is generated.
    pub stream: bool,
    pub interrupts: &'a Interrupts,
    /// Whether the session goes on after the reply: then Ctrl-C also stops the prompt.
    pub in_session: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
pub struct Reply {
    pub prompt_tokens: Vec<u32>,
    pub tokens: Vec<u32>,
    pub text: String,
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

impl ReplyOptions {
    /// Applies the context limit. Stop texts that are special tokens become stop ids, because they have no text.
    fn apply(
        &self,
        generation: &mut GenerationOptions,
        (loaded, before): (&Loaded, usize),
    ) -> Result<(), Failure> {
        let (tokenizer, context) = (&loaded.tokenizer, loaded.model.config().max_position_embeddings);
        let ids = self.stop.iter().filter_map(|stop| tokenizer.id(stop));
        generation.stop_ids.extend(ids.filter(|&id| tokenizer.is_special(id)));
        let limit = match self.ctx_size {
            0 => context,
            size => size.min(context),
        };
        if before > limit {
            return Err(ModelError::ContextLength { tokens: before, limit }.into());
        }
        // The last token need not fit into the context: nothing follows it.
        generation.max_tokens = generation.max_tokens.min(limit - before + 1);
        Ok(())
    }

    /// Prints a note about options that the model cannot meet.
    pub fn check(&self, loaded: &Loaded) {
        let context = loaded.model.config().max_position_embeddings;
        if self.ctx_size > context {
            out::note!("note: --ctx-size {} is more than the model's context of {context}", self.ctx_size);
        }
    }
}

/// Runs a prompt after what `session` holds, and answers it until it ends or Ctrl-C stops it.
pub fn reply(session: &mut Session<'_>, loaded: &Loaded, asked: Asked<'_>) -> Result<Reply, Failure> {
    let Asked { prompt, mut generation, options, stream, interrupts, in_session } = asked;
    let before = session.tokens().len() + prompt.len();
    options.apply(&mut generation, (loaded, before))?;
    if in_session {
        interrupts.enter(Doing::Writing { patience: PATIENCE });
    }
    let start = Instant::now();
    let logits = prefill(session, prompt, interrupts)?;
    let prompt_seconds = start.elapsed().as_secs_f64();

    if !in_session {
        interrupts.enter(Doing::Writing { patience: Duration::ZERO });
    }
    let mut out = Output { stream, text: String::new(), stop: StopTexts::new(&options.stop), error: None };
    let mut decoder = loaded.tokenizer.stream(prompt)?;
    let start = Instant::now();
    let (tokens, mut finish) = match logits {
        Some(logits) => {
            let each = |id| out.token(&mut decoder, id, go_on(interrupts));
            let written = session.generate(logits, &generation, each)?;
            (written.tokens, written.finish)
        }
        None => (vec![], Finish::Interrupted),
    };
    // The prompt's pass yields the first token's logits; the time is that of sampling and of the passes after it.
    let (seconds, decoded) = (start.elapsed().as_secs_f64(), tokens.len());
    out.end(&mut decoder)?;
    if out.stop.found() {
        finish = Finish::Stop;
    }
    let logprobs = options.logprobs.map(|count| {
        let text = (&session.tokens()[..before + decoded], before);
        logprobs::score(&loaded.model, &loaded.tokenizer, text, count)
    });
    Ok(Reply {
        prompt_tokens: prompt.to_vec(),
        tokens,
        text: out.text,
        finish,
        logprobs: logprobs.transpose()?,
        prompt_tps: prompt.len() as f64 / prompt_seconds,
        generation_tps: decoded as f64 / seconds,
        load_seconds: loaded.seconds,
        peak_memory_bytes: memory::peak_bytes().unwrap_or(0),
    })
}

fn go_on(interrupts: &Interrupts) -> ControlFlow<()> {
    if interrupts.stop() { Break(()) } else { Continue(()) }
}

/// Reads a prompt, with a bar for a long one; `None` when it was stopped.
fn prefill(
    session: &mut Session<'_>,
    prompt: &[u32],
    interrupts: &Interrupts,
) -> Result<Option<lowbit_kernels::Tensor>, ModelError> {
    let bar = (prompt.len() >= LONG_PROMPT).then(|| progress::bar("prompt", prompt.len()));
    let logits = session.prefill(prompt, |done| {
        if let Some(bar) = &bar {
            bar.set_position(done as u64);
        }
        go_on(interrupts)
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    logits
}

/// The text so far, and the first thing that went wrong with writing it.
struct Output<'a> {
    stream: bool,
    text: String,
    stop: StopTexts<'a>,
    error: Option<Failure>,
}

impl Output<'_> {
    fn token(&mut self, decoder: &mut TokenStream, id: u32, go_on: ControlFlow<()>) -> ControlFlow<()> {
        match decoder.push(id) {
            Ok(Some(text)) => {
                let text = self.stop.push(&text);
                self.write(&text);
            }
            Ok(None) => {}
            Err(error) => self.error = Some(error.into()),
        }
        if self.error.is_some() || self.stop.found() { Break(()) } else { go_on }
    }

    /// Writes what was held back.
    fn end(&mut self, decoder: &mut TokenStream) -> Result<(), Failure> {
        let text = self.stop.push(&decoder.flush()?);
        self.write(&text);
        let text = self.stop.flush();
        self.write(&text);
        self.error.take().map_or(Ok(()), Err)
    }

    fn write(&mut self, text: &str) {
        self.text.push_str(text);
        if self.stream && !text.is_empty() && self.error.is_none() {
            self.error = out::print(format_args!("{text}")).err().map(Failure::from);
        }
    }
}

impl Reply {
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
