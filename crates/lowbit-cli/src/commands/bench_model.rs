//! `bench --model`: how fast a whole model reads prompts and writes, on ids that need no tokenizer.

use super::bench::Arguments;
use crate::{Failure, out, progress};
use lowbit::{GenerationOptions, Model, Session};
use lowbit_kernels::ops::argmax;
use lowbit_models::ModelError;
use std::ops::ControlFlow::Continue;
use std::time::Instant;

/// What was measured.
#[derive(serde::Serialize)]
struct Figure {
    case: String,
    tokens: usize,
    /// The median over [`RUNS`].
    seconds: f64,
    tokens_per_second: f64,
}

/// Each case runs this often after a run that compiles kernels, touches weights and, where it writes, captures the step.
const RUNS: usize = 5;
/// Prompt tokens before the generated ones.
const PROMPT: usize = 16;

/// Times prompts of each length from an empty cache, and generation after a short prompt. All runs share one session, so the
/// timed ones find its memory and its captured step ready, as replies after the first do.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let spinner = progress::spinner("loading".into());
    let model = arguments.model.load_model()?;
    spinner.finish_and_clear();
    check(arguments, &model)?;
    let mut figures = vec![];
    let mut measure = |case: String, tokens: usize, run: &mut dyn FnMut() -> Result<f64, Failure>| {
        let spinner = progress::spinner(case.clone());
        run()?;
        let mut times = (0..RUNS).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f64::total_cmp);
        let seconds = times[RUNS / 2];
        spinner.finish_and_clear();
        let figure = Figure { case, tokens, seconds, tokens_per_second: tokens as f64 / seconds };
        if !arguments.json {
            out::line!(
                "{:<16} {:>10.3} ms {:>12.1} tokens/s",
                figure.case,
                seconds * 1e3,
                figure.tokens_per_second
            )?;
        }
        figures.push(figure);
        Ok::<_, Failure>(())
    };
    for &tokens in &arguments.prompt_tokens {
        measure(format!("prompt {tokens}"), tokens, &mut || prompt_seconds(&model, tokens))?;
    }
    let tokens = arguments.generated_tokens;
    let mut session = Session::new(&model);
    measure(format!("generate {tokens}"), tokens, &mut || {
        generation_seconds(&mut session, &ids(&model, PROMPT), tokens)
    })?;
    if arguments.json {
        out::line!("{}", serde_json::to_string(&figures)?)?;
    }
    Ok(())
}

/// Checks that every text fits the model's context, before the first is timed.
fn check(arguments: &Arguments, model: &Model) -> Result<(), Failure> {
    let limit = model.config().max_position_embeddings;
    let written = arguments.generated_tokens.saturating_add(PROMPT);
    match arguments.prompt_tokens.iter().copied().chain([written]).find(|&tokens| tokens > limit) {
        Some(tokens) => Err(ModelError::ContextLength { tokens, limit }.into()),
        None => Ok(()),
    }
}

/// Pseudo-random ids.
fn ids(model: &Model, count: usize) -> Vec<u32> {
    let vocab_size = model.config().vocab_size as u64;
    (0..count as u64)
        .map(|i| ((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % vocab_size)
        .map(|id| id as u32)
        .collect()
}

fn prompt_seconds(model: &Model, tokens: usize) -> Result<f64, Failure> {
    let prompt = ids(model, tokens);
    let mut session = Session::new(model);
    let start = Instant::now();
    let logits = session.prefill(&prompt, |_| Continue(()))?.ok_or("the prompt was interrupted")?;
    model.synchronize()?;
    let seconds = start.elapsed().as_secs_f64();
    // NaN and infinity are computed at another speed.
    argmax(&logits.to_device(model.host())?)?;
    Ok(seconds)
}

/// The time from the prompt's logits to the last token, after a text that is cleared first.
fn generation_seconds(session: &mut Session<'_>, prompt: &[u32], tokens: usize) -> Result<f64, Failure> {
    session.clear()?;
    let logits = session.prefill(prompt, |_| Continue(()))?.ok_or("the prompt was interrupted")?;
    logits.device().synchronize()?;
    let options = GenerationOptions::default().with_max_tokens(tokens);
    let start = Instant::now();
    session.generate(logits, &options, |_| Continue(()))?;
    Ok(start.elapsed().as_secs_f64())
}
