//! A prompt through the model and its answer onto standard output, timed: what `generate` and `chat` share.

use crate::{Failure, memory, progress};
use lowbit::{Finish, GenerationOptions, Session, TokenStream, Tokenizer};
use serde::Serialize;
use std::io::Write;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Prompts of fewer tokens need no bar.
const LONG_PROMPT: usize = 512;

/// What `--json` prints.
#[derive(Serialize)]
pub struct Reply {
    pub prompt_tokens: Vec<u32>,
    pub tokens: Vec<u32>,
    pub text: String,
    pub prompt_tps: f64,
    pub generation_tps: f64,
    pub load_seconds: f64,
    pub peak_memory_bytes: u64,
    #[serde(skip)]
    pub finish: Finish,
}

/// Runs `prompt` after what `session` holds and writes the answer to standard output as it comes, if `stream`.
/// Stops when `interrupted` is set.
pub fn reply(
    session: &mut Session<'_>,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: &GenerationOptions,
    (stream, interrupted): (bool, &AtomicBool),
) -> Result<Reply, Failure> {
    let go_on = || if interrupted.load(Ordering::Relaxed) { Break(()) } else { Continue(()) };
    let bar = if prompt.len() >= LONG_PROMPT {
        progress::bar("prompt", prompt.len())
    } else {
        progress::bar("", 0)
    };
    let start = Instant::now();
    let logits = session.prefill(prompt, |done| {
        if prompt.len() >= LONG_PROMPT {
            bar.set_position(done as u64);
        }
        go_on()
    })?;
    bar.finish_and_clear();
    let prompt_seconds = start.elapsed().as_secs_f64();

    let mut out = Output { stream, text: String::new(), error: None };
    let mut decoder = tokenizer.stream(prompt)?;
    let start = Instant::now();
    let generation = match logits {
        Some(logits) => session.generate(logits, options, |id| out.token(&mut decoder, id, go_on()))?,
        None => lowbit::Generation { tokens: vec![], finish: Finish::Interrupted },
    };
    // The first token comes with the prompt; the rest are what decoding took.
    let (seconds, decoded) = (start.elapsed().as_secs_f64(), generation.tokens.len());
    out.write(&decoder.flush()?);
    if let Some(error) = out.error {
        return Err(error);
    }
    Ok(Reply {
        prompt_tokens: prompt.to_vec(),
        tokens: generation.tokens,
        text: out.text,
        prompt_tps: prompt.len() as f64 / prompt_seconds,
        generation_tps: decoded as f64 / seconds,
        load_seconds: 0.0,
        peak_memory_bytes: memory::peak_bytes().unwrap_or(0),
        finish: generation.finish,
    })
}

/// The text so far, and the first thing that went wrong with writing it.
struct Output {
    stream: bool,
    text: String,
    error: Option<Failure>,
}

impl Output {
    fn token(&mut self, decoder: &mut TokenStream, id: u32, go_on: ControlFlow<()>) -> ControlFlow<()> {
        match decoder.push(id) {
            Ok(Some(text)) => self.write(&text),
            Ok(None) => {}
            Err(error) => self.error = Some(error.into()),
        }
        if self.error.is_some() { Break(()) } else { go_on }
    }

    fn write(&mut self, text: &str) {
        self.text.push_str(text);
        if self.stream {
            let mut stdout = std::io::stdout().lock();
            if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
                self.error.get_or_insert(error.into());
            }
        }
    }
}

impl Reply {
    /// The closing figures, on standard error.
    pub fn print_figures(&self) {
        eprintln!(
            "prompt: {} tokens, {:.1} tokens/s; generation: {} tokens, {:.1} tokens/s; peak memory: {:.1} MB",
            self.prompt_tokens.len(),
            self.prompt_tps,
            self.tokens.len(),
            self.generation_tps,
            self.peak_memory_bytes as f64 / 1e6
        );
    }
}
