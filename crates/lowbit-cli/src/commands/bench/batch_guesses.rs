//! `bench --model --batch --draft-accept`: requests of an engine side by side, without guesses and
//! with guesses of which a given share is right.

use super::batch::{loaded, prompt_of};
use super::model::generated;
use super::{Arguments, print_figures};
use crate::{Failure, out, progress};
use lowbit::{GenerationOptions, Model, dry_batches, dry_guesses};
use lowbit_engine::{Backend, Engine, EngineOptions, Event, Guesses, Request};
use lowbit_kernels::bench::Times;
use lowbit_kernels::ops::PAGE_TOKENS;
use lowbit_models::Script;
use std::collections::HashMap;
use std::ops::ControlFlow::{Break, Continue};
use std::sync::mpsc::channel;
use std::time::Duration;

/// A measured case.
#[derive(serde::Serialize)]
struct Figure {
    case: &'static str,
    /// Sequences.
    batch: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// Of all sequences together, by the time of the passes that write: the medians of the runs.
    tokens_per_second: f64,
    guessing_tokens_per_second: f64,
    gain: f64,
    /// Guesses in all runs, and those of them that became tokens.
    drafted_tokens: u64,
    accepted_tokens: u64,
}

/// Guesses of a row whose kernels are compiled ahead: a GPU's.
const MOST_ON_GPUS: usize = 3;

/// The texts of the last replies, by their prompts.
type Texts = HashMap<Vec<u32>, Vec<u32>>;

/// Times each number of sequences with prompts of each length.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let guesses = arguments.guesses.most().min(MOST_ON_GPUS);
    let (checkpoint, model, prompts) = loaded(arguments, |model, most, options| {
        dry_batches(model, most, options)?;
        dry_guesses(model, (most, guesses), options)
    })?;
    if !arguments.json {
        let titles = ["batch", "prompt", "reply", "tokens/s", "with guesses", "gain", "guesses", "right"];
        let [batch, prompt, reply, plain, guessing, gain, guesses, right] = titles;
        out::line!(
            "{batch:>6} {prompt:>8} {reply:>8} {plain:>10} {guessing:>13} {gain:>6} {guesses:>9} {right:>9}"
        )?;
    }
    let mut figures = vec![];
    for &prompt in prompts {
        for &batch in &arguments.batch {
            let figure = measure(arguments, &model, (batch, prompt))?;
            if !arguments.json {
                out::line!(
                    "{batch:>6} {prompt:>8} {:>8} {:>10.1} {:>13.1} {:>6.2} {:>9} {:>9}",
                    figure.generated_tokens,
                    figure.tokens_per_second,
                    figure.guessing_tokens_per_second,
                    figure.gain,
                    figure.drafted_tokens,
                    figure.accepted_tokens
                )?;
            }
            figures.push(figure);
        }
    }
    if arguments.json {
        print_figures(&figures, checkpoint.path(), model.device())?;
    }
    Ok(())
}

fn measure(arguments: &Arguments, model: &Model, (batch, prompt): (usize, usize)) -> Result<Figure, Failure> {
    let tokens = generated(arguments);
    let spinner = progress::spinner(format!("{batch} of {prompt} + {tokens}"));
    let requests: Vec<Request> = (0..batch)
        .map(|sequence| {
            let options = GenerationOptions::default().with_max_tokens(tokens).with_repetition_context(0);
            Request::new(prompt_of(model, sequence, prompt)).with_options(options)
        })
        .collect();
    let pages = batch * ((prompt + tokens).div_ceil(PAGE_TOKENS) + 2);
    let size = model.cache_size()?;
    // A quarter is for states, and one place more than there are sequences is nobody's.
    let bytes = (pages * PAGE_TOKENS * size.whole_per_token()) + 5 * (batch + 1) * size.fixed;
    let options = EngineOptions::new(model.device())
        .with_max_running(batch)
        .with_max_waiting(batch)
        .with_cache_bytes(2 * bytes)
        .with_prefix_cache(false)
        .with_target_inter_token(Duration::from_secs(60));
    let times = |engine: &Engine| -> Result<(f64, Texts), Failure> {
        let (mut seconds, mut texts) = (vec![], Texts::new());
        // The first run compiles kernels, captures steps, and tells what they take.
        for run in 0..=arguments.runs {
            let (time, last) = replies(engine, &requests)?;
            texts = last;
            if run > 0 {
                seconds.push(time);
            }
        }
        Ok((Times::new(seconds).median, texts))
    };
    let (plain, texts) = times(&Engine::start(model.clone(), options.clone())?)?;
    let share = arguments.guesses.draft_accept.unwrap_or(1.0);
    let script = Guesses::of_drafters(move |request| {
        Box::new(Script::new(texts.get(&request.prompt).cloned().unwrap_or_default(), share))
    });
    let options = options.with_guesses(script.with_most(arguments.guesses.most()));
    let engine = Engine::start(model.clone(), options)?;
    let (guessing, _) = times(&engine)?;
    let stats = engine.stats();
    spinner.finish_and_clear();
    // The first token of each is its prompt's.
    let rate = |seconds| (batch * (tokens - 1).max(1)) as f64 / seconds;
    Ok(Figure {
        case: "batch with guesses",
        batch,
        prompt_tokens: prompt,
        generated_tokens: tokens,
        tokens_per_second: rate(plain),
        guessing_tokens_per_second: rate(guessing),
        gain: plain / guessing,
        drafted_tokens: stats.drafted_tokens,
        accepted_tokens: stats.accepted_tokens,
    })
}

/// The time of the passes that write the replies, and the texts.
fn replies(engine: &Engine, requests: &[Request]) -> Result<(f64, Texts), Failure> {
    let before = engine.stats().decode_time;
    let mut asked = vec![];
    for request in requests {
        let (sender, events) = channel();
        let sink = move |event| if sender.send(event).is_ok() { Continue(()) } else { Break(()) };
        asked.push((engine.submit(request.clone(), Box::new(sink))?, events));
    }
    let mut texts = Texts::new();
    for (request, (_handle, events)) in requests.iter().zip(asked) {
        let mut text = request.prompt.clone();
        for event in events {
            match event {
                Event::Token { id, .. } => text.push(id),
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        texts.insert(request.prompt.clone(), text);
    }
    while !engine.stats().is_idle() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(((engine.stats().decode_time - before).as_secs_f64(), texts))
}
