//! `bench --model --batch`: many sequences side by side, as llama.cpp's llama-batched-bench times
//! them: all prompts are read, on a GPU several in a pass, and then each step writes a token of
//! each.

use super::model::{generated, ids};
use super::{Arguments, print_figures};
use crate::options::ModelOptions;
use crate::{Failure, out, progress};
use lowbit::{Checkpoint, Device, GenerationOptions, Model, dry_batches};
use lowbit_kernels::bench::Times;
use lowbit_kernels::ops::{PAGE_TOKENS, argmax};
use lowbit_models::{
    BatchRow, BatchSteps, Cache, CachePool, Logits, ModelError, PoolCache, PoolSequence, Sequence,
};
use std::time::Instant;

/// A measured case.
#[derive(serde::Serialize)]
struct Figure {
    case: &'static str,
    /// Sequences.
    batch: usize,
    /// Tokens of each prompt, and of each reply.
    prompt_tokens: usize,
    generated_tokens: usize,
    /// The medians of the runs, of all sequences together.
    prompt_seconds: f64,
    seconds: f64,
    prompt_tokens_per_second: f64,
    tokens_per_second: f64,
}

/// Tokens of each prompt, unless a flag says otherwise.
const PROMPT: usize = 512;

/// Tokens of a pass over several prompts: those of an engine's.
const PASS: usize = 4096;

/// The model, with the kernels that `compile` needs, and the lengths of prompts.
pub(super) fn loaded(
    arguments: &Arguments,
    compile: impl FnOnce(&Model, usize, &GenerationOptions) -> Result<(), ModelError> + Send,
) -> Result<(Checkpoint, Model, &[usize]), Failure> {
    let prompts = if arguments.prompt_tokens.is_empty() { &[PROMPT][..] } else { &arguments.prompt_tokens };
    let (target, checkpoint) = (arguments.model.target()?, arguments.model.open()?);
    let most = arguments.batch.iter().copied().max().unwrap_or(1);
    let options = GenerationOptions::default();
    let model = ModelOptions::load_opened(&checkpoint, &target, |model| compile(model, most, &options))?;
    let (generated, limit) = (generated(arguments), model.config().max_position_embeddings);
    for &prompt in prompts {
        let tokens = prompt.saturating_add(generated);
        if tokens > limit {
            return Err(ModelError::ContextLength { tokens, limit }.into());
        }
    }
    Ok((checkpoint, model, prompts))
}

/// Times each number of sequences with prompts of each length.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (checkpoint, model, prompts) = loaded(arguments, dry_batches)?;
    let generated = generated(arguments);
    if !arguments.json {
        out::line!(
            "{:>6} {:>8} {:>8} {:>12} {:>16} {:>12} {:>16}",
            "batch",
            "prompt",
            "reply",
            "prompts ms",
            "prompt tokens/s",
            "replies ms",
            "reply tokens/s"
        )?;
    }
    let mut figures = vec![];
    for &prompt in prompts {
        for &batch in &arguments.batch {
            figures.push(measure(arguments, &model, (batch, prompt, generated))?);
        }
    }
    if arguments.json {
        print_figures(&figures, checkpoint.path(), model.device())?;
    }
    Ok(())
}

fn measure(
    arguments: &Arguments,
    model: &Model,
    (batch, prompt, generated): (usize, usize, usize),
) -> Result<Figure, Failure> {
    let spinner = progress::spinner(format!("{batch} of {prompt} + {generated}"));
    let mut side = Side::new(model, batch, prompt + generated)?;
    let (mut reading, mut writing) = (vec![], vec![]);
    // The first run compiles kernels and captures the step.
    for run in 0..=arguments.runs {
        let times = side.run(model, prompt, generated)?;
        if run > 0 {
            reading.push(times.0);
            writing.push(times.1);
        }
    }
    spinner.finish_and_clear();
    let [prompt_seconds, seconds] = [reading, writing].map(|times| Times::new(times).median);
    let rate = |tokens: usize, seconds| (batch * tokens) as f64 / seconds;
    let figure = Figure {
        case: "batch",
        batch,
        prompt_tokens: prompt,
        generated_tokens: generated,
        prompt_seconds,
        seconds,
        prompt_tokens_per_second: rate(prompt, prompt_seconds),
        tokens_per_second: rate(generated, seconds),
    };
    if !arguments.json {
        out::line!(
            "{batch:>6} {prompt:>8} {generated:>8} {:>12.1} {:>16.1} {:>12.1} {:>16.1}",
            prompt_seconds * 1e3,
            figure.prompt_tokens_per_second,
            seconds * 1e3,
            figure.tokens_per_second
        )?;
    }
    Ok(figure)
}

