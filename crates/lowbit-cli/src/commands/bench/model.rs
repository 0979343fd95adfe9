//! `bench --model`: how fast a whole model reads prompts and writes, on ids that need no tokenizer.

use super::speculation::ForcedReply;
use super::{Arguments, GENERATED, print_figures};
use crate::options::ModelOptions;
use crate::{Failure, out, progress};
use lowbit::{GenerationOptions, Model, Session, dry_generation, dry_speculation};
use lowbit_kernels::bench::Times;
use lowbit_kernels::ops::argmax;
use lowbit_models::ModelError;
use std::ops::ControlFlow::Continue;
use std::time::Instant;

/// A measured case.
#[derive(serde::Serialize)]
struct Figure {
    case: String,
    tokens: usize,
    /// Tokens of the text before them.
    depth: usize,
    /// The median of the runs.
    seconds: f64,
    /// The median of their distances from it.
    deviation_seconds: f64,
    tokens_per_second: f64,
}

/// Prompt lengths, unless a flag says otherwise.
const PROMPTS: [usize; 2] = [512, 4096];

/// Tokens before the generated ones at a depth of 0: one has to be there.
const PROMPT: usize = 16;

/// Times prompts of each length and generation, behind a text of each depth: prompts in a session
/// of their own, generations in one session, so that the timed ones find its memory and its
/// captured step ready, as replies after the first do.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (target, checkpoint) = (arguments.model.target()?, arguments.model.open()?);
    let model = ModelOptions::load_opened(&checkpoint, &target, |model| compiled(arguments, model))?;
    check(arguments, &model)?;
    let predictor = arguments.guesses.predictor(&checkpoint, &model)?;
    let mut figures = vec![];
    let mut session = Session::new(&model);
    for &depth in &arguments.depth {
        let text = ids(&model, depth);
        for &tokens in prompts(arguments) {
            let run = || prompt_seconds(&model, &text, tokens);
            figures.push(measure(arguments, "prompt", (tokens, depth), run)?);
        }
        let text = if depth == 0 { ids(&model, PROMPT) } else { text };
        let tokens = generated(arguments);
        let run = || generation_seconds(&mut session, &text, tokens);
        figures.push(measure(arguments, "generate", (tokens, depth), run)?);
        if arguments.guesses.draft_accept.is_some() {
            let mut reply = ForcedReply::new(arguments, &model, predictor.as_ref(), (&text, tokens))?;
            figures.push(measure(arguments, "speculate", (tokens, depth), || reply.seconds())?);
        }
    }
    if arguments.json {
        print_figures(&figures, checkpoint.path(), model.device())?;
    }
    Ok(())
}

fn prompts(arguments: &Arguments) -> &[usize] {
    if arguments.prompt_tokens.is_empty() { &PROMPTS } else { &arguments.prompt_tokens }
}

pub(super) fn generated(arguments: &Arguments) -> usize {
    arguments.generated_tokens.unwrap_or(GENERATED)
}

/// The median time of `run`, after a first run that compiles kernels, touches weights and, where it
/// writes, captures the step.
fn measure(
    arguments: &Arguments,
    name: &str,
    (tokens, depth): (usize, usize),
    mut run: impl FnMut() -> Result<f64, Failure>,
) -> Result<Figure, Failure> {
    let case = format!("{name} {tokens}");
    let label = if depth == 0 { case.clone() } else { format!("{case} after {depth}") };
    let spinner = progress::spinner(label.clone());
    run()?;
    let times = Times::new((0..arguments.runs).map(|_| run()).collect::<Result<Vec<_>, _>>()?);
    let (seconds, deviation_seconds) = (times.median, times.deviation);
    spinner.finish_and_clear();
    let tokens_per_second = tokens as f64 / seconds;
    if !arguments.json {
        let [middle, deviation] = [seconds * 1e3, deviation_seconds * 1e3];
        out::line!("{label:<24} {middle:>10.3} ± {deviation:.3} ms {tokens_per_second:>12.1} tokens/s")?;
    }
    Ok(Figure { case, tokens, depth, seconds, deviation_seconds, tokens_per_second })
}

/// Runs all that is to be timed on a model that computes nothing.
fn compiled(arguments: &Arguments, model: &Model) -> Result<(), ModelError> {
    let options = GenerationOptions::default().with_max_tokens(generated(arguments));
    for &depth in &arguments.depth {
        let before = [if depth == 0 { PROMPT } else { depth }];
        dry_generation(model, &before, &options)?;
        if arguments.guesses.draft_accept.is_some() {
            dry_speculation(model, &before, &options, arguments.guesses.most())?;
        }
        for &tokens in prompts(arguments) {
            dry_generation(model, &[depth, tokens], &options)?;
        }
    }
    Ok(())
}

/// Checks that every text fits the model's context, before the first is timed.
fn check(arguments: &Arguments, model: &Model) -> Result<(), Failure> {
    let limit = model.config().max_position_embeddings;
    for &depth in &arguments.depth {
        let written = generated(arguments).saturating_add(if depth == 0 { PROMPT } else { 0 });
        for tokens in prompts(arguments).iter().copied().chain([written]) {
            let tokens = tokens.saturating_add(depth);
            if tokens > limit {
                return Err(ModelError::ContextLength { tokens, limit }.into());
            }
        }
    }
    Ok(())
}

/// Pseudo-random ids.
pub(super) fn ids(model: &Model, count: usize) -> Vec<u32> {
    let vocab_size = model.config().vocab_size as u64;
    (0..count as u64)
        .map(|i| ((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % vocab_size)
        .map(|id| id as u32)
        .collect()
}

/// The time of a prompt's logits, after the text before it.
fn prompt_seconds(model: &Model, text: &[u32], tokens: usize) -> Result<f64, Failure> {
    let prompt = ids(model, tokens);
    let mut session = Session::new(model);
    if !text.is_empty() {
        session.prefill(text, |_| Continue(()))?;
        model.synchronize()?;
    }
    let start = Instant::now();
    let logits = session.prefill(&prompt, |_| Continue(()))?.ok_or("the prompt was interrupted")?;
    model.synchronize()?;
    let seconds = start.elapsed().as_secs_f64();
    // NaN and infinity are computed at another speed.
    argmax(&logits.to_device(model.host())?)?;
    Ok(seconds)
}

/// The time from the text's logits to the last token, in a session that is cleared first.
fn generation_seconds(session: &mut Session<'_>, text: &[u32], tokens: usize) -> Result<f64, Failure> {
    session.clear()?;
    let logits = session.prefill(text, |_| Continue(()))?.ok_or("the prompt was interrupted")?;
    logits.device().synchronize()?;
    let options = GenerationOptions::default().with_max_tokens(tokens);
    let start = Instant::now();
    session.generate(logits, &options, |_| Continue(()))?;
    Ok(start.elapsed().as_secs_f64())
}