/// The caches of all sequences, as the engine has them on this device.
enum Side {
    /// On a GPU, in a pool.
    Pooled {
        pool: Box<CachePool>,
        steps: Box<BatchSteps>,
        batch: usize,
        context: usize,
    },
    Own {
        batch: usize,
    },
}

impl Side {
    fn new(model: &Model, batch: usize, context: usize) -> Result<Self, Failure> {
        let Device::Gpu(_) = model.device() else { return Ok(Self::Own { batch }) };
        let pages = batch * context.div_ceil(PAGE_TOKENS);
        let (pool, steps) =
            (CachePool::new(model, pages, batch, 0)?, BatchSteps::new(model, batch, context, 0)?);
        Ok(Self::Pooled { pool: Box::new(pool), steps: Box::new(steps), batch, context })
    }

    /// The seconds of all prompts, and of all replies.
    fn run(&mut self, model: &Model, prompt: usize, generated: usize) -> Result<(f64, f64), Failure> {
        match self {
            Self::Own { batch } => own(model, *batch, prompt, generated),
            Self::Pooled { pool, steps, batch, context } => {
                let sizes = (*batch, prompt, generated, *context);
                pooled(model, pool, steps, sizes)
            }
        }
    }
}

/// The prompt of a sequence: its own.
pub(super) fn prompt_of(model: &Model, sequence: usize, tokens: usize) -> Vec<u32> {
    ids(model, tokens + sequence).split_off(sequence)
}

fn pooled(
    model: &Model,
    pool: &mut CachePool,
    steps: &mut BatchSteps,
    (batch, prompt, generated, context): (usize, usize, usize, usize),
) -> Result<(f64, f64), Failure> {
    let mut texts: Vec<(Vec<u32>, PoolCache)> = vec![];
    let start = Instant::now();
    for sequence in 0..batch {
        let mut cache = pool.cache()?.ok_or("the pool has too few slots")?;
        pool.make_room(&mut cache, context);
        texts.push((prompt_of(model, sequence, prompt), cache));
    }
    for texts in texts.chunks_mut((PASS / prompt.max(1)).max(1)) {
        let batch = texts.iter_mut().map(|(tokens, cache)| PoolSequence { tokens, cache, marks: &[] });
        let logits = model.forward_batch_in(pool, &mut batch.collect::<Vec<_>>(), Logits::Last)?;
        for ((text, _), id) in texts.iter_mut().zip(first(model, logits.as_ref())?) {
            text.push(id);
        }
    }
    let prompt_seconds = start.elapsed().as_secs_f64();
    let options = GenerationOptions::default().with_repetition_context(0);
    let start = Instant::now();
    for step in 1..=generated {
        let mut rows = vec![];
        for (id, (text, cache)) in texts.iter_mut().enumerate() {
            let (options, sampled) = (&options, step as u32);
            let (rules, draws, logprobs) = (None, true, None);
            rows.push(BatchRow { id: id as u64, cache, text, sampled, options, rules, draws, logprobs });
        }
        let drawn = steps.step(model, pool, &mut rows)?;
        drop(rows);
        for ((text, _), drawn) in texts.iter_mut().zip(drawn) {
            text.push(drawn.id?);
        }
    }
    Ok((prompt_seconds, start.elapsed().as_secs_f64()))
}

/// The likeliest token of each row.
fn first(model: &Model, logits: Option<&lowbit::Tensor>) -> Result<Vec<u32>, Failure> {
    let logits = logits.ok_or("there are no logits")?.to_device(model.host())?;
    Ok(argmax(&logits)?.as_slice::<u32>()?.to_vec())
}

fn own(model: &Model, batch: usize, prompt: usize, generated: usize) -> Result<(f64, f64), Failure> {
    let mut texts: Vec<(u32, Cache)> = vec![];
    let start = Instant::now();
    for sequence in 0..batch {
        let (text, mut cache) = (prompt_of(model, sequence, prompt), model.cache());
        let logits = model.forward(&text, &mut cache, Logits::Last)?;
        texts.push((first(model, logits.as_ref())?[0], cache));
    }
    let prompt_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for _ in 0..generated {
        let mut rows: Vec<_> = texts
            .iter_mut()
            .map(|(id, cache)| Sequence { tokens: std::slice::from_ref(id), cache })
            .collect();
        let logits = model.forward_batch(&mut rows, Logits::Last)?.ok_or("there are no logits")?;
        drop(rows);
        let drawn = argmax(&logits.to_device(model.host())?)?;
        for ((id, _), drawn) in texts.iter_mut().zip(drawn.as_slice::<u32>()?) {
            *id = *drawn;
        }
    }
    Ok((prompt_seconds, start.elapsed().as_secs_f64()))
}
